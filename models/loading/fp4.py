"""Unpacks 4-bit numbers of type e2m1 (OCP Microscaling Formats, 1.0), in groups with a scale.

Refuses to know: files, names of tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton_kernels import E2M1_TWICE, GroupedIntegers, Groups

# Magnitudes of codes 0 to 7; codes 8 to 15 are their negatives.
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127  # bias of a scale's exponent (e8m0)
_NOT_A_NUMBER = 255
_GROUP, _SMALL_GROUP = 32, 16  # number of adjacent inputs that share a scale


def fp4(packed: Tensor) -> Tensor:
    """Unpack two 4-bit numbers per byte, low half first.

    ``[out, in / 2]`` uint8 become ``[out, in]`` bfloat16.
    """
    magnitudes = torch.tensor(_MAGNITUDES, dtype=torch.bfloat16)
    return torch.cat([magnitudes, -magnitudes])[_codes(packed)]


def mxfp4(packed: Tensor, scale: Tensor) -> Tensor:
    """Dequantize MXFP4, in which 32 adjacent inputs share a scale, to ``[out, in]`` bfloat16.

    Args:
        packed: ``[out, in / 2]`` uint8, two numbers per byte, low half first.
        scale: ``[out, in / 32]`` uint8, exponents of two.

    Raises:
        ValueError: the shapes do not fit.
    """
    _check(packed, scale)
    exponents = scale.to(torch.int32) - _BIAS
    factors = (2.0 ** exponents.to(torch.bfloat16)).repeat_interleave(_GROUP, dim=1)
    return fp4(packed) * factors


def mxfp4_integers(packed: Tensor, scale: Tensor) -> GroupedIntegers | None:
    """Return MXFP4 weights as grouped integers: numbers doubled, and scales halved.

    Returns None if a scale is NaN.
    """
    _check(packed, scale)
    if scale.numel() and int(scale.max()) == _NOT_A_NUMBER:
        return None
    exponents = scale.to(torch.float32) - (_BIAS + 1)
    halves = (2.0**exponents).to(torch.bfloat16)
    numbers = torch.tensor(E2M1_TWICE, dtype=torch.int8)[_codes(packed)]
    return GroupedIntegers(4, numbers, Groups(halves), _GROUP, is_e2m1=True)


def nvfp4_integers(packed: Tensor, scale: Tensor) -> GroupedIntegers | None:
    """Return NVFP4 weights as grouped integers: numbers doubled, and scales halved.

    Args:
        packed: ``[out, in / 2]`` uint8, two numbers per byte, low half first.
        scale: ``[out, in / 16]`` float32.
    """
    if not _fit(packed, scale, _SMALL_GROUP):
        return None
    numbers = torch.tensor(E2M1_TWICE, dtype=torch.int8)[_codes(packed)]
    return GroupedIntegers(4, numbers, Groups(scale / 2), _SMALL_GROUP, is_e2m1=True)


def _codes(packed: Tensor) -> Tensor:
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1).int()


def _check(packed: Tensor, scale: Tensor) -> None:
    for name, one in (("scales", scale), ("numbers", packed)):
        if one.dtype != torch.uint8:
            raise ValueError(f"{name}: dtype {one.dtype} is not supported for mxfp4")
    if not _fit(packed, scale, _GROUP):
        raise ValueError(f"scales of shape {list(scale.shape)} do not fit {list(packed.shape)}")


def _fit(packed: Tensor, scale: Tensor, group_size: int) -> bool:
    """Return whether there is exactly one scale per group of ``group_size`` inputs of each row."""
    if packed.dim() != 2 or scale.dim() != 2 or len(packed) != len(scale):
        return False
    return 2 * packed.shape[1] == group_size * scale.shape[1]
