"""GroupedWeight and RoundedWeight: quantized weights in the layouts that GPU kernels read.

    GroupedWeight    4 or 8 bits per weight; inputs are not rounded
    RoundedWeight    8 bits per weight; inputs are rounded to the weight's dtype, token by token

Refuses to know: layers, kernels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor
from torch.nn import functional

from baton_kernels.packed import FLOAT8_GROUP, GroupedIntegers, Groups

# words of a row that kernels read together; also the number of adjacent inputs in a plane
SIDE = 16
_WORD_BITS = 32
_FOUR_BITS_GROUP = 128
_NUM_TRIED = 12  # number of scales that `four_bits` tries for a group
# Number of inputs in one 8-bit matrix product. The group size of a `RoundedWeight` is a multiple of
# this number.
ROUNDED_BLOCK = FLOAT8_GROUP


class QuantizedFormat(Enum):
    """The formats to which weights on a GPU can be quantized."""

    # 4-bit integers with a scale per 128 inputs; inputs are not rounded.
    INT4 = "int4"
    # int8 with a scale per output; inputs are not rounded.
    INT8_WEIGHT_ONLY = "int8-weight-only"
    # int8 or float8 with a scale per output; inputs are rounded to the same dtype, with a scale per
    # token.
    INT8 = "int8"
    FP8 = "fp8"


@dataclass(frozen=True, slots=True, eq=False)
class GroupedWeight:
    """A weight ``[out_features, in_features]`` of integers, in groups with a scale.

    Groups may also have a minimum.

    The inputs of a row that a kernel reads together are a chunk of `SIDE` words. The first chunks
    of all rows are adjacent in memory, then the second chunks, and so on. A chunk's inputs are
    divided into planes of 16 adjacent inputs, and each word has one code of every plane, the first
    plane in the lowest bits::

        input of the chunk    0 ... 15  16 ... 31  32 ...       16 neighbours are a plane
        in word                0 ... 15   0 ... 15   0 ...

    So one shift unpacks a plane in all words, which gives numbers in the order that matrix products
    need. A code is ``weight / scale + 2 ** (bits - 1)``, or ``(weight - minimum) / scale``.

    Attributes:
        bits: number of bits of a code, 4 or 8.
        codes: ``[chunks, out_features, SIDE]`` int32.
        groups: scales, minima and factors of the groups (`CodeLayout`), each ``[groups,
            out_features]``.
        group_size: number of adjacent inputs in a group.
        in_features: number of inputs of a row; in products, padding in the last chunk meets zeros.
        arrived: ``[...]`` int32, where a kernel counts finished parts of a sum; zero between
            launches.
    """

    bits: int
    codes: Tensor
    groups: Groups
    group_size: int
    in_features: int
    arrived: Tensor

    @property
    def out_features(self) -> int:
        """Return the number of rows."""
        return self.codes.shape[1]

    @property
    def chunk_size(self) -> int:
        """Return the number of inputs in a chunk."""
        return SIDE * _WORD_BITS // self.bits

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return all tensors of the weight."""
        return tuple(one for one in (self.codes, *self.groups.tensors) if one is not None)

    @classmethod
    def empty(
        cls, out_features: int, like: GroupedIntegers, device: torch.device | str
    ) -> GroupedWeight:
        """Allocate a weight in the layout of ``like``; the caller writes its rows later."""
        in_features, bits = like.numbers.shape[1], 4 if like.bits == 4 else 8
        chunks = -(-in_features // (SIDE * _WORD_BITS // bits))
        codes = torch.empty(chunks, out_features, SIDE, dtype=torch.int32, device=device)

        def numbers(one: Tensor) -> Tensor:
            return torch.empty(one.shape[1], out_features, dtype=one.dtype, device=device)

        arrived = torch.zeros(out_features, dtype=torch.int32, device=device)
        groups = like.groups.map(numbers)
        return cls(bits, codes, groups, like.group_size, in_features, arrived)

    def write_rows(self, first_row: int, rows: GroupedIntegers) -> None:
        """Write integers from ``first_row`` on; they must have this weight's layout."""
        here, count = self.codes.device, len(rows.numbers)
        codes = rows.numbers.to(here)
        if rows.groups.minima is None:
            codes = codes.to(torch.int16) + 2 ** (self.bits - 1)
        filled = functional.pad(codes.to(torch.uint8), (0, -self.in_features % self.chunk_size))
        planes = filled.view(count, len(self.codes), -1, SIDE).transpose(2, 3)
        if self.bits == 4:
            planes = planes[..., 0::2] | planes[..., 1::2] << 4
        words = planes.contiguous().view(torch.int32).squeeze(3)  # [count, chunks, SIDE]
        self.codes[:, first_row : first_row + count] = words.transpose(0, 1)
        for ours, theirs in zip(self.groups.tensors, rows.groups.tensors, strict=True):
            if ours is not None and theirs is not None:
                ours[:, first_row : first_row + count] = theirs.to(here).T

    def dequantized(self) -> Tensor:
        """Return the weight as ``[out_features, in_features]`` float32."""
        words = self.codes.transpose(0, 1).unsqueeze(3).contiguous()
        planes = words.view(torch.uint8)  # [out_features, chunks, SIDE, bytes]
        if self.bits == 4:
            planes = torch.stack([planes & 15, planes >> 4], dim=4).flatten(3)
        numbers = planes.transpose(2, 3).flatten(1)[:, : self.in_features].float()
        if self.groups.minima is None:
            numbers = numbers - 2 ** (self.bits - 1)
        scales, minima = self.groups.map(lambda one: one.T).widened(self.group_size)
        size = min(self.group_size, self.in_features)

        def spread(one: Tensor) -> Tensor:
            return one.repeat_interleave(size, dim=1)[:, : self.in_features]

        numbers = numbers * spread(scales)
        return numbers if minima is None else numbers + spread(minima)


def is_kept(integers: GroupedIntegers) -> bool:
    """Return whether `GroupedWeight` supports these integers' group size; e2m1 is unsupported."""
    size = integers.group_size
    is_one = integers.groups.scales.shape[1] == 1
    return (is_one or size in (16, 32, 64) or size % 128 == 0) and not integers.is_e2m1


@dataclass(frozen=True, slots=True, eq=False)
class RoundedWeight:
    """A weight ``[out_features, in_features]`` of int8 or float8, for inputs of the same dtype.

    Kernels round the inputs to the weight's dtype before the product.

    Attributes:
        numbers: ``[out_features, in_features]`` int8, or float8 (e4m3).
        scales: ``[groups, out_features]`` float32.
        group_size: number of adjacent elements that share a scale, in the weight's rows and in the
            inputs: a multiple of `ROUNDED_BLOCK`; at least ``in_features`` if a row has one scale.
        arrived: ``[...]`` int32, where a kernel counts finished parts of a sum; zero between
            launches.
    """

    numbers: Tensor
    scales: Tensor
    group_size: int
    arrived: Tensor

    @property
    def out_features(self) -> int:
        """Return the number of rows."""
        return self.numbers.shape[0]

    @property
    def in_features(self) -> int:
        """Return the size of a row."""
        return self.numbers.shape[1]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return all tensors of the weight."""
        return (self.numbers, self.scales)

    @classmethod
    def empty(
        cls,
        out_features: int,
        in_features: int,
        dtype: torch.dtype,
        group_size: int | None,
        device: torch.device | str,
    ) -> RoundedWeight:
        """Allocate a weight; the caller writes its rows later.

        Args:
            out_features: number of rows.
            in_features: size of a row.
            dtype: int8 or float8.
            group_size: number of adjacent elements that share a scale; None: a whole row.
            device: device of the weight.
        """
        group_size = in_features if group_size is None else group_size
        return cls(
            torch.empty(out_features, in_features, dtype=dtype, device=device),
            torch.empty(-(-in_features // group_size), out_features, device=device),
            group_size,
            torch.zeros(out_features, dtype=torch.int32, device=device),
        )

    def write_rows(self, first_row: int, numbers: Tensor, scales: Tensor) -> None:
        """Write already rounded rows, ``[n, in_features]``, and their scales, ``[n, groups]``."""
        here = slice(first_row, first_row + len(numbers))
        self.numbers[here] = numbers.to(self.numbers.device)
        self.scales[:, here] = scales.to(self.scales).T

    def round_rows(self, first_row: int, rows: Tensor) -> None:
        """Round rows, ``[n, in_features]``, and write them from ``first_row`` on."""
        rows = rows.to(self.numbers.device)
        self.write_rows(first_row, *rounded_rows(rows, self.numbers.dtype, self.group_size))

    def dequantized(self) -> Tensor:
        """Return the weight as ``[out_features, in_features]`` float32."""
        wide = self.scales.T.repeat_interleave(self.group_size, dim=1)
        return self.numbers.float() * wide[:, : self.in_features]


QuantizedWeight = GroupedWeight | RoundedWeight


def rounded_rows(rows: Tensor, dtype: torch.dtype, group_size: int) -> tuple[Tensor, Tensor]:
    """Round rows to ``dtype``, after scaling each group's largest number to the dtype's largest.

    Args:
        rows: ``[n, size]`` of any floating dtype.
        dtype: int8 or float8.
        group_size: number of adjacent elements that share a scale.

    Returns:
        The rounded rows, ``[n, size]`` of ``dtype``, and scales, ``[n, groups]`` float32. The scale
        of a group of zeros is 0.
    """
    size = rows.shape[1]
    group_size = min(group_size, size)
    filled = functional.pad(rows.float(), (0, -size % group_size))
    groups = filled.view(len(rows), -1, group_size)
    largest = largest_of(dtype)
    limits = groups.abs().amax(dim=2, keepdim=True)
    factors = torch.where(limits > 1e-30, torch.full_like(limits, largest) / limits, 0.0)
    if dtype == torch.int8:  # in float64, products are exact, as in a fused multiply-add
        numbers = (groups.double() * factors.double()).round().float()
    else:
        numbers = groups * factors
    numbers = numbers.clamp(-largest, largest).to(dtype)
    return numbers.flatten(1)[:, :size], (limits * (1 / largest)).squeeze(2)


def four_bits(rows: Tensor) -> GroupedIntegers:
    """Round rows, ``[n, in_features]``, to 4 bits; choose scales with the least squared error.

    The function rounds each group with several trial scales. For the codes of each trial, least
    squares gives the best scale.
    """
    size = rows.shape[1]
    filled = functional.pad(rows.float(), (0, -size % _FOUR_BITS_GROUP))
    groups = filled.view(len(rows), -1, _FOUR_BITS_GROUP)
    limits = groups.abs().amax(dim=2)
    best = torch.full_like(limits, math.inf)
    scales = torch.zeros_like(limits)
    for step in range(_NUM_TRIED):
        codes = _codes(groups, limits / (6.0 + 0.25 * step))
        squares = (codes * codes).sum(dim=2)
        scale = torch.where(squares > 0, (codes * groups).sum(dim=2) / squares, 0.0)
        error = (groups - codes * scale.unsqueeze(2)).square().sum(dim=2)
        scales = torch.where(error < best, scale, scales)
        best = torch.minimum(error, best)
    kept = scales.bfloat16()
    codes = _codes(groups, kept.float()).flatten(1)[:, :size]
    return GroupedIntegers(4, codes.to(torch.int8), Groups(kept), _FOUR_BITS_GROUP)


def _codes(groups: Tensor, scales: Tensor) -> Tensor:
    exact = scales.unsqueeze(2)
    return torch.where(exact == 0, 0.0, groups / exact).round().clamp(-8, 7)


def largest_of(dtype: torch.dtype) -> float:
    """Return the largest number that rounding produces: 127 for int8, 448 for float8."""
    return 127.0 if dtype == torch.int8 else torch.finfo(dtype).max


__all__ = [
    "ROUNDED_BLOCK",
    "SIDE",
    "GroupedWeight",
    "QuantizedFormat",
    "QuantizedWeight",
    "RoundedWeight",
    "four_bits",
    "is_kept",
    "largest_of",
    "rounded_rows",
]
