"""RMSNorm as a module with a weight. Refuses to know: where a model applies the norm."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from models.layers.computing import Computing
from models.recipe import NormWeight


class RMSNorm(Computing):
    """Root-mean-square norm over the last dimension.

    Args:
        size: size of the last dimension.
        eps: added to the mean square.
        kind: how the weight is applied.
    """

    def __init__(self, size: int, eps: float, kind: NormWeight = NormWeight.OWN) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps
        self._kind = kind

    def keep_loaded(self, weight: Tensor) -> Tensor:
        """Convert a checkpoint's weight, ``[size]``, to the form that `forward` needs."""
        if self._kind == NormWeight.OWN:
            return weight
        return weight.float() + (1.0 if self._kind == NormWeight.OFFSET else 0.0)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``x``, ``[..., size]``, over the last dimension."""
        return self.ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor, factor: float = 1.0) -> tuple[Tensor, Tensor]:
        """Add ``x * factor`` to the residual stream; return the normalized sum, and the sum.

        All tensors are ``[num_tokens, size]``; ``residual`` is not changed.
        """
        return self.ops.add_rms_norm(x, residual, self.weight, self.eps, factor)


class NoNorm(Computing):
    """A placeholder where this architecture has no norm."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the input unchanged."""
        return x

    def add(self, x: Tensor, residual: Tensor, factor: float = 1.0) -> tuple[Tensor, Tensor]:
        """Return ``residual + x * factor`` twice: without a norm, the normalized sum is the sum."""
        total = self.ops.scaled_add(x, residual, factor)
        return total, total
