"""PackedWeight: a linear layer's weight in the panels and number formats that CPU kernels read.

Refuses to know: layers, kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

import torch
from torch import Tensor
from torch.nn import functional

INT8_LIMIT = 127
FLOAT8 = torch.float8_e4m3fn
FLOAT8_CAPABILITY = (8, 9)  # lowest compute capability of GPUs with float8 (Ada, Hopper)
# Maximum number of inputs that share a scale when inputs are rounded for a product with codes.
INPUT_BLOCK = 64
# If a group's scale is stored as a multiple of a factor: number of inputs that share the factor.
SUPER_GROUP = 256
_SMALL_GROUPS = (16, 32)
FLOAT8_GROUP = 128  # group sizes of float8 weights are multiples of this
# Bits of a code -> rows are padded to a multiple of this number of inputs.
_STEPS = {8: 8, 6: 16, 4: 8}
# Values of the 16 codes of e2m1 (OCP Microscaling Formats, 1.0), doubled to be integers, as in
# codes.h.
E2M1_TWICE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_QUAD = 4  # adjacent codes of an output that kernels read together
_PAIR = 2  # adjacent bfloat16 weights of an output that kernels multiply together


class WeightFormat(Enum):
    """The number formats of packed weights."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    # int8 with a scale per output; inputs are not rounded.
    INT8_WEIGHT_ONLY = "int8-weight-only"
    # float8 (e4m3) with a scale per output, or per 128 inputs of an output; inputs are not rounded.
    FP8 = "fp8"
    # 8-bit codes. If Baton quantizes the weight, there is a bfloat16 scale per 128 inputs. Inputs
    # are rounded to 8 bits, too.
    INT8 = "int8"
    # 6-bit codes, only for weights that a checkpoint stores as grouped integers. Inputs are rounded
    # to 8 bits.
    INT6 = "int6"
    # 4-bit codes. If Baton quantizes the weight, there are an 8-bit scale and an 8-bit minimum per
    # 32 inputs. Inputs are rounded to 8 bits.
    INT4 = "int4"

    @property
    def code_bits(self) -> int | None:
        """Return the number of bits of a code; None if the format has no codes."""
        return _CODE_BITS.get(self)

    @property
    def keeps_numbers(self) -> bool:
        """Return whether weights are kept as floating-point numbers without scales."""
        return self in (WeightFormat.FP32, WeightFormat.BF16, WeightFormat.FP16)

    @property
    def element(self) -> torch.dtype:
        """Return the dtype of the tensor ``panels`` of a `PackedWeight`."""
        return _ELEMENTS.get(self, torch.uint8)

    @classmethod
    def of(cls, dtype: torch.dtype) -> WeightFormat | None:
        """Return the format that stores numbers of ``dtype`` unchanged; None: there is none."""
        formats = {torch.float32: cls.FP32, torch.bfloat16: cls.BF16, torch.float16: cls.FP16}
        return formats.get(dtype)


_CODE_BITS = {WeightFormat.INT8: 8, WeightFormat.INT6: 6, WeightFormat.INT4: 4}
_FORMATS_OF_BITS = {bits: format_ for format_, bits in _CODE_BITS.items()}
_ELEMENTS = {
    WeightFormat.FP32: torch.float32,
    WeightFormat.BF16: torch.bfloat16,
    WeightFormat.FP16: torch.float16,
    WeightFormat.INT8_WEIGHT_ONLY: torch.int8,
    WeightFormat.FP8: FLOAT8,
}
# Formats to which `pack_rows` can pack floating-point numbers.
FORMATS_OF_ROWS = tuple(one for one in WeightFormat if one != WeightFormat.INT6)
# Formats with a scale per output -> number as which an output's largest weight is stored.
_LARGEST = {WeightFormat.INT8_WEIGHT_ONLY: INT8_LIMIT, WeightFormat.FP8: torch.finfo(FLOAT8).max}
_PAIRED = (WeightFormat.BF16, WeightFormat.FP8)


