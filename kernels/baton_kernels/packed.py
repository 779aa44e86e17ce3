"""A linear layer's weight as CPU kernels read it: in panels, in a format of its own.

Refuses to know: what computes with it, and layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor

INT8_LIMIT = 127
# Inputs that are rounded with one scale where the weight is codes.
INPUT_BLOCK = 64
_SPAN = 32  # the smallest group
_STEP = 8  # inputs by which codes are filled up
_QUAD = 4  # codes of one output that lie together


class WeightFormat(Enum):
    """How a packed weight keeps its numbers."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    # 8 bits, one scale per output; inputs stay what they are.
    INT8_WEIGHT_ONLY = "int8-weight-only"
    # Codes of 8 bits, a bfloat16 scale for every 128 inputs; inputs are rounded to 8 bits too.
    INT8 = "int8"
    # Codes of 4 bits, a bfloat16 scale for every 32 inputs; inputs are rounded to 8 bits.
    INT4 = "int4"

    @property
    def code_bits(self) -> int | None:
        """Bits of a code; None where weights are numbers."""
        return {WeightFormat.INT8: 8, WeightFormat.INT4: 4}.get(self)

    @property
    def keeps_numbers(self) -> bool:
        """Whether weights are floating-point numbers, without scales."""
        return self in (WeightFormat.FP32, WeightFormat.BF16, WeightFormat.FP16)

    @property
    def element(self) -> torch.dtype:
        """Of the panels' tensor."""
        return _ELEMENTS.get(self, torch.uint8)

    @classmethod
    def of(cls, dtype: torch.dtype) -> WeightFormat | None:
        """Return the format that keeps numbers of ``dtype`` as they are, if there is one."""
        formats = {torch.float32: cls.FP32, torch.bfloat16: cls.BF16, torch.float16: cls.FP16}
        return formats.get(dtype)


_ELEMENTS = {
    WeightFormat.FP32: torch.float32,
    WeightFormat.BF16: torch.bfloat16,
    WeightFormat.FP16: torch.float16,
    WeightFormat.INT8_WEIGHT_ONLY: torch.int8,
}
_GROUP_SIZES = {WeightFormat.INT8: 128, WeightFormat.INT4: 32}


