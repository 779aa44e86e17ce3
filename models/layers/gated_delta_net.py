"""The recurrent token mixer of Qwen3-Next and Qwen3.5: a convolution, then the gated delta rule.

Yang et al., arXiv:2412.06464.

Refuses to know: which layers use this mixer, which request a slot belongs to, how states are
computed.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from models.base import Rotations, StateContext
from models.layers.computing import Computing
from models.layers.gated_norm import GatedRMSNorm
from models.layers.linear import JoinedLinear, RegroupedLinear
from models.layers.short_conv import ShortConv
from models.recipe import DeltaNetSpec


class GatedDeltaNet(Computing):
    """Gated delta net: a mixer with a state, in place of attention.

    Qwen3-Next's checkpoints group the rows of the projections by key head: each key head's rows are
    followed by the rows of its value heads. Qwen3.5's checkpoints store each projection separately.
    This layer keeps the rows in the order that the convolution and the rule read::

        | query | key | value | gate (size of value) | b (value heads) | a (value heads) |

    Args:
        spec: shape of the layer, and how checkpoints store it.
        hidden_size: size of input and output.
        eps: epsilon of the norm.
        layer_index: index of this layer in the KV cache.
    """

    def __init__(self, spec: DeltaNetSpec, hidden_size: int, eps: float, layer_index: int) -> None:
        super().__init__()
        self._spec = spec
        self._layer_index = layer_index
        num_heads, key_dim = spec.num_value_heads, spec.key_dim
        per_key = num_heads // spec.num_key_heads
        self._key_size = spec.num_key_heads * key_dim
        self._value_size = num_heads * spec.value_dim
        num_channels = spec.num_channels
        self.in_proj: JoinedLinear
        if spec.stored_by_key_head:
            by_key = {
                "in_proj_qkvz": (key_dim, key_dim, *(per_key * spec.value_dim,) * 2),
                "in_proj_ba": (per_key, per_key),
            }
            self.in_proj = RegroupedLinear(hidden_size, spec.num_key_heads, by_key, bias=False)
        else:
            parts = {"in_proj_qkv": num_channels, "in_proj_z": self._value_size}
            parts |= dict.fromkeys(("in_proj_b", "in_proj_a"), num_heads)
            self.in_proj = JoinedLinear(hidden_size, parts, bias=False)
        self.conv1d = ShortConv(num_channels, spec.kernel_size, bias=False, has_silu=True)
        self.dt_bias = nn.Parameter(torch.empty(num_heads))
        self.A_log = nn.Parameter(torch.empty(num_heads))
        size = spec.value_dim
        self.norm = GatedRMSNorm(size, size, eps, norm_before_gate=True)
        self.out_proj = nn.Linear(self._value_size, hidden_size, bias=False)

    def forward(self, hidden: Tensor, rotations: Rotations, context: StateContext) -> Tensor:
        """Mix the step's tokens, ``[num_tokens, hidden_size]``; ``rotations`` is ignored."""
        spec, num_tokens, num_heads = self._spec, len(hidden), self._spec.num_value_heads
        # [num_slots, num_channels, kernel_size - 1], [num_slots, heads, key_dim, value_dim]
        metadata, (conv_states, states) = context.state_layer(self._layer_index)
        projected = self.in_proj(hidden)
        keys_end, gate_start = 2 * self._key_size, 2 * self._key_size + self._value_size
        gate_end = gate_start + self._value_size
        mixed = self.conv1d(projected[:, :gate_start], conv_states, metadata)
        by_key = (num_tokens, spec.num_key_heads, spec.key_dim)
        recalled = self.ops.gated_delta_rule(
            mixed[:, : self._key_size].view(by_key),
            mixed[:, self._key_size : keys_end].view(by_key),
            mixed[:, keys_end:].view(num_tokens, num_heads, spec.value_dim),
            projected[:, gate_end + num_heads :],
            projected[:, gate_end : gate_end + num_heads],
            *(self.A_log, self.dt_bias, states, metadata),
        )  # [num_tokens, num_heads, value_dim]
        gate = projected[:, gate_start:gate_end]
        out: Tensor = self.out_proj(self.norm(recalled.view(num_tokens, self._value_size), gate))
        return out
