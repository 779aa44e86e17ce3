"""RMSNorm as a module: a weight and an epsilon around the op. Refuses to know: where it stands."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import baton_kernels as ops


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension.

    Args:
        size: of the last dimension.
        eps: added to the mean square.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """``[..., size]`` -> ``[..., size]``."""
        return ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """``(norm(x + residual), x + residual)``, each ``[num_tokens, size]``."""
        return ops.add_rms_norm(x, residual, self.weight, self.eps)
