"""A linear layer's weight as CPU kernels read it: in panels, in a format of its own.

Refuses to know: what computes with it, and layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

INT8_LIMIT = 127
# Inputs that are rounded with one scale where the weight is codes; the largest group of weights.
INPUT_BLOCK = 128
_STEP = 8  # inputs by which codes are filled up
_QUAD = 4  # codes of one output that lie together


class WeightFormat(Enum):
    """How a packed weight keeps its numbers."""

    FP32 = "fp32"
    BF16 = "bf16"
    # 8 bits, one scale per output; inputs stay what they are.
    INT8_WEIGHT_ONLY = "int8-weight-only"
    # Codes of 8 bits, one scale per output; inputs are rounded to 8 bits too.
    INT8 = "int8"
    # Codes of 4 bits, one bfloat16 scale for every 32 inputs; inputs are rounded to 8 bits.
    INT4 = "int4"

    @property
    def code_bits(self) -> int | None:
        """Bits of a code; None where weights are numbers."""
        return {WeightFormat.INT8: 8, WeightFormat.INT4: 4}.get(self)

    @property
    def element(self) -> torch.dtype:
        """Of the panels' tensor."""
        return _ELEMENTS.get(self, torch.uint8)

    @classmethod
    def of(cls, dtype: torch.dtype) -> WeightFormat | None:
        """Return the format that keeps numbers of ``dtype`` as they are, if there is one."""
        return {torch.float32: cls.FP32, torch.bfloat16: cls.BF16}.get(dtype)


_ELEMENTS = {
    WeightFormat.FP32: torch.float32,
    WeightFormat.BF16: torch.bfloat16,
    WeightFormat.INT8_WEIGHT_ONLY: torch.int8,
}
INT4_GROUP = 32


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """``[out_features, in_features]``, cut into panels of neighbouring outputs.

    ::

        panels[p, k, i] * scales[p * width + i]  ==  weight[p * width + i, k]

    The last panel is filled up with zeros. int8 is symmetric, one scale per output: the largest
    weight of each output becomes 127.

    Codes lie as ``[panel, step, output, 4 bytes]``. A byte is a code plus 128 (8 bits, 4 inputs a
    step), or two codes plus 8 each: of inputs 0 to 3 of the step's 8 in the low halves, of 4 to 7
    in the high ones. Whoever multiplies by codes rounds its input, see ``rounded_inputs``.
    """

    format: WeightFormat
    # [ceil(out_features / width), in_features, width] numbers, or codes as above.
    panels: Tensor
    scales: Tensor | None  # [out_features] float32; None: all are 1
    # [panels, groups of the inputs, width] float32, bfloat16 or float16; of codes only.
    group_scales: Tensor | None
    group_size: int  # inputs of a group; ``INPUT_BLOCK`` where there are no groups
    bias: Tensor | None  # [out_features] float32
    out_features: int
    in_features: int

    @classmethod
    def pack(
        cls,
        weight: Tensor,
        bias: Tensor | None,
        format: WeightFormat,
        width: int,
        prepare: Callable[[Tensor], None] = lambda panels: None,
    ) -> PackedWeight:
        """Pack ``weight``, ``[out_features, in_features]``; neither tensor is kept.

        Args:
            prepare: given the panels' memory before it is written.
        """
        out_features, in_features = weight.shape
        scales = group_scales = None
        group_size = INPUT_BLOCK
        if format == WeightFormat.INT4:
            rows, group_scales = _codes_of_groups(weight)
            group_scales, group_size = _panels(group_scales, width), INT4_GROUP
        elif format.element in (torch.int8, torch.uint8):
            limits = weight.abs().amax(dim=1).float().clamp(min=1e-30)  # [out_features]
            scales = limits / INT8_LIMIT
            rows = (weight.float() / scales.unsqueeze(1)).round()
        else:
            rows = weight
        if format.code_bits:
            packed = _panels_of_codes(rows, format.code_bits, width)
        else:
            packed = _panels(rows.to(format.element), width)
        panels = torch.empty_like(packed)
        prepare(panels)
        panels.copy_(packed)
        bias = None if bias is None else bias.float()
        return cls(
            *(format, panels, scales, group_scales, group_size, bias, out_features, in_features)
        )

    def unpacked(self) -> Tensor:
        """Unpack to ``[out_features, in_features]`` float32."""
        bits = self.format.code_bits
        if not bits:
            rows = self.panels.transpose(1, 2).flatten(0, 1).float()
        else:
            codes = self.panels  # [panels, steps, width, 4]
            if bits == 4:
                codes = torch.stack([codes & 15, codes >> 4], dim=2)
                codes = codes.flatten(1, 2)
            rows = codes.transpose(1, 2).flatten(2, 3).flatten(0, 1)[:, : self.in_features]
            rows = rows.float() - 2 ** (bits - 1)
        rows = rows[: self.out_features]
        if self.group_scales is not None:
            groups = self.group_scales.transpose(1, 2).flatten(0, 1)[: self.out_features].float()
            rows = rows * groups.repeat_interleave(self.group_size, dim=1)[:, : self.in_features]
        return rows if self.scales is None else rows * self.scales.unsqueeze(1)