@dataclass(frozen=True, slots=True, eq=False)
class GroupedIntegers:
    """Rows of a weight as a checkpoint keeps them: ``numbers * scales``, group by group.

    Attributes:
        bits: of a number: 4 or 8.
        numbers: ``[n, in_features]`` int8, from ``-2 ** (bits - 1)`` to ``2 ** (bits - 1) - 1``.
        scales: ``[n, groups]`` float32, bfloat16 or float16.
        group_size: neighbouring inputs with one scale: 32, a multiple of ``INPUT_BLOCK``, or all.
    """

    bits: int
    numbers: Tensor
    scales: Tensor
    group_size: int

    @classmethod
    def of(
        cls, bits: int, numbers: Tensor, scales: Tensor, group_size: int
    ) -> GroupedIntegers | None:
        """Return None for what kernels do not take: other sizes of groups or numbers."""
        in_features, fits = numbers.shape[1], bits in (4, 8)
        if scales.shape[1] == 1:  # whatever its size is said to be
            group_size = -(-in_features // INPUT_BLOCK) * INPUT_BLOCK
        fits = fits and (group_size == _SPAN or group_size % INPUT_BLOCK == 0)
        fits = fits and scales.dtype in (torch.float32, torch.bfloat16, torch.float16)
        if not fits or scales.shape != (len(numbers), -(-in_features // group_size)):
            return None
        return cls(bits, numbers.to(torch.int8), scales, group_size)

    @property
    def layout(self) -> tuple[WeightFormat, int, torch.dtype]:
        """What parts of one weight must have in common: format, group size, type of scales."""
        format_ = WeightFormat.INT4 if self.bits == 4 else WeightFormat.INT8
        return format_, self.group_size, self.scales.dtype

    def dequantized(self) -> Tensor:
        """Return ``[n, in_features]`` float32."""
        scales = self.scales.float().repeat_interleave(self.group_size, dim=1)
        return self.numbers.float() * scales[:, : self.numbers.shape[1]]


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """``[out_features, in_features]``, cut into panels of neighbouring outputs.

    ::

        panels[p, k, i] * scales[p * width + i]  ==  weight[p * width + i, k]

    The last panel is filled up with zeros. Numbers and codes of 8 bits are symmetric: the largest
    weight of each output, or group, becomes 127. With 4 bits it becomes -8, whatever its sign.

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
    group_size: int  # inputs of a group: 32, or a multiple of ``INPUT_BLOCK``
    bias: Tensor | None  # [out_features] float32
    out_features: int
    in_features: int

    @property
    def width(self) -> int:
        """Outputs of a panel."""
        return self.panels.shape[2]

    @property
    def has_own_groups(self) -> bool:
        """Whether groups, if there are any, are those that floating-point rows are cut into."""
        groups, usual = self.group_scales, _GROUP_SIZES.get(self.format)
        return groups is None or (groups.dtype, self.group_size) == (torch.bfloat16, usual)

    @classmethod
    def empty(
        cls,
        out_features: int,
        in_features: int,
        format: WeightFormat,
        width: int,
        prepare: Callable[[Tensor], None] = lambda panels: None,
        *,
        group_size: int | None = None,
        scale_dtype: torch.dtype = torch.bfloat16,
    ) -> PackedWeight:
        """Allocate one whose rows are to be written; what fills up its last panel is there.

        Args:
            prepare: given the panels' memory before it is written.
            group_size: of codes; None: as `pack_rows` makes them.
            scale_dtype: of the groups' scales.
        """
        num_panels = -(-out_features // width)
        scales = group_scales = None
        filling = 0
        group_size = group_size or _GROUP_SIZES.get(format, INPUT_BLOCK)
        if format.code_bits:
            steps = -(-in_features // _STEP) * format.code_bits // _QUAD
            panels = torch.empty(num_panels, steps, width, _QUAD, dtype=format.element)
            filling = 128 if format.code_bits == 8 else 8 | 8 << 4
        else:
            panels = torch.empty(num_panels, in_features, width, dtype=format.element)
        if format == WeightFormat.INT8_WEIGHT_ONLY:
            scales = torch.empty(out_features)
        if format in _GROUP_SIZES:
            groups = -(-in_features // group_size)
            group_scales = torch.empty(num_panels, groups, width, dtype=scale_dtype)
            group_scales[-1:] = 0
        prepare(panels)
        panels[-1:] = filling
        return cls(
            *(format, panels, scales, group_scales, group_size, None, out_features, in_features)
        )

    @classmethod
    def pack(
        cls,
        weight: Tensor,
        bias: Tensor | None,
        format: WeightFormat,
        width: int,
        prepare: Callable[[Tensor], None] = lambda panels: None,
    ) -> PackedWeight:
        """Pack ``weight``, ``[out_features, in_features]``, see ``empty``; neither is kept."""
        out_features, in_features = weight.shape
        packed = cls.empty(out_features, in_features, format, width, prepare)
        packed.write_rows(0, weight)
        return replace(packed, bias=None if bias is None else bias.float())

    def write_rows(self, first_row: int, rows: Tensor) -> None:
        """Write the rows from ``first_row`` on, ``[n, in_features]`` of any floating dtype."""
        numbers = rows = rows.detach()
        ids = torch.arange(first_row, first_row + len(rows))
        if self.group_scales is not None:
            numbers, groups = _codes_of_groups(rows, self.format, self.group_size)
            _put_rows(self.group_scales, ids, groups)
        elif self.scales is not None:
            limits = rows.abs().amax(dim=1).float().clamp(min=1e-30)  # [n]
            self.scales[ids] = limits / INT8_LIMIT
            numbers = (rows.float() / self.scales[ids].unsqueeze(1)).round()
        if self.format.code_bits:
            numbers = _bytes_of_codes(numbers, self.format.code_bits)
        _put_rows(self.panels, ids, numbers.to(self.panels.dtype))

    def write_integers(self, first_row: int, rows: GroupedIntegers) -> None:
        """Write rows that are integers already; their layout is this weight's."""
        assert self.group_scales is not None
        ids = torch.arange(first_row, first_row + len(rows.numbers))
        _put_rows(self.group_scales, ids, rows.scales)
        _put_rows(self.panels, ids, _bytes_of_codes(rows.numbers, rows.bits))

    def read_rows(self, ids: Tensor) -> Tensor:
        """Read rows ``[...]`` as numbers: ``[..., in_features]``, as kept, or float32 of codes."""
        rows = _take_rows(self.panels, ids)
        bits = self.format.code_bits
        if bits:  # rows: [..., steps, 4]
            if bits == 4:
                rows = torch.stack([rows & 15, rows >> 4], dim=-2).flatten(-3, -2)
            rows = rows.flatten(-2)[..., : self.in_features].float() - 2 ** (bits - 1)
        if self.group_scales is not None:
            groups = _take_rows(self.group_scales, ids).float()  # [..., groups]
            rows = rows * groups.repeat_interleave(self.group_size, dim=-1)[..., : self.in_features]
        return rows if self.scales is None else rows * self.scales[ids].unsqueeze(-1)

    def unpacked(self) -> Tensor:
        """Unpack to ``[out_features, in_features]`` float32."""
        return self.read_rows(torch.arange(self.out_features)).float()


def rounded_inputs(x: Tensor) -> Tensor:
    """Round ``[..., in_features]`` as products with codes round it; float32.

    The largest value of every ``INPUT_BLOCK`` neighbours becomes 127.
    """
    size = x.shape[-1]
    filled = torch.nn.functional.pad(x.float(), (0, -size % INPUT_BLOCK))
    blocks = filled.reshape(*x.shape[:-1], filled.shape[-1] // INPUT_BLOCK, INPUT_BLOCK)
    limits = blocks.abs().amax(dim=-1, keepdim=True)
    # A number over a tensor would be rounded twice: its reciprocal first.
    factors = torch.where(limits > 1e-30, torch.full_like(limits, INT8_LIMIT) / limits, 0.0)
    # In float64 a product of two floats is exact, as in a fused multiply-add.
    numbers = (blocks.double() * factors.double()).round().float()
    rounded = numbers * (limits * (1 / INT8_LIMIT))
    return rounded.view(filled.shape)[..., :size]


def _take_rows(panels: Tensor, ids: Tensor) -> Tensor:
    """Read rows ``[...]`` of ``panels``, ``[panels, ..., width, ...]``: ``[..., ...]``."""
    width = panels.shape[2]
    return panels.transpose(1, 2)[ids // width, ids % width]


def _put_rows(panels: Tensor, ids: Tensor, rows: Tensor) -> None:
    """Write ``rows``, ``[n, ...]``, to ``panels``, ``[panels, ..., width, ...]``."""
    width = panels.shape[2]
    panels.transpose(1, 2)[ids // width, ids % width] = rows


def _codes_of_groups(
    weight: Tensor, format: WeightFormat, group_size: int
) -> tuple[Tensor, Tensor]:
    """Return signed numbers, ``[out_features, in_features]``, and the groups' scales."""
    size = weight.shape[1]
    filled = torch.nn.functional.pad(weight.float(), (0, -size % group_size))
    groups = filled.reshape(len(weight), filled.shape[1] // group_size, group_size)
    if format == WeightFormat.INT8:
        least, most = -INT8_LIMIT, INT8_LIMIT
        scales = groups.abs().amax(dim=2, keepdim=True) / most
    else:
        least, most = -8, 7
        scales = groups.gather(2, groups.abs().argmax(dim=2, keepdim=True)) / least
    rounded = scales.bfloat16()
    exact = rounded.float()
    numbers = torch.where(exact == 0, 0.0, groups / exact).round().clamp(least, most)
    return numbers.flatten(1)[:, :size], rounded.squeeze(2)


def _bytes_of_codes(numbers: Tensor, bits: int) -> Tensor:
    """Signed ``[n, in_features]`` -> ``[n, steps, 4]`` uint8."""
    shift = 2 ** (bits - 1)
    codes = (numbers.to(torch.int16) + shift).to(torch.uint8)
    codes = torch.nn.functional.pad(codes, (0, -numbers.shape[1] % _STEP), value=shift)
    quads = codes.view(len(codes), -1, _QUAD)
    return quads[:, 0::2] | quads[:, 1::2] << 4 if bits == 4 else quads
