"""The feed-forward part of a decoder layer: gated (such as SwiGLU), or a squared ReLU.

Refuses to know: norms, residuals.
"""

from __future__ import annotations

from torch import Tensor, nn

from models.layers.computing import Computing
from models.layers.linear import GatedLinear, keep_inputs, keep_outputs
from models.parallel.shards import Rank


class GatedMLP(nn.Module):
    """``down(activation(gate(x)) * up(x))`` (Shazeer, arXiv:2002.05202).

    Args:
        hidden_size: size of input and output.
        intermediate_size: size between the projections, after gating.
        bias: whether each of the three projections has a bias.
        activation: activation of the gate, one of ``ops.ACTIVATIONS``.
        stored_joined: whether checkpoints have one tensor for gate and up projection.
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

    can_share = True

    def shard(self, rank: Rank) -> None:
        """Keep this rank's part of the intermediate size; call before weights are loaded."""
        span = rank.wide_span(self.down_proj.in_features)
        keep_outputs(self.gate_up_proj, span, span)
        keep_inputs(self.down_proj, span, adds_bias=rank.rank == 0)

    def forward(self, x: Tensor) -> Tensor:
        """Return the MLP's results for ``x``, ``[num_tokens, hidden_size]``."""
        out: Tensor = self.down_proj(self.gate_up_proj(x))
        return out


class SquaredReluMLP(Computing):
    """``down(relu(up(x)) ** 2)``, an MLP without gates (So et al., arXiv:2109.08668).

    Args:
        hidden_size: size of input and output.
        intermediate_size: size between the two projections.
        bias: whether each of the two projections has a bias.
    """

    def __init__(self, hidden_size: int, intermediate_size: int, *, bias: bool) -> None:
        super().__init__()
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)

    can_share = True

    def shard(self, rank: Rank) -> None:
        """Keep this rank's part of the intermediate size; call before weights are loaded."""
        span = rank.wide_span(self.down_proj.in_features)
        keep_outputs(self.up_proj, span)
        keep_inputs(self.down_proj, span, adds_bias=rank.rank == 0)

    def forward(self, x: Tensor) -> Tensor:
        """Return the MLP's results for ``x``, ``[num_tokens, hidden_size]``."""
        up = self.up_proj(x)
        out: Tensor = self.down_proj(self.ops.gate_mul(up, up, "relu"))
        return out
