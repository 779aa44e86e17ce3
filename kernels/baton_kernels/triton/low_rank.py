"""Products of LoRA adapters: multiply each row by its adapter's A (shrink), then by B (expand).

Rows are sorted by their adapter's slot, in tiles of one slot each (`RowTiles`). Grids depend only
on the number of rows and on the sizes of the slots, and the host reads no results, so a CUDA graph
can hold both launches. Programs without an adapter, or beyond the adapter's rank, return at once.
Refuses to know: models, which request a row belongs to.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.low_rank import LowRankSlots
from baton_kernels.row_tiles import RowTiles
from baton_kernels.triton.aot import AotCase
from baton_kernels.triton.launch import Launcher

FEW_ROWS = 16  # rows of a tile, the fewest that tl.dot supports
MANY_ROWS = 64
# ranks that a shrinking program computes, and that an expanding program reads per step
BLOCK_R = 32
BLOCK_K = 64
BLOCK_N = 64


def add_low_rank_by_slot(
    out: Tensor, x: Tensor, slots: LowRankSlots, ids: Tensor, tiles: RowTiles
) -> None:
    """Compute `baton_kernels.reference.add_low_rank_by_slot` with Triton."""
    num_rows, depth = x.shape
    if not num_rows:
        return
    num_slots, num_parts, max_rank, _ = slots.a.shape
    assert len(ids) == num_rows == len(out)
    assert len(tiles.ends) == num_slots + 1
    assert x.stride(1) == out.stride(1) == 1
    middle = x.new_empty(num_rows, num_parts * max_rank)
    _shrink_launcher(tiles.tile_rows)(
        (tiles.count, num_parts * triton.cdiv(max_rank, BLOCK_R)),
        (x, slots.a, slots.ranks, middle, *tiles.tensors),
        (x.stride(0), depth, num_slots, num_parts, max_rank),
    )
    num_blocks = triton.cdiv(slots.most_columns, BLOCK_N)
    of_layer = (slots.b, slots.ranks, slots.first_columns, slots.gains, slots.shifts, out)
    _expand_launcher(tiles.tile_rows)(
        (tiles.count, num_parts * num_blocks),
        (middle, *of_layer, *tiles.tensors),
        (out.stride(0), slots.b.shape[1], num_slots, num_parts, max_rank, num_blocks),
    )


@functools.cache
def _shrink_launcher(tile_rows: int) -> Launcher:
    sizes = {"BLOCK_M": tile_rows, "BLOCK_R": BLOCK_R, "BLOCK_K": BLOCK_K}
    return Launcher(shrink_kernel, **sizes, num_warps=4, num_stages=3)


@functools.cache
def _expand_launcher(tile_rows: int) -> Launcher:
    sizes = {"BLOCK_M": tile_rows, "BLOCK_R": BLOCK_R, "BLOCK_N": BLOCK_N}
    return Launcher(expand_kernel, **sizes, num_warps=_expand_warps(tile_rows), num_stages=3)


def _expand_warps(tile_rows: int) -> int:
    """Return the warps of an expanding program; with 4, large tiles would spill registers."""
    return 4 if tile_rows == FEW_ROWS else 8


@triton.jit
def shrink_kernel(
    x_ptr,
    a_ptr,
    rank_ptr,
    middle_ptr,
    slot_ptr,
    first_ptr,
    end_ptr,
    order_ptr,
    x_stride,
    depth,
    num_slots,
    num_parts,
    max_rank,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute the product of a tile's rows with BLOCK_R rows of one part of A."""
    tile = tl.program_id(0)
    blocks = tl.cdiv(max_rank, BLOCK_R)
    part = tl.program_id(1) // blocks
    first_rank = tl.program_id(1) % blocks * BLOCK_R
    slot = tl.load(slot_ptr + tile)
    rank = tl.load(rank_ptr + slot * num_parts + part, mask=slot < num_slots, other=0)
    if first_rank >= rank:
        return
    place = tl.load(first_ptr + tile) + tl.arange(0, BLOCK_M)
    is_row = place < tl.load(end_ptr + slot)
    row = tl.load(order_ptr + place, mask=is_row, other=0)
    column = first_rank + tl.arange(0, BLOCK_R)
    is_column = column < rank
    inputs = tl.arange(0, BLOCK_K)
    x_at = x_ptr + row[:, None] * x_stride + inputs[None, :]
    a_row = (slot * num_parts + part) * max_rank + column
    a_at = a_ptr + a_row[None, :] * depth + inputs[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_R), dtype=tl.float32)
    for start in range(0, depth, BLOCK_K):
        exists = inputs < depth - start
        x = tl.load(x_at + start, mask=is_row[:, None] & exists[None, :], other=0.0)
        a = tl.load(a_at + start, mask=exists[:, None] & is_column[None, :], other=0.0)
        total = tl.dot(x, a, total, input_precision="ieee")
    middle_at = middle_ptr + row[:, None] * (num_parts * max_rank) + part * max_rank
    is_own = is_row[:, None] & is_column[None, :]
    tl.store(middle_at + column[None, :], total.to(middle_ptr.dtype.element_ty), mask=is_own)


