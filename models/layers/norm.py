"""RMSNorm as a module with a weight and an epsilon. Refuses to know: where it is applied."""

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
        kind: kind of weight.
    """

    def __init__(self, size: int, eps: float, kind: NormWeight = NormWeight.OWN) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps
        self._kind = kind

    def keep_loaded(self, weight: Tensor) -> Tensor:
        """Return a checkpoint's weight ``[size]`` in the form that this module stores."""
        if self._kind == NormWeight.OWN:
            return weight
        return weight.float() + (1.0 if self._kind == NormWeight.OFFSET else 0.0)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``[..., size]`` over the last dimension."""
        return self.ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor, factor: float = 1.0) -> tuple[Tensor, Tensor]:
        """Return ``(norm(sum), sum)`` of ``residual + x * factor``, each ``[num_tokens, size]``."""
        return self.ops.add_rms_norm(x, residual, self.weight, self.eps, factor)


class NoNorm(Computing):
    """A placeholder for a norm that this architecture lacks."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the input unchanged."""
        return x

    def add(self, x: Tensor, residual: Tensor, factor: float = 1.0) -> tuple[Tensor, Tensor]:
        """Return ``residual + x * factor`` twice: as the normed value and as the sum."""
        total = self.ops.scaled_add(x, residual, factor)
        return total, total
