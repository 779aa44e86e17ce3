"""AotCase: one variant of a kernel to compile ahead of time, without a GPU.

Refuses to know: compilers, the tool that reads the cases.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FP8 = "fp8e4nv"  # Triton's name of float8 in a signature


def fp8_suffix(cache: str) -> str:
    """Return the last part of a case's name: the cache's dtype."""
    return " fp8 cache" if cache == FP8 else ""


@dataclass(frozen=True, slots=True)
class AotCase:
    """One compiled variant of one kernel; modules list their cases as ``AOT_CASES``."""

    name: str  # unique, for example "decode_attention d128 g4 bf16"
    kernel: Any  # the @triton.jit function
    signature: Mapping[str, str]  # argument -> triton type: "*bf16", "i32", "fp32", "constexpr"
    constants: Mapping[str, int | float | bool | str | None]  # values of the "constexpr" arguments
    num_warps: int = 4
    num_stages: int = 2
    capabilities: tuple[int, ...] = (80, 90)  # compute capabilities to compile for
    fuses_floats: bool = True  # whether the compiler may fuse multiplications with additions
