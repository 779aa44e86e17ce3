"""The gated feed-forward part of a decoder layer (SwiGLU and its like).

Refuses to know: norms, residuals.
"""

from __future__ import annotations

from torch import Tensor, nn

from models.layers.linear import GatedLinear


class GatedMLP(nn.Module):
    """``down(activation(gate(x)) * up(x))`` (Shazeer, arXiv:2002.05202).

    Args:
        hidden_size: of input and output.
        intermediate_size: of the gated middle.
        bias: whether the three projections have one.
        activation: see ``ops.gated_mul``.
        stored_joined: see ``JoinedLinear``.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool,
        activation: str = "silu",
        stored_joined: bool = False,
    ) -> None:
        super().__init__()
        parts = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up_proj = GatedLinear(
            hidden_size, parts, bias=bias, activation=activation, stored_joined=stored_joined
        )
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Compute ``[num_tokens, hidden_size]`` -> ``[num_tokens, hidden_size]``."""
        out: Tensor = self.down_proj(self.gate_up_proj(x))
        return out
