"""A short causal convolution of channels, whose state is their newest inputs.

Refuses to know: what the channels are, who owns a slot.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import baton_kernels as ops


class ShortConv(nn.Module):
    """Depthwise, and causal.

    Args:
        num_channels: of input and output.
        kernel_size: inputs that a token sees, its own included.
        bias: whether each channel has one.
        has_silu: whether the result goes through ``silu``.
    """

    def __init__(self, num_channels: int, kernel_size: int, *, bias: bool, has_silu: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_channels, 1, kernel_size))
        self.bias = nn.Parameter(torch.empty(num_channels)) if bias else None
        self._has_silu = has_silu

    @property
    def state_shape(self) -> tuple[int, int]:
        """Shape of a state: ``(num_channels, kernel_size - 1)``."""
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
        """Convolve ``[num_tokens, num_channels]``; see ``baton_kernels.recurrent.causal_conv``."""
        num_channels, _, kernel_size = self.weight.shape
        weight = self.weight.view(num_channels, kernel_size)
        return ops.causal_conv(
            *(x, weight, self.bias, states, metadata),
            has_silu=self._has_silu,
            in_gate=in_gate,
            out_gate=out_gate,
        )
