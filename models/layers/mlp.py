"""The gated feed-forward part of a decoder layer (SwiGLU). Refuses to know: norms, residuals."""

from __future__ import annotations

from torch import Tensor, nn

from models.layers.linear import GatedLinear


class GatedMLP(nn.Module):
    """``down(silu(gate(x)) * up(x))`` (Shazeer, arXiv:2002.05202).

    Args:
        hidden_size: of input and output.
        intermediate_size: of the gated middle.
        bias: whether the three projections have one.
    """

    def __init__(self, hidden_size: int, intermediate_size: int, *, bias: bool) -> None:
        super().__init__()
        parts = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up_proj = GatedLinear(hidden_size, parts, bias=bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Compute ``[num_tokens, hidden_size]`` -> ``[num_tokens, hidden_size]``."""
        out: Tensor = self.down_proj(self.gate_up_proj(x))
        return out
