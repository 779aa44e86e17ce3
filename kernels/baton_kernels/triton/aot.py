"""AotCase: one variant of a Triton kernel, to be compiled ahead of time and without a GPU.

Refuses to know: compilers, the tool that compiles the cases.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FP8 = "fp8e4nv"  # Triton's name of float8 in a signature


def fp8_suffix(cache: str) -> str:
    """Return what to append to a case's name if the cache is float8."""
    return " fp8 cache" if cache == FP8 else ""


@dataclass(frozen=True, slots=True)
class AotCase:
    """One variant of a kernel to compile; each module lists its variants in ``AOT_CASES``."""

    name: str  # unique, for example "decode_attention d128 g4 bf16"
    kernel: Any  # the @triton.jit function
    signature: Mapping[str, str]  # argument -> triton type: "*bf16", "i32", "fp32", "constexpr"
    constants: Mapping[str, int | float | bool | str | None]  # values of the "constexpr" arguments
    num_warps: int = 4
    num_stages: int = 2
    capabilities: tuple[int, ...] = (80, 90)  # compute capabilities for which to compile
    fuses_floats: bool = True  # whether the compiler may fuse multiplications with additions
