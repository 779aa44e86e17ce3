"""The gated norm at the end of recurrent mixers. Refuses to know: how gates are computed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from models.layers.computing import Computing


class GatedRMSNorm(Computing):
    """Root-mean-square norm of groups, times ``silu(gate)``.

    Args:
        weight_size: size of the weight: of all groups together, or of one group if groups share the
            weight.
        group_size: elements that are normalized together.
        eps: added to the mean square.
        norm_before_gate: whether the gate is applied after the norm.
    """

    def __init__(
        self, weight_size: int, group_size: int, eps: float, *, norm_before_gate: bool
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(weight_size))
        self._group_size = group_size
        self._eps = eps
        self._norm_before_gate = norm_before_gate

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Normalize ``x`` and multiply by ``silu(gate)``; each is ``[num_tokens, size]``."""
        return self.ops.gated_rms_norm(
            *(x, gate, self.weight, self._eps),
            group_size=self._group_size,
            norm_before_gate=self._norm_before_gate,
        )
