"""Converts the blocks of a quantized GGUF tensor, without loss, to integers in groups with scales.

GGML's file `ggml-quants.c` defines the types, and their names. Refuses to know: files,
names of tensors.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from baton_kernels import GroupedIntegers, Groups
from models.loading.fp4 import mxfp4_integers

# What unpacking a tensor returns: bits per number, numbers [rows, columns], the groups' scales and
# minima, and the size of a group.
_Unpacked = tuple[int, Tensor, Groups, int]
_BLOCK = 32  # number of weights in a block of most types; K-quants have more


def unpack_blocks(kind: str, blocks: Tensor) -> GroupedIntegers | None:
    """Unpack a quantized tensor into grouped integers; None: its type is not supported.

    Args:
        kind: GGML's name of the tensor's type.
        blocks: ``[rows, blocks of a row, bytes of a block]`` uint8.
    """
    if kind == "MXFP4":
        return mxfp4_integers(_neighbours(blocks[:, :, 1:]), blocks[:, :, 0].contiguous())
    unpack = _UNPACK.get(kind)
    return None if unpack is None else GroupedIntegers.of(*unpack(blocks))


def _halves(blocks: Tensor, start: int) -> Tensor:
    """Return the float16 at byte ``start`` of each block: ``[rows, blocks]``."""
    return blocks[:, :, start : start + 2].contiguous().view(torch.float16).squeeze(2)


def _cut(parts: Tensor, *sizes: int) -> Tensor:
    """Reshape the bytes of each block: ``[rows, blocks, ...]`` to ``[rows, blocks, *sizes]``."""
    return parts.reshape(*parts.shape[:2], *sizes)


def _nibbles(quads: Tensor) -> Tensor:
    """Unpack ``[..., n]`` bytes into the n low halves, then the n high halves: ``[..., 2 n]``."""
    return torch.cat([quads & 15, quads >> 4], dim=-1)


def _neighbours(packed: Tensor) -> Tensor:
    """Repack 4-bit numbers so that each byte has two adjacent numbers.

    A stored byte has number i and number i + 16 of a block of 32. ``[rows, blocks, 16]`` become
    ``[rows, blocks * 16]``.
    """
    codes = _nibbles(packed)
    return (codes[:, :, ::2] | codes[:, :, 1::2] << 4).flatten(1)


def _q8_0(blocks: Tensor) -> _Unpacked:
    numbers = blocks[:, :, 2:].contiguous().view(torch.int8)
    return 8, numbers.flatten(1), Groups(_halves(blocks, 0)), _BLOCK


def _q4_0(blocks: Tensor) -> _Unpacked:
    numbers = _nibbles(blocks[:, :, 2:]).to(torch.int8) - 8
    return 4, numbers.flatten(1), Groups(_halves(blocks, 0)), _BLOCK


def _q4_1(blocks: Tensor) -> _Unpacked:
    groups = Groups(_halves(blocks, 0), _halves(blocks, 2))
    return 4, _nibbles(blocks[:, :, 4:]).flatten(1), groups, _BLOCK


def _five_bits(blocks: Tensor, start: int) -> Tensor:
    """Unpack each block's 32 numbers of 5 bits: ``[rows, columns]``.

    From byte ``start`` on, 4 bytes hold the highest bits, and 16 bytes hold the other bits.
    """
    places = torch.arange(8, dtype=torch.uint8)
    highest = (blocks[:, :, start : start + 4, None] >> places & 1).flatten(2)
    return (_nibbles(blocks[:, :, start + 4 :]) | highest << 4).flatten(1)


def _q5_0(blocks: Tensor) -> _Unpacked:
    return 6, _five_bits(blocks, 2).to(torch.int8) - 16, Groups(_halves(blocks, 0)), _BLOCK


def _q5_1(blocks: Tensor) -> _Unpacked:
    groups = Groups(_halves(blocks, 0), _halves(blocks, 2))
    return 6, _five_bits(blocks, 4), groups, _BLOCK


def _q2_k(blocks: Tensor) -> _Unpacked:
    scales, quarters = blocks[:, :, :16], _cut(blocks[:, :, 16:80], 2, 1, 32)
    places = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    numbers = quarters >> places & 3  # [rows, blocks, 2, 4, 32]
    return 4, numbers.flatten(1), _offset_groups(scales & 15, scales >> 4, blocks, 80), 16


def _q3_k(blocks: Tensor) -> _Unpacked:
    places = torch.arange(8, dtype=torch.uint8)[:, None]
    highest = _cut(blocks[:, :, None, :32] >> places & 1, 2, 4, 32)  # [..., 2, 4, 32]
    quarters = _cut(blocks[:, :, 32:96], 2, 1, 32)
    numbers = (quarters >> places[:4] * 2 & 3 | highest << 2).flatten(1).to(torch.int8) - 4
    packed = blocks[:, :, 96:108]
    pairs = packed[:, :, None, 8:] >> places[:4] * 2 & 3  # [rows, blocks, 4, 4]
    scales = _nibbles(packed[:, :, :8]) | pairs.flatten(2) << 4
    groups = Groups((scales.to(torch.int8) - 32).flatten(1), scale_factors=_halves(blocks, 108))
    return 4, numbers, groups, 16


def _scales_of_six_bits(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Unpack eight 6-bit scales and minima from ``[rows, blocks, 12]`` bytes."""
    first, second, rest = packed[:, :, :4], packed[:, :, 4:8], packed[:, :, 8:]
    scales = torch.cat([first & 63, rest & 15 | first >> 6 << 4], dim=2)
    return scales, torch.cat([second & 63, rest >> 4 | second >> 6 << 4], dim=2)