@dataclass(frozen=True, slots=True)
class CodeLayout:
    """The layout of a weight's codes, and of the scales, minima and factors of its groups.

    Attributes:
        format: `INT8`, `INT6` or `INT4`; or `FP8`, whose groups have only float32 scales.
        group_size: number of adjacent inputs that share a scale: 16, 32, or a multiple of
            `INPUT_BLOCK`; for `FP8`, a multiple of `FLOAT8_GROUP`.
        scales: dtype of the scales. If int8, a scale is this integer times a factor, which
            `SUPER_GROUP` inputs share.
        minima: dtype of the minima; None: no minima, and codes are symmetric. If int8 and there are
            factors, a minimum is this integer times a separate factor; if int8 without factors, a
            minimum is a zero point, this integer times the scale.
        factors: dtype of the factors; None: no factors.
        is_e2m1: whether codes are indices into `E2M1_TWICE`; only with 4 bits and no minima.
    """

    format: WeightFormat
    group_size: int
    scales: torch.dtype
    minima: torch.dtype | None = None
    factors: torch.dtype | None = None
    is_e2m1: bool = field(default=False, kw_only=True)


_OWN_LAYOUTS = {
    WeightFormat.INT8: CodeLayout(WeightFormat.INT8, 128, torch.bfloat16),
    WeightFormat.INT4: CodeLayout(WeightFormat.INT4, 32, torch.int8, torch.int8, torch.bfloat16),
}
_SCALE_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8)


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """The scales, minima and factors of a weight's groups, as `CodeLayout` describes them.

    Scales and minima are ``[n, groups, ...]``, factors ``[n, super groups, ...]``; n counts rows or
    panels.
    """

    scales: Tensor
    minima: Tensor | None = None
    scale_factors: Tensor | None = None
    minimum_factors: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Return all tensors, in the order of the attributes."""
        return self.scales, self.minima, self.scale_factors, self.minimum_factors

    def widened(self, group_size: int) -> tuple[Tensor, Tensor | None]:
        """Return scales and minima as float32, multiplied by their factors; no minima: None."""
        scales = _in_units(self.scales, self.scale_factors, group_size)
        if self.minima is None:
            return scales, None
        minima = _in_units(self.minima, self.minimum_factors, group_size)
        if self.minima.dtype == torch.int8 and self.minimum_factors is None:
            minima = minima * scales
        return scales, minima

    def map(self, function: Callable[[Tensor], Tensor]) -> Groups:
        """Return groups whose tensors are the results of ``function`` for these tensors."""
        scales, *others = (None if one is None else function(one) for one in self.tensors)
        assert scales is not None
        return Groups(scales, *others)

    def of_smaller(self, times: int) -> Groups:
        """Divide each group into ``times`` smaller groups with the same scale and minimum."""
        minima = None if self.minima is None else self.minima.repeat_interleave(times, dim=1)
        return replace(self, scales=self.scales.repeat_interleave(times, dim=1), minima=minima)


def _in_units(numbers: Tensor, factors: Tensor | None, group_size: int) -> Tensor:
    if factors is None:
        return numbers.float()
    units = factors.float().repeat_interleave(SUPER_GROUP // group_size, dim=-1)
    return numbers.float() * units[..., : numbers.shape[-1]]


@dataclass(frozen=True, slots=True, eq=False)
class GroupedIntegers:
    """Rows of a weight that are stored as integers, in groups with a scale each.

    A weight is ``number * scale``, or with minima ``number * scale + minimum``.

    Attributes:
        bits: number of bits of an integer: 4, 6 or 8.
        numbers: ``[n, in_features]``. Without minima, int8: -8 to 7 for 4 bits, -32 to 31 for 6,
            -128 to 127 for 8. With minima, uint8: 0 to 15 for 4 bits, 0 to 63 for 6, 0 to 255 for
            8. With ``is_e2m1``, -12 to 12.
        groups: scales and minima of the rows.
        group_size: number of adjacent inputs that share a scale, as in `CodeLayout`; if a whole row
            has one scale, at least the row's size.
        is_e2m1: whether the numbers are doubled values of e2m1 (4 bits).
    """

    bits: int
    numbers: Tensor
    groups: Groups
    group_size: int
    is_e2m1: bool = False

    @classmethod
    def of(
        cls, bits: int, numbers: Tensor, groups: Groups | Tensor, group_size: int
    ) -> GroupedIntegers | None:
        """Make grouped integers; return None if kernels do not support the group size or bits.

        Args:
            bits: number of bits of an integer.
            numbers: the integers, ``[n, in_features]``, of any integer dtype.
            groups: scales and minima of the rows, or scales alone.
            group_size: number of adjacent inputs that share a scale.
        """
        in_features, fits = numbers.shape[1], bits in _FORMATS_OF_BITS
        if isinstance(groups, Tensor):
            groups = Groups(groups)
        if groups.scales.shape[1] == 1:  # a row is one group, whatever ``group_size`` is
            group_size = -(-in_features // INPUT_BLOCK) * INPUT_BLOCK
        fits = fits and (group_size in _SMALL_GROUPS or group_size % INPUT_BLOCK == 0)
        for one in (groups.scales, groups.minima):
            if one is not None:
                fits = fits and one.dtype in _SCALE_TYPES
                fits = fits and one.shape == (len(numbers), -(-in_features // group_size))
        fits = fits and (groups.scale_factors is not None) == (groups.scales.dtype == torch.int8)
        fits = fits and (groups.scale_factors is None or SUPER_GROUP % group_size == 0)
        if not fits:
            return None
        dtype = torch.int8 if groups.minima is None else torch.uint8
        return cls(bits, numbers.to(dtype), groups, group_size)

    @property
    def layout(self) -> CodeLayout:
        """Return the layout of codes and groups, which must be equal in all parts of one weight."""
        groups, format_ = self.groups, _FORMATS_OF_BITS[self.bits]
        minima = None if groups.minima is None else groups.minima.dtype
        factors = None if groups.scale_factors is None else groups.scale_factors.dtype
        types = (groups.scales.dtype, minima, factors)
        return CodeLayout(format_, self.group_size, *types, is_e2m1=self.is_e2m1)

    def codes(self) -> Tensor:
        """Return the numbers as codes, which count from 0: ``[n, in_features]`` uint8."""
        if self.is_e2m1:
            places = torch.tensor(E2M1_TWICE[:8]), self.numbers.abs().long()
            return (torch.searchsorted(*places) | (self.numbers < 0) << 3).to(torch.uint8)
        middle = 2 ** (self.bits - 1) if self.groups.minima is None else 0
        return (self.numbers.to(torch.int16) + middle).to(torch.uint8)

    def part(self, rows: slice | Tensor | None, columns: slice | None) -> GroupedIntegers | None:
        """Return some rows and columns; None if this would divide a group."""
        numbers, groups = self.numbers, self.groups
        if rows is not None:
            numbers, groups = numbers[rows], groups.map(lambda one: one[rows])
        if columns is None:
            return replace(self, numbers=numbers, groups=groups)
        in_features = numbers.shape[1]
        first, end, _ = columns.indices(in_features)
        numbers, size = numbers[:, first:end].contiguous(), self.group_size
        if size >= in_features and not self.is_e2m1:
            return GroupedIntegers.of(self.bits, numbers, groups, size)
        super_group = size if groups.scale_factors is None else SUPER_GROUP
        if first % super_group or (end % super_group and end != in_features):
            return None

        def columns_of(one: Tensor | None, each: int) -> Tensor | None:
            return None if one is None else one[:, first // each : -(-end // each)].contiguous()

        _, minima, *factors = groups.tensors
        by_group = groups.scales[:, first // size : -(-end // size)].contiguous()
        of_super = (columns_of(factor, SUPER_GROUP) for factor in factors)
        groups = Groups(by_group, columns_of(minima, size), *of_super)
        return replace(self, numbers=numbers, groups=groups)

    def dequantized(self) -> Tensor:
        """Return the rows as ``[n, in_features]`` float32."""
        scales, minima = self.groups.widened(self.group_size)
        return _scaled(self.numbers.float(), scales, minima, self.group_size)

    @classmethod
    def alike(cls, parts: Sequence[GroupedIntegers]) -> list[GroupedIntegers]:
        """Convert the parts of one weight to a common layout, without changing any value.

        If dtypes of scales or minima differ, all become float32.
        """
        if len({part.layout for part in parts}) == 1:
            return list(parts)
        parts = [replace(one, bits=8, is_e2m1=False) if one.is_e2m1 else one for one in parts]
        size = math.gcd(*(part.group_size for part in parts))
        if size not in _SMALL_GROUPS and size % INPUT_BLOCK:
            return list(parts)
        parts = [
            replace(
                part,
                bits=max(one.bits for one in parts),
                group_size=size,
                groups=_cut(part, size),
            )
            for part in parts
        ]
        kinds = {part.layout.minima for part in parts if part.groups.minima is not None}
        if kinds:
            zero_points = kinds == {torch.int8}
            parts = [_with_minima(part, zero_points=zero_points) for part in parts]
        if len({part.layout for part in parts}) > 1:
            wide = [Groups(*part.groups.widened(size)) for part in parts]
            parts = [replace(part, groups=one) for part, one in zip(parts, wide, strict=True)]
        return parts


def _cut(part: GroupedIntegers, group_size: int) -> Groups:
    """Divide a part's groups into smaller groups of ``group_size`` inputs."""
    num_groups = -(-part.numbers.shape[1] // group_size)
    groups = part.groups.of_smaller(part.group_size // group_size)
    minima = None if groups.minima is None else groups.minima[:, :num_groups]
    return replace(groups, scales=groups.scales[:, :num_groups], minima=minima)


def _with_minima(part: GroupedIntegers, *, zero_points: bool) -> GroupedIntegers:
    """Add a shift to the numbers, so that they start at 0, and minima that undo the shift.

    Args:
        part: the integers.
        zero_points: whether minima are int8 zero points, if the scales allow it.
    """
    groups = part.groups
    if groups.minima is not None:
        return part
    # a power of 2, so minima are exact
    shift = 1 << max(-int(part.numbers.min()) - 1, 0).bit_length()
    factors, minima = groups.scale_factors, groups.scales * -shift
    if factors is not None:  # scale's integers serve as minima, with other factors
        factors, minima = factors * -shift, groups.scales
    elif zero_points and groups.scales.dtype != torch.float32:
        minima = torch.full_like(groups.scales, -shift, dtype=torch.int8)
    if not bool((minima if factors is None else factors).isfinite().all()):
        scales, _ = groups.widened(part.group_size)
        groups, factors, minima = Groups(scales), None, scales * -shift
    numbers = (part.numbers.to(torch.int16) + shift).to(torch.uint8)
    groups = replace(groups, minima=minima, minimum_factors=factors)
    return replace(part, numbers=numbers, groups=groups)


def _scaled(numbers: Tensor, scales: Tensor, minima: Tensor | None, group_size: int) -> Tensor:
    """Return ``numbers * scales + minima``, ``[n, in_features]``, with each group's scale."""
    size = numbers.shape[-1]
    numbers = numbers * scales.repeat_interleave(group_size, dim=-1)[..., :size]
    if minima is None:
        return numbers
    return numbers + minima.repeat_interleave(group_size, dim=-1)[..., :size]


@dataclass(frozen=True, slots=True, eq=False)
class Float8Rows:
    """Rows of a weight that are stored in float8, in groups with a scale each.

    Attributes:
        numbers: ``[n, in_features]``, e4m3.
        scales: ``[n, groups]`` float32.
        group_size: number of adjacent inputs in a group; the row's size if a row is one group.
    """

    numbers: Tensor
    scales: Tensor
    group_size: int

    def part(self, rows: slice | Tensor | None, columns: slice | None) -> Float8Rows | None:
        """Return some rows and columns; None if this would divide a group."""
        numbers, scales, size = self.numbers, self.scales, self.group_size
        if rows is not None:
            numbers, scales = numbers.view(torch.uint8)[rows].view(FLOAT8), scales[rows]
        if columns is None:
            return Float8Rows(numbers, scales, size)
        first, end, _ = columns.indices(numbers.shape[1])
        if scales.shape[1] > 1:
            if first % size or (end % size and end != numbers.shape[1]):
                return None
            scales = scales[:, first // size : -(-end // size)]
        return Float8Rows(numbers[:, first:end], scales, size)

    def dequantized(self) -> Tensor:
        """Return the rows as ``[n, in_features]`` float32."""
        wide = self.scales.repeat_interleave(self.group_size, dim=1)
        return self.numbers.float() * wide[:, : self.numbers.shape[1]]


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A weight ``[out_features, in_features]``, divided into panels of adjacent outputs.

    ::

        panels[p, k, i] * scales[p * width + i]  ==  weight[p * width + i, k]

    Here p is a panel, i an output within the panel, k an input. The last panel is padded with
    zeros. In int8, each output's largest absolute weight is stored as 127; in float8, as 448. For
    CPU instructions that multiply pairs of inputs, bfloat16 and float8 are stored as ``[panel,
    pair, output, 2]``, padded with 0.

    Codes (integers with a scale per group of inputs) are stored as ``[panel, step, output, 4
    bytes]``::

        8 bits   a step has 4 inputs, one per byte
        4 bits   a step has 8 inputs: 0 to 3 in the bytes' low halves, 4 to 7 in the high halves
        6 bits   three steps have 16 inputs: two steps as for 4 bits, with bits 0 to 3 of each code;
                 byte i of the third has bits 4 and 5 of inputs i, i + 4, i + 8 and i + 12, input i
                 in the lowest bits

    A weight is ``(code - 2 ** (bits - 1)) * scale``; with minima, ``code * scale + minimum``. Codes
    of e2m1 are indices into `E2M1_TWICE`. Before inputs are multiplied by codes, `rounded_inputs`
    rounds them.
    """

    format: WeightFormat
    # [number of panels, in_features, width]; for pairs and codes, as described above.
    panels: Tensor
    scales: Tensor | None  # [out_features] float32; None: all are 1
    groups: Groups | None  # each [panels, groups, width]; None: no groups
    group_size: int  # inputs that share a scale, as in `CodeLayout`
    bias: Tensor | None  # [out_features] float32
    out_features: int
    in_features: int
    is_e2m1: bool = False  # whether codes are indices into `E2M1_TWICE`
    has_fine_inputs: bool = False  # only with codes: round inputs twice, to 16 bits

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Return all tensors of the weight."""
        return (self.panels, self.scales, *(self.groups.tensors if self.groups else ()), self.bias)

    @property
    def width(self) -> int:
        """Return the number of outputs in a panel."""
        return self.panels.shape[2]

    def in_whole_panels(self, num_rows: int) -> int:
        """Round a number of rows up to a multiple of a panel's rows."""
        return -(-num_rows // self.width) * self.width

    @property
    def layout(self) -> CodeLayout | None:
        """Return the layout of the groups; None if there are no groups."""
        if self.groups is None:
            return None
        scales, minima, factors, _ = self.groups.tensors
        assert scales is not None
        types = (one if one is None else one.dtype for one in (minima, factors))
        size, is_e2m1 = self.group_size, self.is_e2m1
        return CodeLayout(self.format, size, scales.dtype, *types, is_e2m1=is_e2m1)

    @property
    def has_own_groups(self) -> bool:
        """Return whether the groups, if any, are laid out as by Baton's own quantization."""
        return self.layout == _OWN_LAYOUTS.get(self.format)

    @classmethod
    def empty(
        cls,
        out_features: int,
        in_features: int,
        format: WeightFormat,
        width: int,
        empty: Callable[..., Tensor] = torch.empty,
        *,
        layout: CodeLayout | None = None,
        has_gaps: bool = False,
    ) -> PackedWeight:
        """Allocate a weight, and pad its last panel with zeros; the caller writes rows later.

        Args:
            empty: function that allocates the large tensors, called as ``torch.empty``.
            layout: layout of the groups; None: the layout that `pack_rows` makes.
            has_gaps: whether some rows of any panel may never be written, so that all panels must
                begin as zeros.
        """
        num_panels = -(-out_features // width)
        first_filled = 0 if has_gaps else -1
        groups, filling = None, 0
        layout = layout or _OWN_LAYOUTS.get(format)
        scales = torch.zeros(out_features) if format in _LARGEST and layout is None else None
        if format.code_bits:
            assert layout is not None
            step = _STEPS[format.code_bits]
            steps = -(-in_features // step) * step * format.code_bits // (8 * _QUAD)
            panels = empty(num_panels, steps, width, _QUAD, dtype=format.element)
            filling = 8 | 8 << 4 if format.code_bits == 4 else 128
            groups = _empty_groups(num_panels, in_features, width, layout, empty, first_filled)
        elif format in _PAIRED:
            pairs = -(-in_features // _PAIR)
            panels = empty(num_panels, pairs, width, _PAIR, dtype=format.element)
            if layout is not None:
                groups = _empty_groups(num_panels, in_features, width, layout, empty, first_filled)
        else:
            panels = empty(num_panels, in_features, width, dtype=format.element)
        _as_bytes(panels)[first_filled:] = filling
        group_size = INPUT_BLOCK if layout is None else layout.group_size
        is_e2m1 = layout is not None and layout.is_e2m1
        sizes = (out_features, in_features)
        return cls(format, panels, scales, groups, group_size, None, *sizes, is_e2m1)

    @classmethod
    def pack(
        cls,
        weight: Tensor,
        bias: Tensor | None,
        format: WeightFormat,
        width: int,
        empty: Callable[..., Tensor] = torch.empty,
    ) -> PackedWeight:
        """Pack a weight, ``[out_features, in_features]``, and its bias.

        The other arguments are those of `empty`.
        """
        out_features, in_features = weight.shape
        packed = cls.empty(out_features, in_features, format, width, empty)
        packed.write_rows(0, weight)
        return replace(packed, bias=None if bias is None else bias.float())

    def write_rows(self, first_row: int, rows: Tensor) -> None:
        """Round n rows to this weight's format, and write them from ``first_row`` on.

        Args:
            first_row: index of the first row to write.
            rows: ``[n, in_features]`` of any floating dtype.
        """
        numbers = rows = rows.detach()
        ids = torch.arange(first_row, first_row + len(rows))
        if self.groups is not None:
            assert self.has_own_groups
            cut = _four_bits if self.format == WeightFormat.INT4 else _eight_bits
            self.write_integers(first_row, cut(rows))
            return
        if self.scales is not None:
            limits = rows.abs().amax(dim=1).float().clamp(min=1e-30)  # [n]
            self.scales[ids] = limits / _LARGEST[self.format]
            numbers = rows.float() / self.scales[ids].unsqueeze(1)
            if self.format == WeightFormat.INT8_WEIGHT_ONLY:
                numbers = numbers.round()
            else:
                numbers = numbers.clamp(-_LARGEST[self.format], _LARGEST[self.format])
        self._write_numbers(ids, numbers.to(self.panels.dtype))

    def write_float8(self, first_row: int, rows: Float8Rows) -> None:
        """Write float8 rows unchanged; their group size must be this weight's."""
        ids = torch.arange(first_row, first_row + len(rows.numbers))
        self._write_numbers(ids, rows.numbers)
        self.write_scales(first_row, rows)

    def write_scales(self, first_row: int, rows: Float8Rows) -> None:
        """Write the scales of float8 rows, but not the numbers."""
        if self.scales is not None:
            self.scales[first_row : first_row + len(rows.scales)] = rows.scales.squeeze(1)
        else:
            self.write_groups(first_row, Groups(rows.scales))

    def _write_numbers(self, ids: Tensor, numbers: Tensor) -> None:
        """Write rows that already have the panels' dtype, ``[n, in_features]``."""
        numbers = _as_bytes(numbers)
        if self.format in _PAIRED:
            filled = functional.pad(numbers, (0, -self.in_features % _PAIR))
            numbers = filled.view(len(numbers), -1, _PAIR)
        _put_rows(_as_bytes(self.panels), ids, numbers)

    def write_integers(self, first_row: int, rows: GroupedIntegers) -> None:
        """Write integers unchanged; they must have this weight's layout."""
        assert self.groups is not None
        assert rows.layout == self.layout
        ids = torch.arange(first_row, first_row + len(rows.numbers))
        _put_rows(self.panels, ids, _bytes_of_codes(rows))
        self.write_groups(first_row, rows.groups)

    def write_groups(self, first_row: int, groups: Groups) -> None:
        """Write the scales, minima and factors of the rows from ``first_row`` on."""
        assert self.groups is not None
        ids = torch.arange(first_row, first_row + len(groups.scales))
        for ours, theirs in zip(self.groups.tensors, groups.tensors, strict=True):
            if ours is not None and theirs is not None:
                _put_rows(ours, ids, theirs)

    def read_rows(self, ids: Tensor) -> Tensor:
        """Return the rows with indices ``ids``, ``[...]``: ``[..., in_features]``.

        The dtype is that of the panels, or float32 for quantized formats.
        """
        rows = _take_rows(_as_bytes(self.panels), ids)
        bits = self.format.code_bits
        if self.format in _PAIRED:  # rows: [..., pairs, 2]
            rows = rows.flatten(-2)[..., : self.in_features]
        if self.format == WeightFormat.FP8:
            rows = rows.contiguous().view(FLOAT8).float()
        if bits:  # rows: [..., steps, 4]
            rows = _split_codes(bits, rows).flatten(-2)[..., : self.in_features].float()
        if self.groups is not None:
            of_rows = self.groups.map(lambda one: _take_rows(one, ids))  # [..., groups]
            scales, minima = of_rows.widened(self.group_size)
            if self.is_e2m1:
                rows = torch.tensor(E2M1_TWICE).float()[rows.long()]
            elif minima is None and bits is not None:
                rows = rows - 2 ** (bits - 1)
            rows = _scaled(rows, scales, minima, self.group_size)
        return rows if self.scales is None else rows * self.scales[ids].unsqueeze(-1)

    def unpacked(self) -> Tensor:
        """Return the whole weight as ``[out_features, in_features]`` float32."""
        return self.read_rows(torch.arange(self.out_features)).float()


def rounded_inputs(x: Tensor, weight: PackedWeight) -> Tensor:
    """Round inputs to 8 bits, as `packed_linear` does before it multiplies inputs by codes.

    The inputs of a group of weights share a scale, with which the largest input becomes 127; in
    groups of more than `INPUT_BLOCK` weights, each `INPUT_BLOCK` inputs share a scale. If the
    weight has fine inputs, the error of this rounding is also rounded to 8 bits, and added. Returns
    float32 ``[..., in_features]``.
    """
    size, each = x.shape[-1], min(weight.group_size, INPUT_BLOCK)
    filled = functional.pad(x.float(), (0, -size % each))
    blocks = filled.reshape(*x.shape[:-1], filled.shape[-1] // each, each)
    rounded = _rounded_blocks(blocks)
    if weight.has_fine_inputs:
        rounded = rounded + _rounded_blocks((blocks.double() - rounded).float())
    return rounded.float().view(filled.shape)[..., :size]


def _rounded_blocks(blocks: Tensor) -> Tensor:
    """Round blocks, ``[..., size]`` float32, to 8 bits with a scale per block; return float64."""
    limits = blocks.abs().amax(dim=-1, keepdim=True)
    # A tensor, because torch multiplies by the reciprocal of a Python number, which rounds twice.
    factors = torch.where(limits > 1e-30, torch.full_like(limits, INT8_LIMIT) / limits, 0.0)
    # In float64, the product of two float32 is exact, as in the kernels' fused multiply-adds.
    numbers = (blocks.double() * factors.double()).round()
    return numbers * (limits * (1 / INT8_LIMIT)).double()


def _as_bytes(numbers: Tensor) -> Tensor:
    """View a float8 tensor as bytes, because torch supports few operations on float8."""
    return numbers.view(torch.uint8) if numbers.dtype == FLOAT8 else numbers


def _take_rows(panels: Tensor, ids: Tensor) -> Tensor:
    """Return the rows with indices ``ids``, ``[...]``, of ``[panels, ..., width, ...]``."""
    width = panels.shape[2]
    return panels.transpose(1, 2)[ids // width, ids % width]


def _put_rows(panels: Tensor, ids: Tensor, rows: Tensor) -> None:
    """Write ``rows``, ``[n, ...]``, to ``panels``, ``[panels, ..., width, ...]``."""
    width = panels.shape[2]
    panels.transpose(1, 2)[ids // width, ids % width] = rows


def _empty_groups(
    num_panels: int,
    in_features: int,
    width: int,
    layout: CodeLayout,
    empty: Callable[..., Tensor],
    first_filled: int,
) -> Groups:
    """Allocate scales, minima and factors; those of panels from ``first_filled`` on are 0."""

    def numbers_of(size: int, dtype: torch.dtype | None) -> Tensor | None:
        if dtype is None:
            return None
        numbers = empty(num_panels, -(-in_features // size), width, dtype=dtype)
        numbers[first_filled:] = 0
        return numbers

    scales = numbers_of(layout.group_size, layout.scales)
    assert scales is not None
    minima = numbers_of(layout.group_size, layout.minima)
    factors = numbers_of(SUPER_GROUP, layout.factors)
    return Groups(
        scales, minima, factors, None if factors is None or minima is None else factors.clone()
    )


def _cut_into_groups(rows: Tensor, size: int) -> Tensor:
    """Divide ``[n, in_features]`` into groups ``[n, groups, size]`` float32, padded with zeros."""
    filled = functional.pad(rows.float(), (0, -rows.shape[1] % size))
    return filled.reshape(len(rows), filled.shape[1] // size, size)


def _eight_bits(rows: Tensor) -> GroupedIntegers:
    """Round rows to symmetric 8-bit integers: each group's largest weight becomes 127."""
    layout = _OWN_LAYOUTS[WeightFormat.INT8]
    groups = _cut_into_groups(rows, layout.group_size)
    scales = (groups.abs().amax(dim=2, keepdim=True) / INT8_LIMIT).to(layout.scales)
    exact = scales.float()
    numbers = torch.where(exact == 0, 0.0, groups / exact).round().clamp(-INT8_LIMIT, INT8_LIMIT)
    numbers = numbers.flatten(1)[:, : rows.shape[1]].to(torch.int8)
    return GroupedIntegers(8, numbers, Groups(scales.squeeze(2)), layout.group_size)


def _four_bits(rows: Tensor) -> GroupedIntegers:
    """Round rows to 4-bit codes, with scales and minima of least squared error.

    Scales and minima are multiples of factors.
    """
    layout = _OWN_LAYOUTS[WeightFormat.INT4]
    groups = _cut_into_groups(rows, layout.group_size)
    found, wide = [], []
    for numbers in _searched_scales(groups):  # [n, groups]
        multiples, factors = _multiples_of_factors(numbers, layout)
        found.append((multiples, factors))
        wide.append(_in_units(multiples, factors, layout.group_size).unsqueeze(2))
    (scales, scale_factors), (minima, minimum_factors) = found
    codes = torch.where(wide[0] == 0, 0.0, (groups - wide[1]) / wide[0]).clamp(0, 15).round()
    codes = codes.flatten(1)[:, : rows.shape[1]].to(torch.uint8)
    numbers_of_groups = Groups(scales, minima, scale_factors, minimum_factors)
    return GroupedIntegers(4, codes, numbers_of_groups, layout.group_size)


def _searched_scales(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Find the scale and minimum with the least squared error for each group: ``[n, groups]``.

    The function rounds each group with twelve trial scales. For the codes of each trial, least
    squares gives the best scale and minimum, as in GGML's K-quants. Sums are float32 and in a fixed
    order, so that kernels compute equal bits.
    """
    size = groups.shape[2]
    values = groups.unbind(2)
    low, high = groups.amin(dim=2), groups.amax(dim=2)
    total = _sum_in_order(values)
    best, best_scale, best_minimum = torch.full_like(low, math.inf), torch.zeros_like(low), low
    for candidate in range(12):
        steps = torch.tensor(12.5 + 0.3125 * candidate)
        inverse = torch.where(high > low, steps / (high - low), 0.0)
        codes = [((value - low) * inverse).clamp(max=15).round() for value in values]
        count = _sum_in_order(codes)
        squares = _sum_in_order([code * code for code in codes])
        products = _sum_in_order([code * value for code, value in zip(codes, values, strict=True)])
        spread = size * squares - count * count
        scale = (size * products - count * total) / spread
        scale = torch.where((spread > 0) & (scale > 0), scale, 0.0)
        minimum = (total - scale * count) / size
        error = -(scale * products + minimum * total)  # squared error, except for a constant term
        better = error < best
        best = torch.where(better, error, best)
        best_scale = torch.where(better, scale, best_scale)
        best_minimum = torch.where(better, minimum, best_minimum)
    return best_scale, best_minimum


def _sum_in_order(values: Sequence[Tensor]) -> Tensor:
    total = torch.zeros_like(values[0])
    for value in values:
        total = total + value
    return total


def _multiples_of_factors(numbers: Tensor, layout: CodeLayout) -> tuple[Tensor, Tensor]:
    """Split scales or minima, ``[n, groups]``, into int8 multiples and factors.

    Factors are ``[n, super groups]``.
    """
    supers = _cut_into_groups(numbers, SUPER_GROUP // layout.group_size)
    factors = (supers.abs().amax(dim=2, keepdim=True) / INT8_LIMIT).to(layout.factors)
    exact = factors.float()
    multiples = torch.where(exact == 0, 0.0, supers / exact).clamp(-INT8_LIMIT, INT8_LIMIT).round()
    multiples = multiples.flatten(1)[:, : numbers.shape[1]].to(torch.int8)
    return multiples, factors.squeeze(2)


def _bytes_of_codes(rows: GroupedIntegers) -> Tensor:
    """Return the codes of rows as the bytes of a `PackedWeight`: ``[n, steps, 4]`` uint8."""
    codes = rows.codes()
    filling = 2 ** (rows.bits - 1)
    codes = functional.pad(codes, (0, -codes.shape[1] % _STEPS[rows.bits]), value=filling)
    quads = codes.view(len(codes), -1, _QUAD)
    if rows.bits == 8:
        return quads
    low = quads[:, 0::2] & 15 | quads[:, 1::2] << 4
    if rows.bits == 4:
        return low
    highest = [quads[:, i::4] >> 4 << 2 * i for i in range(4)]  # [n, in_features / 16, 4] each
    third = highest[0] | highest[1] | highest[2] | highest[3]
    return torch.cat([low.view(len(low), -1, 2, _QUAD), third.unsqueeze(2)], dim=2).flatten(1, 2)


def _split_codes(bits: int, steps: Tensor) -> Tensor:
    """Undo `_bytes_of_codes`: return the codes, four by four: ``[..., quads, 4]``."""
    if bits == 8:
        return steps
    if bits == 4:
        return torch.stack([steps & 15, steps >> 4], dim=-2).flatten(-3, -2)
    first, second, third = steps.reshape(*steps.shape[:-2], -1, 3, _QUAD).unbind(-2)
    low = (first & 15, first >> 4, second & 15, second >> 4)
    quads = [one | (third >> 2 * i & 3) << 4 for i, one in enumerate(low)]
    return torch.stack(quads, dim=-2).flatten(-3, -2)
