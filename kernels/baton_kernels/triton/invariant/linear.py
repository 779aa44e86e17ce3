"""Batch-invariant linear layers: a token's result does not depend on the number of tokens.

A row's inputs are summed in parts. The number of parts depends only on the weight's shape, and the
parts are added in order. With few tokens, each part has its own GPU program, and the last program
to finish adds all parts; with many tokens, one program computes all parts of a tile. Both ways use
matrix products of the same size, 64 tokens by 64 rows of the weight.

Refuses to know: layers, quantized weights.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.triton.aot import AotCase
from baton_kernels.triton.launch import Launcher

FEW_TOKENS = 64
_WANTED_PROGRAMS = 256  # number of programs that fill the GPU when there are few tokens
_LEAST_STEPS = 4  # fewest steps over the inputs in a part


@dataclass(frozen=True, slots=True)
class LinearTile:
    """Tile sizes of a matrix product.

    Attributes:
        tokens: number of tokens in a tile.
        rows: number of the weight's rows in a tile.
        depth: number of inputs that a step multiplies.
        num_warps: number of warps of a program.
        num_stages: number of steps whose inputs are being loaded at once.
    """

    tokens: int
    rows: int
    depth: int
    num_warps: int
    num_stages: int


_FEW = LinearTile(FEW_TOKENS, 128, 64, 4, 4)
_MANY = LinearTile(2 * FEW_TOKENS, 128, 64, 8, 3)
# In float32, matrix units are not used, because they would round the inputs.
_FLOAT32 = LinearTile(FEW_TOKENS, 64, 32, 4, 2)


def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None, arrived: Tensor) -> Tensor:
    """Compute `baton_kernels.reference.invariant_linear` with Triton."""
    out_features, in_features = weight.shape
    rows = x.reshape(-1, in_features)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    num_tokens = len(rows)
    out = x.new_empty(num_tokens, out_features)
    if num_tokens:
        tile = _tile(num_tokens, x.itemsize)
        num_steps = -(-in_features // tile.depth)
        part_steps = steps_of_part(out_features, num_steps, tile)
        parts = -(-num_steps // part_steps)
        is_split = num_tokens <= FEW_TOKENS and parts > 1
        sums = None
        if is_split:
            sums = x.new_empty(parts, num_tokens, out_features, dtype=torch.float32)
        grid = (-(-num_tokens // tile.tokens), -(-out_features // tile.rows))
        _launcher(tile, in_features % tile.depth == 0)(
            (*grid, parts if is_split else 1),
            (rows, weight, bias, out, sums, arrived if is_split else None),
            (num_tokens, rows.stride(0), weight.stride(0), in_features, out_features, part_steps),
        )
    return out.view(*x.shape[:-1], out_features)


def steps_of_part(out_features: int, num_steps: int, tile: LinearTile) -> int:
    """Return the number of steps over the inputs in each part; the last part may have fewer."""
    wanted = _WANTED_PROGRAMS // -(-out_features // tile.rows)
    parts = max(1, min(wanted, num_steps // _LEAST_STEPS))
    return -(-num_steps // parts)


def _tile(num_tokens: int, element_size: int) -> LinearTile:
    if element_size > 2:
        return _FLOAT32
    return _FEW if num_tokens <= FEW_TOKENS else _MANY


@functools.cache
def _launcher(tile: LinearTile, is_even: bool) -> Launcher:
    return Launcher(
        linear_kernel, IS_EVEN=is_even, BLOCK_M=tile.tokens, BLOCK_N=tile.rows, BLOCK_K=tile.depth,
        num_warps=tile.num_warps, num_stages=tile.num_stages, enable_fp_fusion=False,
    )  # fmt: skip


# The number of tokens is not specialized, because another number must not recompile the kernel
# while serving.
@triton.jit(do_not_specialize=["num_tokens"])
def linear_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, sum_ptr, arrived_ptr, num_tokens, x_stride,
    weight_stride, in_features, out_features, part_steps,
    IS_EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Multiply a tile of tokens by a tile of rows, over one part of the inputs or all parts."""
    token = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    # Out-of-range tokens and rows load the last token or row; their results are not stored.
    x_at = x_ptr + tl.minimum(token, num_tokens - 1)[:, None].to(tl.int64) * x_stride
    x_at += depth[None, :]
    weight_at = weight_ptr + tl.minimum(row, out_features - 1)[None, :].to(tl.int64) * weight_stride
    weight_at += depth[:, None]
    num_steps = tl.cdiv(in_features, BLOCK_K)
    first_step, end_step = 0, num_steps
    if sum_ptr is not None:
        first_step = tl.program_id(2) * part_steps
        end_step = tl.minimum(first_step + part_steps, num_steps)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for part in range(first_step, end_step, part_steps):
        product = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for step in range(part, tl.minimum(part + part_steps, num_steps)):
            start = step * BLOCK_K
            if IS_EVEN:
                x = tl.load(x_at + start)
                weight = tl.load(weight_at + start)
            else:
                exists = depth < in_features - start
                x = tl.load(x_at + start, mask=exists[None, :], other=0.0)
                weight = tl.load(weight_at + start, mask=exists[:, None], other=0.0)
            product = tl.dot(x, weight, product, input_precision="ieee")
        total += product
    is_row = row < out_features
    exists = (token < num_tokens)[:, None] & is_row[None, :]
    place = token[:, None].to(tl.int64) * out_features + row[None, :]
    is_last = True
    if sum_ptr is not None:
        size = tl.cast(num_tokens, tl.int64) * out_features
        tl.store(sum_ptr + tl.program_id(2) * size + place, total, mask=exists)
        # One thread counts finished parts. The barrier orders this program's stores before the
        # release; the acquire orders other parts' stores before the last part's loads.
        tl.debug_barrier()
        is_last = tl.atomic_add(arrived_ptr + tl.program_id(1), 1, sem="acq_rel", scope="gpu")
        is_last = is_last == tl.num_programs(2) - 1
        if is_last:
            tl.store(arrived_ptr + tl.program_id(1), 0)  # zero again, for the next launch
            total = tl.zeros_like(total)
            for part in range(tl.num_programs(2)):
                # Other multiprocessors wrote these values, so this multiprocessor's cache may be
                # stale.
                part_at = sum_ptr + part * size + place
                total += tl.load(part_at, mask=exists, other=0.0, cache_modifier=".cg")
    if is_last:
        if bias_ptr is not None:
            total += tl.load(bias_ptr + row, mask=is_row, other=0.0).to(tl.float32)[None, :]
        tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=exists)


