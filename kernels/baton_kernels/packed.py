"""A linear layer's weight as CPU kernels read it: in panels, in a storage type of its own.

Refuses to know: what computes with it, and layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

INT8_LIMIT = 127


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """``[out_features, in_features]``, cut into panels of neighbouring outputs.

    ::

        panels[p, k, i] * scales[p * width + i]  ==  weight[p * width + i, k]

    The last panel is filled up with zeros. int8 is symmetric, one scale per output: the largest
    weight of each output becomes 127 (weight-only quantization; activations stay what they are).
    """

    panels: Tensor  # [ceil(out_features / width), in_features, width] float32, bfloat16 or int8
    scales: Tensor | None  # [out_features] float32; None: all are 1
    bias: Tensor | None  # [out_features] float32
    out_features: int

    @classmethod
    def pack(
        cls,
        weight: Tensor,
        bias: Tensor | None,
        storage: torch.dtype,
        width: int,
        prepare: Callable[[Tensor], None] = lambda panels: None,
    ) -> PackedWeight:
        """Pack ``weight``, ``[out_features, in_features]``; neither tensor is kept.

        Args:
            prepare: given the panels' memory before it is written.
        """
        scales = None
        if storage == torch.int8:
            limits = weight.abs().amax(dim=1).float().clamp(min=1e-30)  # [out_features]
            scales = limits / INT8_LIMIT
            weight = (weight.float() / scales.unsqueeze(1)).round()
        out_features, in_features = weight.shape
        num_panels = -(-out_features // width)
        rows = torch.zeros(num_panels * width, in_features, dtype=storage)
        rows[:out_features] = weight
        panels = torch.empty(num_panels, in_features, width, dtype=storage)
        prepare(panels)
        panels.copy_(rows.view(num_panels, width, in_features).transpose(1, 2))
        return cls(panels, scales, None if bias is None else bias.float(), out_features)

    def unpacked(self) -> Tensor:
        """Unpack to ``[out_features, in_features]`` float32."""
        rows = self.panels.transpose(1, 2).flatten(0, 1)[: self.out_features].float()
        return rows if self.scales is None else rows * self.scales.unsqueeze(1)