def rounded_inputs(x: Tensor) -> Tensor:
    """Round ``[..., in_features]`` as products with codes round it; float32.

    The largest value of every ``INPUT_BLOCK`` neighbours becomes 127.
    """
    size = x.shape[-1]
    filled = torch.nn.functional.pad(x.float(), (0, -size % INPUT_BLOCK))
    blocks = filled.view(*x.shape[:-1], filled.shape[-1] // INPUT_BLOCK, INPUT_BLOCK)
    limits = blocks.abs().amax(dim=-1, keepdim=True)
    factors = torch.where(limits > 1e-30, INT8_LIMIT / limits, 0.0)
    # In float64 a product of two floats is exact, as in a fused multiply-add.
    numbers = (blocks.double() * factors.double()).round().float()
    rounded = numbers * (limits * (1 / INT8_LIMIT))
    return rounded.view(filled.shape)[..., :size]


def _panels(rows: Tensor, width: int) -> Tensor:
    """``[out_features, n]`` -> ``[panels, n, width]``, filled up with zeros."""
    filled = torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % width))
    return filled.view(-1, width, rows.shape[1]).transpose(1, 2).contiguous()


def _codes_of_groups(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return numbers from -8 to 7, ``[out_features, in_features]``, and the groups' scales.

    The value of a group that is largest without its sign becomes -8.
    """
    size = weight.shape[1]
    filled = torch.nn.functional.pad(weight.float(), (0, -size % INT4_GROUP))
    groups = filled.view(len(weight), -1, INT4_GROUP)
    largest = groups.gather(2, groups.abs().argmax(dim=2, keepdim=True))
    scales = (largest / -8).bfloat16()
    exact = scales.float()
    numbers = torch.where(exact == 0, 0.0, groups / exact).round().clamp(-8, 7)
    return numbers.flatten(1)[:, :size], scales.squeeze(2)


def _panels_of_codes(numbers: Tensor, bits: int, width: int) -> Tensor:
    """Signed ``[out_features, in_features]`` -> ``[panels, steps, width, 4]`` uint8."""
    shift = 2 ** (bits - 1)
    out_features, in_features = numbers.shape
    codes = (numbers.to(torch.int16) + shift).to(torch.uint8)
    padding = (0, -in_features % _STEP, 0, -out_features % width)
    codes = torch.nn.functional.pad(codes, padding, value=shift)
    panels = codes.view(-1, width, codes.shape[1] // _QUAD, _QUAD)
    quads = panels.transpose(1, 2)
    if bits == 4:
        quads = quads[:, 0::2] | quads[:, 1::2] << 4
    return quads.contiguous()
