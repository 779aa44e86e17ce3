"""A short causal convolution per channel; a request's state holds the channel's latest inputs.

Refuses to know: the channels' meaning, which request a slot belongs to.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import baton_kernels as ops
from models.base import Rotations, StateContext
from models.layers.computing import Computing
from models.recipe import ShortConvSpec


class ShortConv(Computing):
    """A short convolution, depthwise and causal.

    Args:
        num_channels: number of channels of the input, and of the output.
        kernel_size: number of tokens whose inputs a result depends on, including the token itself.
        bias: whether each channel has a bias.
        has_silu: whether ``silu`` is applied to the result.
    """

    def __init__(self, num_channels: int, kernel_size: int, *, bias: bool, has_silu: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_channels, 1, kernel_size))
        self.bias = nn.Parameter(torch.empty(num_channels)) if bias else None
        self._has_silu = has_silu

    @property
    def state_shape(self) -> tuple[int, int]:
        """Return the shape of a state: ``(num_channels, kernel_size - 1)``."""
        num_channels, _, kernel_size = self.weight.shape
        return num_channels, kernel_size - 1

    def forward(
        self,
        x: Tensor,
        states: Tensor,
        metadata: ops.StateMetadata,
        *,
        in_gate: Tensor | None = None,
        out_gate: Tensor | None = None,
    ) -> Tensor:
        """Convolve ``x``, ``[num_tokens, num_channels]``, and update the requests' states."""
        num_channels, _, kernel_size = self.weight.shape
        weight = self.weight.view(num_channels, kernel_size)
        return self.ops.causal_conv(
            *(x, weight, self.bias, states, metadata),
            has_silu=self._has_silu,
            in_gate=in_gate,
            out_gate=out_gate,
        )


class GatedShortConv(nn.Module):
    """``out(C * conv(B * x))``, where ``B``, ``C`` and ``x`` are projections of the input.

    Args:
        spec: shape of the layer.
        layer_index: index of this layer in the KV cache.
    """

    def __init__(self, spec: ShortConvSpec, layer_index: int) -> None:
        super().__init__()
        size, bias = spec.num_channels, spec.bias
        self._layer_index = layer_index
        self.in_proj = nn.Linear(size, 3 * size, bias=bias)
        self.conv = ShortConv(size, spec.kernel_size, bias=bias, has_silu=False)
        self.out_proj = nn.Linear(size, size, bias=bias)

    def forward(self, hidden: Tensor, rotations: Rotations, context: StateContext) -> Tensor:
        """Mix the step's tokens, ``[num_tokens, hidden_size]``; ``rotations`` is ignored."""
        metadata, (states,) = context.state_layer(self._layer_index)
        in_gate, out_gate, x = self.in_proj(hidden).chunk(3, dim=-1)  # [num_tokens, hidden_size]
        mixed = self.conv(x, states, metadata, in_gate=in_gate, out_gate=out_gate)
        out: Tensor = self.out_proj(mixed)
        return out
