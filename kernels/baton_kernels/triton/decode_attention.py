"""Paged attention for requests that compute one token (decodes): programs share keys evenly.

The method is Flash-Decoding (Dao et al., 2023, pytorch.org/blog/flash-decoding): all query heads of
a KV head form one tile, and a request's keys are divided among several GPU programs, to fill the
GPU. As in Lean Attention (Sanovar et al., arXiv:2405.10480), each program computes an equal number
of tiles, which may be of several requests, so that all programs end at one time. ``plan_decodes``
divides the tiles on the device, by the lengths of all requests. So the grid depends only on the
GPU, no launch depends on a length, and a CUDA graph can hold all launches. The program that
finishes a request's last part merges all parts::

    tiles         r0 r0 r0 | r0 r0 r1 | r1 r3 r3 | r3        r2 has no decode
    program          0          1          2        3
    slot             0        1    2     3    4     5
    first_slot    r0: 0   r1: 2   r2: 4   r3: 4   end: 6
    program_slot  0: 0   1: 1   2: 3   3: 5   end: 6

Refuses to know: prompts; sliding windows, except how far back a request looks.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.attention.base import AttentionMetadata
from baton_kernels.triton.aot import FP8, AotCase, fp8_suffix
from baton_kernels.triton.attention_tile import (
    NO_SINKS,
    PagedShape,
    TileSize,
    aot_case,
    divisor_of,
    fold,
    key_offsets,
    load_rows,
    num_multiprocessors,
    padded_side,
    scaled_scores,
    score_factors,
    sink_weights,
)
from baton_kernels.triton.launch import (
    Launch,
    Launcher,
    dependent_options,
    wait_for_kernel_before,
)
from baton_kernels.triton.tile_sizes import decode_tile, shared_kib

# Maximum number of programs per multiprocessor. A program's two tiles in flight take 64 KiB, so
# three programs fit. They use the whole bandwidth of an H200, which needs 30 KiB in flight per
# multiprocessor (latency times bandwidth).
_PROGRAMS_PER_SM = 3
_TILES_IN_FLIGHT = 2
_OTHER_SHARED_KIB = 8  # shared memory of a program besides keys and values
_MIN_PART_TOKENS = 128  # fewest keys of a part: with fewer, merging costs more than is saved
# Numbers that merge_parts loads at once: up to 64 registers per thread, or half as many where heads
# of 256 dims or float8 take registers.
_MERGED_AT_ONCE, _MERGED_AT_ONCE_IF_LARGE = 8192, 4096
# Fewest rows of the tile in which merge_parts merges heads. With fewer, Triton 3.6 and 3.7 exchange
# each part's weights through shared memory, and load one part after another.
_MERGED_ROWS = 4
_PLANNED_AT_ONCE = 512  # parts that plan_decodes computes at once
_NO_WINDOW = 2**31 - 1


@triton.jit(do_not_specialize=["num_requests", "window", "num_programs"])
def plan_decodes(
    work,  # [num_requests + num_programs, 4] int32: request, first token, end token, parts
    first_slot,  # [num_requests + 1] int32: a request's slots
    program_slot,  # [num_programs + 1] int32: a program's slots
    query_start_loc,  # [num_requests + 1] int32
    seq_lens,  # [num_requests] int32
    num_requests,
    window,  # maximum number of keys that a query attends to
    num_programs,  # programs per KV head
    TILE: tl.constexpr,  # a part begins at a multiple of TILE keys of its request
    MIN_PART_TILES: tl.constexpr,
    REQUESTS: tl.constexpr,  # num_requests rounded up
    PARTS: tl.constexpr,  # parts of a request that are computed at once
):
    """Divide the tiles of all decodes among programs evenly; one program does all the work."""
    requests = tl.arange(0, REQUESTS)
    present = requests < num_requests
    row = tl.load(query_start_loc + requests, mask=present, other=0)
    next_row = tl.load(query_start_loc + requests + 1, mask=present, other=0)
    ends = tl.load(seq_lens + requests, mask=present, other=0)
    ends = tl.where(next_row - row == 1, ends, 0)
    starts = tl.maximum(ends - window, 0)
    tiles = tl.cdiv(ends - starts, TILE)
    num_tiles = tl.sum(tiles)
    share = tl.maximum(tl.cdiv(num_tiles, num_programs), MIN_PART_TILES)  # tiles per program
    last_tiles = tl.cumsum(tiles)
    first_tiles = last_tiles - tiles
    first_programs = first_tiles // share
    parts = tl.where(tiles > 0, (last_tiles - 1) // share - first_programs + 1, 0)
    firsts = tl.cumsum(parts) - parts
    used = tl.sum(parts)
    tl.store(first_slot + requests, firsts, mask=present)
    tl.store(first_slot + num_requests, used)
    for first_part in range(0, tl.max(parts), PARTS):
        part = first_part + tl.arange(0, PARTS)[:, None]
        mine = part < parts[None, :]  # [PARTS, REQUESTS]
        program = first_programs[None, :] + part
        begin = tl.maximum(program * share, first_tiles[None, :])
        end = tl.minimum((program + 1) * share, last_tiles[None, :])
        slot = firsts[None, :] + part
        last_token = starts[None, :] + (end - first_tiles[None, :]) * TILE
        pointers = work + slot * 4
        tl.store(pointers, requests[None, :] + part * 0, mask=mine)
        tl.store(pointers + 1, starts[None, :] + (begin - first_tiles[None, :]) * TILE, mask=mine)
        tl.store(pointers + 2, tl.minimum(last_token, ends[None, :]), mask=mine)
        tl.store(pointers + 3, parts[None, :] + part * 0, mask=mine)
        tl.store(program_slot + program, slot, mask=mine & (begin == program * share))
    for program in range(tl.cdiv(num_tiles, share), num_programs + 1):
        tl.store(program_slot + program, used)


@triton.jit
def merge_parts(
    part_out,  # [num_slots, num_heads, HEAD_DIM] float32
    part_lse,  # [num_slots, num_heads] float32
    sinks,  # [num_heads] float32, or None
    first_slot,  # the request's first slot
    num_parts,
    kv_head,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,  # GROUP rounded up to a power of two
    PARTS: tl.constexpr,  # parts that are loaded at once
):
    """Merge the results of a request's parts for one KV head, by weight: ``[HEADS, D]``.

    Each thread adds its own heads and dims, so threads exchange only the sum of weights.
    """
    heads = tl.arange(0, HEADS)
    dims = tl.arange(0, D)
    in_group = heads < GROUP
    in_tile = in_group[:, None] & (dims < HEAD_DIM)[None, :]
    places = first_slot * NUM_HEADS + kv_head * GROUP + heads  # [HEADS], of the first part
    highest = tl.full([HEADS], -float("inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    for first in range(0, num_parts, 64):
        part = first + tl.arange(0, 64)
        present = (part < num_parts)[:, None] & in_group[None, :]  # [64, HEADS]
        # Other multiprocessors wrote these values, so this multiprocessor's cache may be stale.
        lse = tl.load(
            part_lse + part[:, None] * NUM_HEADS + places[None, :],
            mask=present, other=-float("inf"), cache_modifier=".cg",
        )  # fmt: skip
        new_highest = tl.maximum(highest, tl.max(lse, 0))
        anchor = tl.where(in_group, new_highest, 0.0)
        total = total * tl.exp2(highest - anchor) + tl.sum(tl.exp2(lse - anchor[None, :]), 0)
        highest = new_highest
    # A tile has all dims, so that a thread has all values of its heads and waits for no other
    # thread.
    anchors = tl.where(in_group, highest, 0.0)[:, None] + tl.zeros([HEADS, D], tl.float32)
    acc = tl.zeros([HEADS, D], tl.float32)
    for first in range(0, num_parts, PARTS):
        for offset in tl.static_range(PARTS):
            part = first + offset
            rows = places + part * NUM_HEADS
            values = tl.load(
                part_out + rows[:, None] * HEAD_DIM + dims[None, :],
                mask=in_tile & (part < num_parts), other=0.0, cache_modifier=".cg",
            )  # fmt: skip
            lse = tl.load(
                part_lse + rows, mask=in_group & (part < num_parts), other=-float("inf"),
                cache_modifier=".cg",
            )  # fmt: skip
            acc += tl.exp2(lse[:, None] - anchors) * values
    if sinks is not None:
        total += sink_weights(sinks, kv_head * GROUP + heads, in_group, highest)
    return acc / tl.where(in_group, total, 1.0)[:, None]


@triton.jit
def attend_to_part(
    slot, kv_head, out, part_out, part_lse, arrived, query, kv_cache, block_table, query_start_loc,
    work, first_slot, sinks, score_scale, cap, query_stride, table_stride, block_stride,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, M: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr,
    HEADS: tl.constexpr, PARTS: tl.constexpr, HAS_SOFT_CAP: tl.constexpr, IEEE: tl.constexpr,
):  # fmt: skip
    """Attend to one part of a request's keys; merge all parts if no other part is missing."""
    request = tl.load(work + slot * 4)
    start = tl.load(work + slot * 4 + 1)
    end = tl.load(work + slot * 4 + 2)
    parts = tl.load(work + slot * 4 + 3)
    rows = tl.arange(0, M)
    dims = tl.arange(0, D)
    heads = kv_head * GROUP + rows
    in_tile = (rows < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    places = heads[:, None] * HEAD_DIM + dims[None, :]  # [M, D], within a token
    token_size = NUM_KV_HEADS * GROUP * HEAD_DIM
    keys = kv_cache + kv_head * (BLOCK_SIZE * HEAD_DIM)
    values = keys + NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM
    token = tl.load(query_start_loc + request).to(tl.int64)
    q = tl.load(query + token * query_stride + places, mask=in_tile, other=0.0)
    highest = tl.full([M], -float("inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    table_row = block_table + request.to(tl.int64) * table_stride
    for first in range(start, end, TILE):
        tokens = first + tl.arange(0, TILE)
        offsets = key_offsets(table_row, tokens, end, block_stride, BLOCK_SIZE, HEAD_DIM)
        k = load_rows(keys + offsets, tokens, end, HEAD_DIM, D, True).to(q.dtype)
        v = load_rows(values + offsets, tokens, end, HEAD_DIM, D, True).to(q.dtype)
        products = tl.dot(q, tl.trans(k), input_precision="ieee" if IEEE else "tf32")
        scores = scaled_scores(products, score_scale, cap, HAS_SOFT_CAP)
        scores = tl.where((tokens < end)[None, :], scores, -float("inf"))
        highest, total, acc = fold(scores, v, highest, total, acc, IEEE)
    divisor = divisor_of(total, sinks, heads, rows < GROUP, highest, parts == 1)
    result = acc / divisor[:, None]
    if parts == 1:
        to = out + token * token_size + places
        tl.store(to, result.to(out.dtype.element_ty), mask=in_tile)
    else:
        tl.store(part_out + slot * token_size + places, result, mask=in_tile)
        lse = part_lse + slot * (NUM_KV_HEADS * GROUP) + heads
        tl.store(lse, highest + tl.log2(total), mask=rows < GROUP)
        # One thread counts finished parts. The barrier orders this program's stores before the
        # release; the acquire orders other parts' stores before the last part's loads.
        tl.debug_barrier()
        counter = arrived + request * NUM_KV_HEADS + kv_head
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == parts - 1:
            tl.store(counter, 0)  # zero again, for the next launch
            merged = merge_parts(
                part_out, part_lse, sinks, tl.load(first_slot + request), parts, kv_head,
                NUM_KV_HEADS * GROUP, GROUP, HEAD_DIM, D, HEADS, PARTS,
            )  # fmt: skip
            group = tl.arange(0, HEADS)
            in_group = (group < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
            merged_places = (kv_head * GROUP + group)[:, None] * HEAD_DIM + dims[None, :]
            merged_out = out + token * token_size + merged_places
            tl.store(merged_out, merged.to(out.dtype.element_ty), mask=in_group)


@triton.jit(do_not_specialize=["num_requests", "num_tokens", "table_stride"])
def decode_attention(
    out,  # [num_tokens, num_heads, HEAD_DIM]
    part_out,  # [num_slots, num_heads, HEAD_DIM] float32, normalized
    part_lse,  # [num_slots, num_heads] float32, log2 of the sum of weights
    arrived,  # [num_requests, NUM_KV_HEADS] int32, zero before and after
    query,  # [num_tokens, num_heads, HEAD_DIM], strided tokens
    kv_cache,  # [num_blocks, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM], strided blocks
    block_table,  # [num_requests, max_blocks] int32
    query_start_loc,  # [num_requests + 1] int32
    work,  # [num_slots, 4] int32, see plan_decodes
    first_slot,  # [num_requests + 1] int32, see plan_decodes
    program_slot,  # [num_programs + 1] int32, see plan_decodes
    sinks,  # [num_heads] float32, or None
    score_scale,
    cap,
    num_requests,
    num_tokens,
    query_stride,
    table_stride,
    block_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    M: tl.constexpr,  # GROUP rounded up
    D: tl.constexpr,  # HEAD_DIM rounded up
    TILE: tl.constexpr,  # keys at once
    HEADS: tl.constexpr,  # GROUP rounded up, for merging
    PARTS: tl.constexpr,  # merged at once
    HAS_SOFT_CAP: tl.constexpr,
    IEEE: tl.constexpr,  # float32, not TensorFloat-32
    LOOPS: tl.constexpr,  # programs compute several parts; else one part each
    PDL: tl.constexpr,  # whether the launch is a dependent launch
):
    """Attend to the parts of one program, for one KV head.

    The grid is (NUM_KV_HEADS, num_programs), without LOOPS (NUM_KV_HEADS, num_slots). The program
    that finishes a request's last part merges all parts.
    """
    wait_for_kernel_before(PDL)
    kv_head = tl.program_id(0)
    program = tl.program_id(1)
    rows = tl.arange(0, M)
    dims = tl.arange(0, D)
    heads = kv_head * GROUP + rows
    in_tile = (rows < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    places = heads[:, None] * HEAD_DIM + dims[None, :]  # [M, D], within a token
    token_size = NUM_KV_HEADS * GROUP * HEAD_DIM

    num_rows = tl.load(query_start_loc + num_requests)
    for padding in range(num_rows + program, num_tokens, tl.num_programs(1)):
        tl.store(out + padding * token_size + places, 0.0, mask=in_tile)

    if LOOPS:
        for slot in range(tl.load(program_slot + program), tl.load(program_slot + program + 1)):
            attend_to_part(
                slot, kv_head, out, part_out, part_lse, arrived, query, kv_cache, block_table,
                query_start_loc, work, first_slot, sinks, score_scale, cap, query_stride,
                table_stride, block_stride, NUM_KV_HEADS, GROUP, HEAD_DIM, BLOCK_SIZE, M, D, TILE,
                HEADS, PARTS, HAS_SOFT_CAP, IEEE,
            )  # fmt: skip
    elif program < tl.load(first_slot + num_requests):
        attend_to_part(
            program, kv_head, out, part_out, part_lse, arrived, query, kv_cache, block_table,
            query_start_loc, work, first_slot, sinks, score_scale, cap, query_stride, table_stride,
            block_stride, NUM_KV_HEADS, GROUP, HEAD_DIM, BLOCK_SIZE, M, D, TILE, HEADS, PARTS,
            HAS_SOFT_CAP, IEEE,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class DecodeBuffers:
    """Buffers in which a step's programs leave results for each other; later steps reuse them."""

    work: Tensor  # [num_slots, 4] int32
    first_slot: Tensor  # [num_requests + 1] int32
    program_slot: Tensor  # [num_programs + 1] int32
    part_out: Tensor  # [num_slots, num_heads, head_dim] float32
    part_lse: Tensor  # [num_slots, num_heads] float32
    arrived: Tensor  # [num_requests, num_kv_heads] int32: finished parts; zero between launches

    tile: int  # keys that a program computes at once

    @classmethod
    def allocate(cls, num_requests: int, shape: PagedShape, query: Tensor) -> DecodeBuffers:
        """Allocate buffers for up to ``num_requests`` requests with queries like ``query``."""
        size = query.element_size()
        tile = decode_tile(shape, size).tokens
        bytes_per_key = 2 * shape.padded_head_dim * (1 if shape.is_fp8 else size)
        return cls.for_tiles(num_requests, tile, tile * bytes_per_key / 1024, shape, query.device)

    @classmethod
    def for_tiles(
        cls, num_requests: int, tile: int, tile_kib: float, shape: PagedShape, device: torch.device
    ) -> DecodeBuffers:
        """Allocate buffers for programs that compute ``tile`` keys of ``tile_kib`` KiB at once."""
        num_programs = programs_per_kv_head(shape.num_kv_heads, tile_kib, device)
        # Each program may end one part early.
        num_slots = num_requests + num_programs
        num_heads = shape.num_kv_heads * shape.group
        return cls(
            torch.empty(num_slots, 4, dtype=torch.int32, device=device),
            torch.empty(num_requests + 1, dtype=torch.int32, device=device),
            torch.empty(num_programs + 1, dtype=torch.int32, device=device),
            torch.empty(num_slots, num_heads, shape.head_dim, device=device),
            torch.empty(num_slots, num_heads, device=device),
            torch.zeros(num_requests, shape.num_kv_heads, dtype=torch.int32, device=device),
            tile,
        )

    @property
    def num_programs(self) -> int:
        """Return the number of programs per KV head."""
        return len(self.program_slot) - 1


def programs_per_kv_head(num_kv_heads: int, tile_kib: float, device: torch.device) -> int:
    """Return how many programs per KV head run on the GPU at one time.

    Args:
        num_kv_heads: number of KV heads.
        tile_kib: size of the keys and values that a program computes at once, in KiB.
        device: the GPU.
    """
    fitting = int(shared_kib(device) / (_TILES_IN_FLIGHT * tile_kib + _OTHER_SHARED_KIB))
    per_multiprocessor = min(max(fitting, 1), _PROGRAMS_PER_SM)
    return max(num_multiprocessors(device) * per_multiprocessor // num_kv_heads, 1)


def launch_plan(
    buffers: DecodeBuffers, metadata: AttentionMetadata, sliding_window: int | None
) -> None:
    """Launch the kernel that fills ``work`` and the tables of slots; the host reads no tensor.

    Args:
        buffers: the buffers to fill.
        metadata: lengths of the step's requests.
        sliding_window: maximum number of keys that a query attends to; None: all.
    """
    window = _NO_WINDOW if sliding_window is None else sliding_window
    tables = buffers.work, buffers.first_slot, buffers.program_slot
    _plan_launcher(buffers.tile, padded_side(metadata.num_requests))(
        (1,),
        (*tables, metadata.query_start_loc, metadata.seq_lens),
        (metadata.num_requests, window, buffers.num_programs),
    )


@functools.cache
def _plan_launcher(tile: int, requests: int) -> Launcher:
    return Launcher(plan_decodes, **_plan_constants(tile, requests))


def _plan_constants(tile: int, requests: int) -> dict[str, int]:
    return {
        "TILE": tile,
        "MIN_PART_TILES": -(-_MIN_PART_TOKENS // tile),
        "REQUESTS": requests,
        "PARTS": max(_PLANNED_AT_ONCE // requests, 1),
    }


@dataclass(frozen=True, slots=True)
class BoundDecodes:
    """The launch of `decode_attention` for all layers of a step with equal options."""

    attend: Launch
    metadata: AttentionMetadata
    buffers: DecodeBuffers

    def launch(self, out: Tensor, query: Tensor, kv_cache: Tensor, sinks: Tensor | None) -> None:
        """Compute attention of requests with one new token; zero the padding after all requests.

        Args:
            out: ``[num_tokens, num_heads, head_dim]``, contiguous; rows of prompts are not written.
            query: ``[num_tokens, num_heads, head_dim]``, with gaps between tokens only.
            kv_cache: cache of one layer, with gaps between blocks only.
            sinks: ``[num_heads]`` float32, an additional score per head; None: no sinks.
        """
        step, buffers = self.metadata, self.buffers
        self.attend(
            out, buffers.part_out, buffers.part_lse, buffers.arrived, query, kv_cache,
            step.block_table, step.query_start_loc, buffers.work, buffers.first_slot,
            buffers.program_slot, sinks,
        )  # fmt: skip


def bind_decodes(
    query: Tensor,
    kv_cache: Tensor,
    metadata: AttentionMetadata,
    buffers: DecodeBuffers,
    scale: float,
    soft_cap: float | None,
) -> BoundDecodes:
    """Bind a step's launch to the shapes of these tensors; layers of equal shapes share it.

    Args:
        query: ``[num_tokens, num_heads, head_dim]``, with gaps between tokens only.
        kv_cache: cache of one layer, with gaps between blocks only.
        metadata: lengths and blocks of the step's requests.
        buffers: the buffers that :func:`launch_plan` fills for this step.
        scale: factor of the dot products.
        soft_cap: scores ``s`` become ``soft_cap * tanh(s / soft_cap)``; None: no cap.
    """
    shape = PagedShape.of(query, kv_cache)
    num_programs = buffers.num_programs if loops_over_parts(shape) else len(buffers.work)
    grid = (shape.num_kv_heads, num_programs)
    launcher = _launcher(shape, query.element_size(), soft_cap is not None)
    counts = metadata.num_requests, len(query)
    strides = query.stride(0), metadata.block_table.stride(0), kv_cache.stride(0)
    numbers = (*score_factors(scale, soft_cap), *counts, *strides)
    return BoundDecodes(Launch(launcher, grid, numbers), metadata, buffers)


def takes_registers(shape: PagedShape) -> bool:
    """Return whether keys take so many registers that a loop over parts would spill some."""
    return shape.is_fp8 or shape.padded_head_dim > 128


def loops_over_parts(shape: PagedShape) -> bool:
    """Return whether a program computes several parts; if not, each part has its own program."""
    return not takes_registers(shape)


@functools.cache
def _launcher(shape: PagedShape, element_size: int, has_soft_cap: bool) -> Launcher:
    """Return the launcher of `decode_attention`."""
    tile = decode_tile(shape, element_size)
    return Launcher(
        decode_attention,
        **_constants(shape, element_size, has_soft_cap),
        **dependent_options(),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _constants(
    shape: PagedShape, element_size: int, has_soft_cap: bool
) -> dict[str, int | float | bool | None]:
    heads = max(1 << (shape.group - 1).bit_length(), _MERGED_ROWS)
    at_once = _MERGED_AT_ONCE_IF_LARGE if takes_registers(shape) else _MERGED_AT_ONCE
    return {
        "NUM_KV_HEADS": shape.num_kv_heads,
        "GROUP": shape.group,
        "HEAD_DIM": shape.head_dim,
        "BLOCK_SIZE": shape.block_size,
        "M": padded_side(shape.group),
        "D": shape.padded_head_dim,
        "TILE": decode_tile(shape, element_size).tokens,
        "HEADS": heads,
        "PARTS": min(max(at_once // (heads * shape.padded_head_dim), 1), 8),
        "HAS_SOFT_CAP": has_soft_cap,
        "LOOPS": loops_over_parts(shape),
        "IEEE": element_size == 4,
    }


def _aot_case(
    head_dim: int,
    num_heads: int,
    num_kv_heads: int,
    dtype: str,
    cache: str = "",
    *,
    has_sinks: bool = False,
    is_dependent: bool = False,
) -> AotCase:
    shape = PagedShape(num_kv_heads, num_heads // num_kv_heads, head_dim, 16, bool(cache))
    element_size = 4 if dtype == "fp32" else 2
    parts = dict.fromkeys(("part_out", "part_lse"), "fp32")
    tables = dict.fromkeys(("block_table", "query_start_loc", "work"), "i32")
    tables |= dict.fromkeys(("first_slot", "program_slot", "arrived"), "i32")
    return aot_case(
        f"decode_attention d{head_dim} h{num_heads}/{num_kv_heads} {dtype}{fp8_suffix(cache)}"
        + " sinks" * has_sinks
        + " dependent" * is_dependent,
        decode_attention,
        dict.fromkeys(("out", "query"), dtype)
        | {"kv_cache": cache or dtype, "sinks": "fp32"}
        | parts
        | tables,
        _constants(shape, element_size, has_soft_cap=False)
        | {"PDL": is_dependent}
        | ({} if has_sinks else NO_SINKS),
        decode_tile(shape, element_size),
        (90,) if is_dependent else (80, 90),
    )


AOT_CASES = (
    *(_aot_case(head_dim, 32, 8, "bf16") for head_dim in (64, 80, 96, 128, 256)),
    *(_aot_case(128, *heads, "bf16") for heads in ((16, 8), (40, 8), (64, 8), (32, 4), (32, 32))),
    _aot_case(64, 64, 8, "bf16", has_sinks=True),
    _aot_case(128, 16, 8, "bf16", is_dependent=True),
    _aot_case(128, 32, 8, "fp16"),
    _aot_case(128, 32, 8, "fp32"),
    *(_aot_case(head_dim, 32, 8, "bf16", FP8) for head_dim in (64, 80, 128, 256)),
    *(_aot_case(128, 32, 8, dtype, FP8) for dtype in ("fp16", "fp32")),
    *(
        aot_case(
            f"plan_decodes r{requests}",
            plan_decodes,
            dict.fromkeys(
                ("work", "first_slot", "program_slot", "query_start_loc", "seq_lens"), "i32"
            ),
            _plan_constants(64, requests),
            TileSize(64, 4, 2),
        )
        for requests in (16, 256)
    ),
)