def _offset_groups(scales: Tensor, minima: Tensor, blocks: Tensor, start: int) -> Groups:
    """Return groups with factors: scales are multiples of `d`, and minima multiples of `-dmin`.

    Each block has its own `d`, which begins at byte ``start``, and then its own `dmin`.
    """
    scales, minima = (one.flatten(1).to(torch.int8) for one in (scales, minima))
    return Groups(scales, minima, _halves(blocks, start), -_halves(blocks, start + 2))


def _q4_k(blocks: Tensor) -> _Unpacked:
    numbers = _nibbles(_cut(blocks[:, :, 16:], 4, 32))
    scales = _scales_of_six_bits(blocks[:, :, 4:16])
    return 4, numbers.flatten(1), _offset_groups(*scales, blocks, 0), _BLOCK


def _q5_k(blocks: Tensor) -> _Unpacked:
    places = torch.arange(8, dtype=torch.uint8)[:, None]
    highest = blocks[:, :, None, 16:48] >> places & 1  # [rows, blocks, 8, 32]
    low = _cut(_nibbles(_cut(blocks[:, :, 48:], 4, 32)), 8, 32)
    scales = _scales_of_six_bits(blocks[:, :, 4:16])
    return 6, (low | highest << 4).flatten(1), _offset_groups(*scales, blocks, 0), _BLOCK


def _q6_k(blocks: Tensor) -> _Unpacked:
    low = _nibbles(_cut(blocks[:, :, :128], 2, 64))  # [rows, blocks, 2, 128]
    places = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    highest = _cut(blocks[:, :, 128:192], 2, 1, 32) >> places & 3
    numbers = (low | highest.flatten(3) << 4).to(torch.int8) - 32
    scales = blocks[:, :, 192:208].contiguous().view(torch.int8)
    return 6, numbers.flatten(1), Groups(scales.flatten(1), scale_factors=_halves(blocks, 208)), 16


def _iq4_nl(blocks: Tensor) -> _Unpacked:
    numbers = _unevenly(_nibbles(blocks[:, :, 2:]))
    return 8, numbers.flatten(1), Groups(_halves(blocks, 0)), _BLOCK


def _iq4_xs(blocks: Tensor) -> _Unpacked:
    numbers = _unevenly(_nibbles(_cut(blocks[:, :, 8:], 8, 16)))
    places = torch.arange(4, dtype=torch.uint8) * 2
    highest = (blocks[:, :, 2:4, None] >> places & 3).flatten(2)  # [rows, blocks, 8]
    pairs = blocks[:, :, 4:8]
    scales = torch.stack([pairs & 15, pairs >> 4], dim=3).flatten(2) | highest << 4
    groups = Groups((scales.to(torch.int8) - 32).flatten(1), scale_factors=_halves(blocks, 0))
    return 8, numbers.flatten(1), groups, _BLOCK


def _unevenly(codes: Tensor) -> Tensor:
    """Map the 4-bit codes of IQ4 types to the integers that they stand for."""
    return torch.tensor(_UNEVEN, dtype=torch.int8)[codes.int()]


_UNEVEN = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

_UNPACK: dict[str, Callable[[Tensor], _Unpacked]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
}
