"""Root-mean-square norms, with or without first adding to the residual stream.

A program holds whole rows in registers, so that every element is read and written only once.
Refuses to know: models, where norms are applied.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.triton.aot import AotCase
from baton_kernels.triton.launch import (
    NUM_KEPT,
    Launcher,
    bind,
    dependent_options,
    row_stride,
    wait_for_kernel_before,
)

# Number of elements that a program holds; if a row is longer, it gets more threads.
TILE_ELEMENTS = 2048
LARGEST_SIZE = 32768


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute `baton_kernels.reference.rms_norm` with Triton, for a weight of ``[size]``."""
    out, _ = _norm(x, None, weight, eps, 1.0)
    return out


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Compute `baton_kernels.reference.add_rms_norm` with Triton."""
    return _norm(x, residual, weight, eps, factor)


def _norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, factor: float
) -> tuple[Tensor, Tensor]:
    """Add the residual, if there is one, and normalize; return the normalized sum, and the sum."""
    added = x if residual is None else residual
    launch = _bind(
        x.shape, x.stride(), added.stride(), x.dtype, weight.shape, weight.dtype,
        residual is not None, eps, factor,
    )  # fmt: skip
    if launch is None:  # rows have gaps
        return _norm(
            x.contiguous(), None if residual is None else residual.contiguous(), weight, eps, factor
        )
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    total = x if residual is None else torch.empty_like(out)
    launch(x, added, weight, out, total)
    return out, total


@functools.lru_cache(NUM_KEPT)
def _bind(
    shape: torch.Size,
    stride: tuple[int, ...],
    residual_stride: tuple[int, ...],
    dtype: torch.dtype,
    weight_shape: torch.Size,
    weight_dtype: torch.dtype,
    adds: bool,
    eps: float,
    factor: float,
) -> Callable[..., None] | None:
    """Bind the launch of a norm to these shapes; return None if rows are not contiguous."""
    size, num_rows = shape[-1], math.prod(shape[:-1])
    assert weight_shape == (size,), f"weight: [{size}], got {tuple(weight_shape)}"
    known = (dtype, torch.float32)
    assert weight_dtype in known, f"weight: {dtype} or float32, got {weight_dtype}"
    assert size <= LARGEST_SIZE, f"size: at most {LARGEST_SIZE}, got {size}"
    x_row, residual_row = row_stride(shape, stride), row_stride(shape, residual_stride)
    if x_row is None or residual_row is None:
        return None
    num_tile_rows, launcher = _launcher(size, adds, factor != 1.0)
    grid = (-(-num_rows // num_tile_rows),)
    return bind(launcher, grid, (x_row, residual_row, num_rows, size, eps, factor))


@functools.cache
def _launcher(size: int, adds: bool, scales: bool) -> tuple[int, Launcher]:
    """Return the number of rows that a program computes, and the launcher."""
    block = triton.next_power_of_2(size)
    num_tile_rows = max(1, TILE_ELEMENTS // block)
    return num_tile_rows, Launcher(
        rms_norm_kernel,
        ROWS=num_tile_rows, BLOCK=block, ADDS=adds, SCALES=scales, num_warps=_num_warps(block),
        **dependent_options(),
    )  # fmt: skip


def _num_warps(block: int) -> int:
    return min(max(block // 512, 4), 16)


# The number of rows is not specialized, because another number must not recompile the kernel while
# serving.
@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, sum_ptr, x_stride, residual_stride, num_rows, size,
    eps, factor, ROWS: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr,
    SCALES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Normalize ROWS rows per program, and round each intermediate result as the reference."""
    wait_for_kernel_before(PDL)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    weight_dtype: tl.constexpr = weight_ptr.dtype.element_ty
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    exists = (row < num_rows) & (column < size)
    x = tl.load(x_ptr + row * x_stride + column, mask=exists, other=0.0).to(tl.float32)
    if SCALES:
        x = (x * factor).to(dtype).to(tl.float32)
    if ADDS:
        added = tl.load(residual_ptr + row * residual_stride + column, mask=exists, other=0.0)
        total = (x + added.to(tl.float32)).to(dtype)
        tl.store(sum_ptr + row * size + column, total, mask=exists)
        x = total.to(tl.float32)
    inverse_rms = tl.rsqrt(tl.sum(x * x, axis=1) / size + eps)[:, None]
    weight = tl.load(weight_ptr + column, mask=column < size, other=0.0).to(tl.float32)
    normed = x * inverse_rms
    if weight_dtype == dtype:  # a float32 weight is applied before rounding
        normed = normed.to(dtype).to(tl.float32)
    tl.store(out_ptr + row * size + column, (normed * weight).to(dtype), mask=exists)


def _case(
    name: str, size: int, adds: bool, weight: str = "", is_dependent: bool = False
) -> AotCase:
    block = triton.next_power_of_2(size)
    pointers = ("x_ptr", "residual_ptr", "weight_ptr", "out_ptr", "sum_ptr")
    return AotCase(
        f"{name} {size} bf16" + f", {weight} weight" * bool(weight) + " dependent" * is_dependent,
        rms_norm_kernel,
        {
            **dict.fromkeys(pointers, "*bf16"),
            "weight_ptr": f"*{weight or 'bf16'}",
            **dict.fromkeys(("x_stride", "residual_stride", "size"), "i32:16"),
            "num_rows": "i32",
            **dict.fromkeys(("eps", "factor"), "fp32"),
            **dict.fromkeys(("ROWS", "BLOCK", "ADDS", "SCALES", "PDL"), "constexpr"),
        },
        {
            "ROWS": max(1, TILE_ELEMENTS // block),
            "BLOCK": block,
            "ADDS": adds,
            "SCALES": False,
            "PDL": is_dependent,
        },
        num_warps=_num_warps(block),
        capabilities=(90,) if is_dependent else (80, 90),
    )


AOT_CASES = (
    _case("rms_norm", 128, False),
    _case("add_rms_norm", 4096, True),
    _case("add_rms_norm", 4096, True, "fp32"),
    _case("add_rms_norm", 8192, True),
    _case("add_rms_norm", 1024, True, is_dependent=True),
)