@triton.jit
def expand_kernel(
    middle_ptr,
    b_ptr,
    rank_ptr,
    column_ptr,
    gain_ptr,
    shift_ptr,
    out_ptr,
    slot_ptr,
    first_ptr,
    end_ptr,
    order_ptr,
    out_stride,
    out_features,
    num_slots,
    num_parts,
    max_rank,
    num_blocks,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute BLOCK_N columns of the product with a part of B; add them to the tile's rows."""
    tile = tl.program_id(0)
    part = tl.program_id(1) // num_blocks
    slot = tl.load(slot_ptr + tile)
    rank = tl.load(rank_ptr + slot * num_parts + part, mask=slot < num_slots, other=0)
    first_column = tl.load(column_ptr + part) + tl.program_id(1) % num_blocks * BLOCK_N
    end_column = tl.load(column_ptr + part + 1)
    if (rank == 0) | (first_column >= end_column):
        return
    place = tl.load(first_ptr + tile) + tl.arange(0, BLOCK_M)
    is_row = place < tl.load(end_ptr + slot)
    row = tl.load(order_ptr + place, mask=is_row, other=0)
    column = first_column + tl.arange(0, BLOCK_N)
    is_column = column < end_column
    ranks = tl.arange(0, BLOCK_R)
    middle_row = middle_ptr + row[:, None] * (num_parts * max_rank) + part * max_rank
    b_at = b_ptr + (slot * out_features + column)[None, :] * max_rank + ranks[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, rank, BLOCK_R):
        exists = ranks < rank - start
        is_middle = is_row[:, None] & exists[None, :]
        middle = tl.load(middle_row + start + ranks[None, :], mask=is_middle, other=0.0)
        b = tl.load(b_at + start, mask=exists[:, None] & is_column[None, :], other=0.0)
        total = tl.dot(middle, b, total, input_precision="ieee")
    is_own = is_row[:, None] & is_column[None, :]
    out_at = out_ptr + row[:, None] * out_stride + column[None, :]
    own = tl.load(out_at, mask=is_own, other=0.0).to(tl.float32)
    if gain_ptr is not None:
        of_slot = slot * out_features + column
        gain = tl.load(gain_ptr + of_slot, mask=is_column, other=0.0)
        shift = tl.load(shift_ptr + of_slot, mask=is_column, other=0.0)
        own = own * gain[None, :] + shift[None, :]
    tl.store(out_at, (own + total).to(out_ptr.dtype.element_ty), mask=is_own)


_TYPES = (
    dict.fromkeys(("x_ptr", "a_ptr", "b_ptr", "middle_ptr", "out_ptr"), "*bf16")
    | dict.fromkeys(("rank_ptr", "column_ptr"), "*i32")
    | dict.fromkeys(("gain_ptr", "shift_ptr"), "*fp32")
    | dict.fromkeys(("slot_ptr", "first_ptr", "end_ptr", "order_ptr"), "*i64")
    | dict.fromkeys(("x_stride", "depth", "out_stride", "out_features", "max_rank"), "i32:16")
    | dict.fromkeys(("num_slots", "num_parts", "num_blocks"), "i32")
)


def _cases(tile_rows: int) -> list[AotCase]:
    sizes: dict[str, int | str | None] = {"BLOCK_M": tile_rows, "BLOCK_R": BLOCK_R}
    warps = _expand_warps(tile_rows)
    shrink, expand = sizes | {"BLOCK_K": BLOCK_K}, sizes | {"BLOCK_N": BLOCK_N}
    without = expand | {"gain_ptr": None, "shift_ptr": None}
    return [
        AotCase(
            name, kernel, _TYPES | dict.fromkeys(constants, "constexpr"), constants, num_warps, 3
        )
        for name, kernel, constants, num_warps in (
            (f"low_rank shrink m{tile_rows} bf16", shrink_kernel, shrink, 4),
            (f"low_rank expand m{tile_rows} bf16", expand_kernel, without, warps),
            (f"low_rank expand m{tile_rows} bf16, gains", expand_kernel, expand, warps),
        )
    ]


AOT_CASES = (*_cases(FEW_ROWS), *_cases(MANY_ROWS))
