"""RMS norm over groups of a row, with a gate before or after. Refuses to know: models."""

from __future__ import annotations

import functools

import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.triton.aot import AotCase
from baton_kernels.triton.launch import Launcher

TILE_ELEMENTS = 2048  # elements that a program holds; larger groups get more threads


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    *,
    group_size: int,
    norm_before_gate: bool,
) -> Tensor:
    """Compute `baton_kernels.recurrent.gated_rms_norm` with Triton."""
    num_rows, size = x.shape
    assert x.stride(1) == gate.stride(1) == 1, "x and gate: gapless rows"
    assert size % group_size == 0
    assert len(weight) in (size, group_size)
    out = x.new_empty(num_rows, size)
    if num_rows:
        num_groups = num_rows * (size // group_size)
        num_tile_groups, launch = _launcher(group_size, norm_before_gate)
        launch(
            (-(-num_groups // num_tile_groups),),
            (x, gate, weight, out),
            (num_groups, x.stride(0), gate.stride(0), size, group_size, len(weight), eps),
        )
    return out


@functools.cache
def _launcher(group_size: int, norm_before_gate: bool) -> tuple[int, Launcher]:
    """Return the number of groups that a program computes, and the launcher."""
    block = triton.next_power_of_2(group_size)
    num_tile_groups = max(1, TILE_ELEMENTS // block)
    return num_tile_groups, Launcher(
        gated_rms_norm_kernel,
        ROWS=num_tile_groups,
        BLOCK=block,
        NORM_FIRST=norm_before_gate,
        num_warps=_num_warps(block),
    )


def _num_warps(block: int) -> int:
    return min(max(block // 512, 4), 16)


@triton.jit(do_not_specialize=["num_groups"])
def gated_rms_norm_kernel(
    x_ptr, gate_ptr, weight_ptr, out_ptr, num_groups, x_stride, gate_stride, size, group_size,
    weight_size, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr, NORM_FIRST: tl.constexpr,
):  # fmt: skip
    """Normalize ROWS groups per program; the groups of all rows are numbered from 0 on."""
    dtype = out_ptr.dtype.element_ty
    group = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    groups_per_row = size // group_size
    row = (group // groups_per_row)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    exists = (group < num_groups)[:, None] & (column < group_size)
    place = (group % groups_per_row * group_size)[:, None] + column  # place within the row
    x = tl.load(x_ptr + row * x_stride + place, mask=exists, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + place, mask=exists, other=0.0).to(tl.float32)
    small = tl.exp(-tl.abs(gate))  # exp(-|x|) cannot overflow
    gate = gate * tl.where(gate >= 0, 1.0, small) / (1 + small)
    if not NORM_FIRST:
        x *= gate
    inverse_rms = tl.rsqrt(tl.sum(x * x, axis=1) / group_size + eps)[:, None]
    weight = tl.load(weight_ptr + place % weight_size, mask=exists, other=0.0).to(tl.float32)
    normed = ((x * inverse_rms).to(dtype).to(tl.float32) * weight).to(dtype).to(tl.float32)
    if NORM_FIRST:
        normed *= gate
    tl.store(out_ptr + row * size + place, normed.to(dtype), mask=exists)


def _case(group_size: int, norm_before_gate: bool) -> AotCase:
    block = triton.next_power_of_2(group_size)
    numbers = ("x_stride", "gate_stride", "size", "group_size", "weight_size")
    return AotCase(
        f"gated_rms_norm {group_size} bf16",
        gated_rms_norm_kernel,
        {
            **dict.fromkeys(("x_ptr", "gate_ptr", "weight_ptr", "out_ptr"), "*bf16"),
            "num_groups": "i32",
            **dict.fromkeys(numbers, "i32:16"),
            "eps": "fp32",
            **dict.fromkeys(("ROWS", "BLOCK", "NORM_FIRST"), "constexpr"),
        },
        {"ROWS": max(1, TILE_ELEMENTS // block), "BLOCK": block, "NORM_FIRST": norm_before_gate},
        num_warps=_num_warps(block),
    )


AOT_CASES = (_case(128, True), _case(4096, False))