def _case(name: str, dtype: str, tile: LinearTile, *, is_split: bool) -> AotCase:
    types = dict.fromkeys(("x_ptr", "weight_ptr", "bias_ptr", "out_ptr"), f"*{dtype}")
    types |= {"sum_ptr": "*fp32", "arrived_ptr": "*i32", "num_tokens": "i32", "part_steps": "i32"}
    numbers = ("x_stride", "weight_stride", "in_features", "out_features")
    types |= dict.fromkeys(numbers, "i32:16")
    constants: dict[str, int | float | bool | str | None] = {
        **{"IS_EVEN": True, "bias_ptr": None},
        **{"BLOCK_M": tile.tokens, "BLOCK_N": tile.rows, "BLOCK_K": tile.depth},
    }
    if not is_split:
        constants |= dict.fromkeys(("sum_ptr", "arrived_ptr"))
    types |= dict.fromkeys(constants, "constexpr")
    return AotCase(
        f"invariant_linear {name} {dtype}", linear_kernel,
        {name: types[name] for name in linear_kernel.arg_names}, constants,
        tile.num_warps, tile.num_stages, fuses_floats=False,
    )  # fmt: skip


AOT_CASES = (
    *(_case("parts", dtype, _FEW, is_split=True) for dtype in ("bf16", "fp16")),
    _case("few", "bf16", _FEW, is_split=False),
    *(_case("many", dtype, _MANY, is_split=False) for dtype in ("bf16", "fp16")),
    _case("parts", "fp32", _FLOAT32, is_split=True),
    _case("many", "fp32", _FLOAT32, is_split=False),
)
