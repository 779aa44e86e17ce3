"""Mamba 2's token mixer: a convolution, a state space, a gated norm (Dao and Gu, arXiv:2405.21060).

Refuses to know: which layers use this mixer, which request a slot belongs to, how states are
computed.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from models.base import Rotations, StateContext
from models.layers.computing import Computing
from models.layers.gated_norm import GatedRMSNorm
from models.layers.short_conv import ShortConv
from models.recipe import Mamba2Spec


class Mamba2(Computing):
    """Mamba 2: a mixer with a state, in place of attention.

    One projection computes everything that a token needs; the convolution reads ``x``, ``b``,
    ``c``::

        | gate (inner_size) | x (inner_size) | b (groups * state_dim) | c (size of b) | dt (heads) |

    Args:
        spec: shape of the layer.
        hidden_size: size of input and output.
        eps: epsilon of the norm.
        layer_index: index of this layer in the KV cache.
    """

    def __init__(self, spec: Mamba2Spec, hidden_size: int, eps: float, layer_index: int) -> None:
        super().__init__()
        self._spec = spec
        self._layer_index = layer_index
        inner_size, num_heads = spec.inner_size, spec.num_heads
        num_channels = spec.num_channels
        size = inner_size + num_channels + num_heads
        self.in_proj = nn.Linear(hidden_size, size, bias=spec.proj_bias)
        self.conv1d = ShortConv(num_channels, spec.kernel_size, bias=spec.conv_bias, has_silu=True)
        self.dt_bias = nn.Parameter(torch.empty(num_heads))
        self.A_log = nn.Parameter(torch.empty(num_heads))
        self.D = nn.Parameter(torch.empty(num_heads))
        group_size = inner_size // spec.num_groups
        self.norm = GatedRMSNorm(inner_size, group_size, eps, norm_before_gate=False)
        self.out_proj = nn.Linear(inner_size, hidden_size, bias=spec.proj_bias)

    def forward(self, hidden: Tensor, rotations: Rotations, context: StateContext) -> Tensor:
        """Mix the step's tokens, ``[num_tokens, hidden_size]``; ``rotations`` is ignored."""
        spec = self._spec
        # [num_slots, num_channels, kernel_size - 1], [num_slots, num_heads, state_dim, head_dim]
        metadata, (conv_states, states) = context.state_layer(self._layer_index)
        projected = self.in_proj(hidden)
        inner_size, num_channels = spec.inner_size, spec.num_channels
        gate, dt = projected[:, :inner_size], projected[:, inner_size + num_channels :]
        mixed = projected[:, inner_size : inner_size + num_channels]
        mixed = self.conv1d(mixed, conv_states, metadata)  # [num_tokens, num_channels]
        by_group = (len(hidden), spec.num_groups, spec.state_dim)
        b_end = inner_size + spec.num_groups * spec.state_dim
        scanned = self.ops.selective_scan(
            mixed[:, :inner_size].view(len(hidden), spec.num_heads, spec.head_dim),
            dt,
            mixed[:, inner_size:b_end].view(by_group),
            mixed[:, b_end:].view(by_group),
            *(self.A_log, self.dt_bias, self.D, states, metadata),
        )  # [num_tokens, num_heads, head_dim]
        out: Tensor = self.out_proj(self.norm(scanned.view(len(hidden), inner_size), gate))
        return out
