"""Batch-invariant paged attention: a query's result has equal bits in every batch.

Only the number of keys that a query sees decides how these keys are cut into parts. Each part is
computed tile by tile, and the parts are merged in order. So the result does not depend on whether a
token is a decode, on its place in a prompt chunk, or on other requests in the step::

    parts of the keys    0 .. 511 | 512 .. 1,023 | ...        if a query sees at most 8,192 keys
                         0 .. 1,023 | 1,024 .. 2,047 | ...    if at most 16,384; at most 16 parts

In a decode, each part has its own GPU program, and the last program to finish merges all parts. In
a prompt, one program computes all parts for a tile of queries, and merges each part as it is done.
Both kernels use the same function with tiles of the same size. Both kernels are compiled without
fused multiply-adds, because the compiler fuses or not depending on the surrounding code.

Refuses to know: how the host cuts a step into tiles.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
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
    padded_side,
    score_factors,
    sink_weights,
)
from baton_kernels.triton.launch import Launch, Launcher
from baton_kernels.triton.varlen_attention import attend_tile

LEAST_PART = 512  # fewest keys of a part; all tile sizes divide it
MOST_PARTS = 16  # maximum number of parts of one query
_NO_WINDOW = 2**31 - 1

# Tiles by padded head size, for 16-bit numbers. Other tiles would give other bits, so all GPUs use
# these: with at least 64 rows, as matrix products have on capability 9.0, and small enough for the
# 99 KiB of shared memory on 8.6.
_ROWS = 64
_TILES = {
    16: TileSize(64, 4, 5),
    32: TileSize(64, 4, 5),
    64: TileSize(64, 4, 5),
    128: TileSize(32, 4, 5),
    256: TileSize(32, 8, 3),
}
_ROWS_FLOAT32, _TILE_FLOAT32 = 16, TileSize(16, 4, 1)


def part_keys(num_keys: int) -> int:
    """Return how many keys a part has if a query sees ``num_keys`` keys; as in ``parts_of``."""
    size = LEAST_PART
    while size * MOST_PARTS < num_keys:
        size *= 2
    return size


@triton.jit
def parts_of(position, end, window, TILE: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr):
    """Split into parts the keys that queries from ``position`` on see before ``end``.

    Returns the first key (the start of a tile), the number of keys per part, the index of the first
    part that has such keys, and the number of parts from there on.
    """
    first_seen = tl.maximum(position - window + 1, 0) // TILE * TILE
    size = tl.full((), LEAST, tl.int32)
    while size * MOST < end:
        size *= 2
    first_part = first_seen // size
    return first_seen, size, first_part, tl.cdiv(end, size) - first_part


@triton.jit
def weigh(highest, total, acc, lse, values):
    """Add the result of one part to the weighted sums over parts.

    Args:
        highest: ``[M]``, the highest ``lse`` so far; -inf before the first part.
        total: ``[M]``, the sum of the parts' weights relative to ``highest``.
        acc: ``[M, D]``, the sum of weighted values relative to ``highest``.
        lse: ``[M]``, log2 of the part's sum of weights; -inf if a row does not see any key of the
            part.
        values: ``[M, D]``, the part's result.
    """
    new_highest = tl.maximum(highest, lse)
    anchor = tl.where(new_highest == -float("inf"), 0.0, new_highest)
    weight = tl.exp2(lse - anchor)
    shrink = tl.exp2(highest - anchor)
    total = total * shrink + weight
    acc = acc * shrink[:, None] + values * weight[:, None]
    return new_highest, total, acc


@triton.jit
def finished(highest, total, acc, sinks, heads, present):
    """Divide the weighted sums of all parts by the sums of weights, with sinks: ``[M, D]``."""
    if sinks is not None:
        total += sink_weights(sinks, heads, present, highest)
    return acc / tl.where(total == 0, 1.0, total)[:, None]


@triton.jit
def attend_part(
    q,
    positions,  # [M], position of each row's token
    start,
    end,
    window,
    table_row,
    kv_cache,
    kv_head,
    block_stride,
    score_scale,
    cap,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    D: tl.constexpr,
    TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    IEEE: tl.constexpr,
):
    """Attend to the keys of one part, ``[start, end)``; return its ``(lse, values)``."""
    keys = kv_cache + kv_head * (BLOCK_SIZE * HEAD_DIM)
    values = keys + NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM
    highest = tl.full([q.shape[0]], -float("inf"), tl.float32)
    total = tl.zeros([q.shape[0]], tl.float32)
    acc = tl.zeros([q.shape[0], D], tl.float32)
    for first in range(start, end, TILE):
        highest, total, acc = attend_tile(
            q, positions, first, end, window, table_row, keys, values, block_stride,
            score_scale, cap, highest, total, acc,
            HEAD_DIM, BLOCK_SIZE, D, TILE, HAS_WINDOW, HAS_SOFT_CAP, True, IEEE,
        )  # fmt: skip
    lse = tl.where(total == 0, -float("inf"), highest + tl.log2(tl.maximum(total, 1e-37)))
    return lse, acc / tl.where(total == 0, 1.0, total)[:, None]


@triton.jit
def merge_parts(
    out,  # [num_heads, HEAD_DIM], result of the token
    part_out,
    part_lse,
    sinks,
    first_slot,
    num_parts,
    kv_head,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Merge the results of a decode's parts for one KV head, in order."""
    group, dims = tl.arange(0, HEADS), tl.arange(0, D)
    present, heads = group < GROUP, kv_head * GROUP + group
    in_group = present[:, None] & (dims < HEAD_DIM)[None, :]
    places = heads[:, None] * HEAD_DIM + dims[None, :]
    highest = tl.full([HEADS], -float("inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, D], tl.float32)
    for slot in range(first_slot, first_slot + num_parts):
        first_head = tl.cast(slot, tl.int64) * (NUM_KV_HEADS * GROUP)
        # Other multiprocessors wrote these values, so this multiprocessor's cache may be stale.
        lse = tl.load(part_lse + first_head + heads, mask=present, other=0.0, cache_modifier=".cg")
        part_at = part_out + first_head * HEAD_DIM + places
        values = tl.load(part_at, mask=in_group, other=0.0, cache_modifier=".cg")
        highest, total, acc = weigh(highest, total, acc, lse, values)
    merged = finished(highest, total, acc, sinks, heads, present)
    tl.store(out + places, merged.to(out.dtype.element_ty), mask=in_group)


@triton.jit(do_not_specialize=["num_requests", "num_tokens", "window", "table_stride"])
def invariant_decodes(
    out,  # [num_tokens, num_heads, HEAD_DIM]
    query,  # [num_tokens, num_heads, HEAD_DIM], strided tokens
    kv_cache,  # [num_blocks, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM], strided blocks
    block_table,  # [num_requests, max_blocks] int32
    query_start_loc,  # [num_requests + 1] int32
    seq_lens,  # [num_requests] int32
    sinks,  # [num_heads] float32, or None
    part_out,  # [num_requests, MOST, num_heads, HEAD_DIM] float32
    part_lse,  # [num_requests, MOST, num_heads] float32, log2 of the sum of weights
    arrived,  # [num_requests, NUM_KV_HEADS] int32, zero before and after
    score_scale,
    cap,
    window,
    query_stride,
    table_stride,
    block_stride,
    num_requests,
    num_tokens,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    M: tl.constexpr,  # rows of a tile
    D: tl.constexpr,  # HEAD_DIM rounded up
    TILE: tl.constexpr,  # keys at once
    HEADS: tl.constexpr,  # GROUP rounded up
    LEAST: tl.constexpr,  # fewest keys of a part
    MOST: tl.constexpr,  # maximum number of parts
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    IEEE: tl.constexpr,  # float32, not TensorFloat-32
):
    """Attend to one part of a decode's keys. Grid (NUM_KV_HEADS, num_requests, MOST).

    The program that finishes a request's last part merges all parts.
    """
    kv_head, request, number = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows, dims = tl.arange(0, M), tl.arange(0, D)
    present = rows < GROUP
    heads = kv_head * GROUP + rows
    in_tile = present[:, None] & (dims < HEAD_DIM)[None, :]
    places = heads[:, None] * HEAD_DIM + dims[None, :]  # [M, D], within a token
    token_size = NUM_KV_HEADS * GROUP * HEAD_DIM
    first_padding = tl.load(query_start_loc + num_requests) + request * MOST + number
    for padding in range(first_padding, num_tokens, num_requests * MOST):
        padding_out = out + tl.cast(padding, tl.int64) * token_size
        tl.store(padding_out + places, 0.0, mask=in_tile)
    token = tl.load(query_start_loc + request)
    end = tl.load(seq_lens + request)
    first_seen, size, first_part, num_parts = parts_of(end - 1, end, window, TILE, LEAST, MOST)
    if tl.load(query_start_loc + request + 1) - token != 1 or number >= num_parts:
        return
    token = token.to(tl.int64)
    q = tl.load(query + token * query_stride + places, mask=in_tile, other=0.0)
    start = (first_part + number) * size
    lse, values = attend_part(
        q, tl.full([M], 0, tl.int32) + (end - 1), tl.maximum(start, first_seen),
        tl.minimum(start + size, end), window, block_table + request.to(tl.int64) * table_stride,
        kv_cache, kv_head, block_stride, score_scale, cap,
        NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, D, TILE, HAS_WINDOW, HAS_SOFT_CAP, IEEE,
    )  # fmt: skip
    slot = request * MOST + number
    tl.store(part_out + slot.to(tl.int64) * token_size + places, values, mask=in_tile)
    tl.store(part_lse + slot * (NUM_KV_HEADS * GROUP) + heads, lse, mask=present)
    # One thread counts finished parts. The barrier orders this program's stores before the release;
    # the acquire orders other parts' stores before the last part's loads.
    tl.debug_barrier()
    counter = arrived + request * NUM_KV_HEADS + kv_head
    if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == num_parts - 1:
        tl.store(counter, 0)  # zero again, for the next launch
        merge_parts(
            out + token * token_size, part_out, part_lse, sinks, request * MOST, num_parts,
            kv_head, NUM_KV_HEADS, GROUP, HEAD_DIM, D, HEADS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["window", "table_stride"])
def invariant_prompts(
    out,  # arguments up to sinks: as in invariant_decodes
    query,
    kv_cache,
    block_table,
    query_start_loc,
    seq_lens,
    sinks,
    tiles,  # [num_tiles, 3] int32: request, first new token, end
    score_scale,
    cap,
    window,
    query_stride,
    table_stride,
    block_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    TILE: tl.constexpr,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    IEEE: tl.constexpr,
):
    """Attend for a tile of queries to all parts of their keys. Grid (NUM_KV_HEADS, num_tiles)."""
    kv_head, tile = tl.program_id(0), tiles + tl.program_id(1) * 3
    request, first_new, end_new = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    rows, dims = tl.arange(0, M), tl.arange(0, D)
    new = first_new + rows // GROUP
    present = new < end_new
    heads = kv_head * GROUP + rows % GROUP
    in_tile = present[:, None] & (dims < HEAD_DIM)[None, :]
    places = heads[:, None] * HEAD_DIM + dims[None, :]  # [M, D], within a token
    query_start = tl.load(query_start_loc + request)
    query_end = tl.load(query_start_loc + request + 1)
    num_earlier = tl.load(seq_lens + request) - (query_end - query_start)
    token = (query_start + new).to(tl.int64)[:, None]
    q = tl.load(query + token * query_stride + places, mask=in_tile, other=0.0)
    end = num_earlier + end_new
    first_seen, size, first_part, num_parts = parts_of(
        num_earlier + first_new, end, window, TILE, LEAST, MOST
    )
    highest = tl.full([M], -float("inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    for part in range(first_part, first_part + num_parts):
        start = part * size
        lse, values = attend_part(
            q, num_earlier + new, tl.maximum(start, first_seen), tl.minimum(start + size, end),
            window, block_table + request.to(tl.int64) * table_stride,
            kv_cache, kv_head, block_stride, score_scale, cap,
            NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, D, TILE, HAS_WINDOW, HAS_SOFT_CAP, IEEE,
        )  # fmt: skip
        highest, total, acc = weigh(highest, total, acc, lse, values)
    weighed = finished(highest, total, acc, sinks, heads, present)
    out_at = out + token * (NUM_KV_HEADS * GROUP * HEAD_DIM) + places
    tl.store(out_at, weighed.to(out.dtype.element_ty), mask=in_tile)


@dataclass(frozen=True, slots=True)
class PartBuffers:
    """Buffers in which parts of decodes leave results for the merge; later steps reuse them."""

    part_out: Tensor  # [num_requests, MOST_PARTS, num_heads, head_dim] float32
    part_lse: Tensor  # [num_requests, MOST_PARTS, num_heads] float32
    arrived: Tensor  # [num_requests, num_kv_heads] int32; zero between launches

    @classmethod
    def allocate(cls, num_requests: int, shape: PagedShape, device: torch.device) -> PartBuffers:
        """Allocate buffers for steps of up to ``num_requests`` requests."""
        parts = num_requests, MOST_PARTS, shape.num_kv_heads * shape.group
        return cls(
            torch.empty(*parts, shape.head_dim, device=device),
            torch.empty(*parts, device=device),
            torch.zeros(num_requests, shape.num_kv_heads, dtype=torch.int32, device=device),
        )


def cut_prompts(
    query_lens: Sequence[int], seq_lens: Sequence[int], tokens_per_tile: int
) -> list[tuple[int, int, int]]:
    """Cut requests with several new tokens into tiles; all queries of a tile have equal parts.

    Args:
        query_lens: number of new tokens of each request.
        seq_lens: number of all tokens of each request, including its new tokens.
        tokens_per_tile: maximum number of tokens of a tile.

    Returns:
        For each tile, its request, the first new token, and the one after the last. Tiles that see
        the most keys come first, because they take longest.
    """
    tiles: list[tuple[int, int, int]] = []
    for request, (num_new, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        earlier, first = seq_len - num_new, 0
        while num_new > 1 and first < num_new:
            most_keys = part_keys(earlier + first + 1) * MOST_PARTS
            end = min(first + tokens_per_tile, num_new, most_keys - earlier)
            tiles.append((request, first, end))
            first = end
    tiles.sort(key=lambda tile: query_lens[tile[0]] - seq_lens[tile[0]] - tile[2])
    return tiles


def tiles_of_step(metadata: AttentionMetadata, shape: PagedShape, element_size: int) -> Tensor:
    """Return the tiles of a step's prompts, ``[num_tiles, 3]`` int32, on the step's device."""
    tokens_per_tile = _rows(shape, element_size) // shape.group
    tiles = cut_prompts(metadata.query_lens, metadata.seq_lens_host, tokens_per_tile)
    on_host = torch.from_numpy(np.array(tiles, dtype=np.int32).reshape(-1, 3))
    device = metadata.seq_lens.device
    if device.type == "cuda":
        on_host = on_host.pin_memory()  # torch does not reuse this memory before it is copied
    return on_host.to(device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class BoundInvariant:
    """The launch for a step's decodes, or for its prompts, in all layers with equal options.

    Attributes:
        attend: the bound kernel: `invariant_decodes` or `invariant_prompts`.
        metadata: lengths and blocks of the step's requests.
        work: the kernel's tensors after ``sinks``: buffers of decodes, or tiles of prompts.
    """

    attend: Launch
    metadata: AttentionMetadata
    work: tuple[Tensor, ...]

    def launch(self, out: Tensor, query: Tensor, kv_cache: Tensor, sinks: Tensor | None) -> None:
        """Compute attention for the step's decodes or prompts.

        Args:
            out: ``[num_tokens, num_heads, head_dim]``, contiguous; other rows are not written.
            query: ``[num_tokens, num_heads, head_dim]``, with gaps between tokens only.
            kv_cache: cache of one layer, with gaps between blocks only.
            sinks: ``[num_heads]`` float32, an additional score per head; None: no sinks.
        """
        step = self.metadata
        self.attend(
            out, query, kv_cache, step.block_table, step.query_start_loc, step.seq_lens, sinks,
            *self.work,
        )  # fmt: skip


def bind_invariant(
    query: Tensor,
    kv_cache: Tensor,
    metadata: AttentionMetadata,
    work: PartBuffers | Tensor,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
) -> BoundInvariant:
    """Bind a step's launch to the shapes of these tensors; layers of equal shapes share it.

    Args:
        query: ``[num_tokens, num_heads, head_dim]``, with gaps between tokens only.
        kv_cache: cache of one layer, with gaps between blocks only.
        metadata: lengths and blocks of the step's requests.
        work: buffers, to bind the launch for requests with one new token; or tiles, to bind the
            launch for all other requests.
        scale: factor of the dot products.
        sliding_window: number of newest keys that a query attends to; None: all.
        soft_cap: scores ``s`` become ``soft_cap * tanh(s / soft_cap)``; None: no cap.
    """
    shape = PagedShape.of(query, kv_cache)
    is_decode = isinstance(work, PartBuffers)
    options = sliding_window is not None, soft_cap is not None
    launcher = _launcher(shape, query.element_size(), *options, is_decode=is_decode)
    window = _NO_WINDOW if sliding_window is None else sliding_window
    strides = query.stride(0), metadata.block_table.stride(0), kv_cache.stride(0)
    numbers: tuple[float, ...] = (*score_factors(scale, soft_cap), window, *strides)
    if isinstance(work, PartBuffers):
        grid = (shape.num_kv_heads, metadata.num_requests, MOST_PARTS)
        numbers = (*numbers, metadata.num_requests, len(query))
        handed = (work.part_out, work.part_lse, work.arrived)
        return BoundInvariant(Launch(launcher, grid, numbers), metadata, handed)
    launch = Launch(launcher, (shape.num_kv_heads, len(work)), numbers)
    return BoundInvariant(launch, metadata, (work,))


@functools.cache
def _launcher(
    shape: PagedShape, element_size: int, has_window: bool, has_soft_cap: bool, *, is_decode: bool
) -> Launcher:
    """Return the launcher of `invariant_decodes` or `invariant_prompts`."""
    tile = _tile(shape, element_size)
    return Launcher(
        invariant_decodes if is_decode else invariant_prompts,
        **_constants(shape, element_size, has_window, has_soft_cap, is_decode=is_decode),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        enable_fp_fusion=False,
    )


def _tile(shape: PagedShape, element_size: int) -> TileSize:
    return _TILES[shape.padded_head_dim] if element_size <= 2 else _TILE_FLOAT32


def _rows(shape: PagedShape, element_size: int) -> int:
    return max(_ROWS if element_size <= 2 else _ROWS_FLOAT32, padded_side(shape.group))


def _constants(
    shape: PagedShape, element_size: int, has_window: bool, has_soft_cap: bool, *, is_decode: bool
) -> dict[str, int | float | bool | None]:
    of_decodes = {"HEADS": 1 << (shape.group - 1).bit_length()} if is_decode else {}
    return {
        "NUM_KV_HEADS": shape.num_kv_heads,
        "GROUP": shape.group,
        "HEAD_DIM": shape.head_dim,
        "BLOCK_SIZE": shape.block_size,
        "M": _rows(shape, element_size),
        "D": shape.padded_head_dim,
        "TILE": _tile(shape, element_size).tokens,
        **of_decodes,
        "LEAST": LEAST_PART,
        "MOST": MOST_PARTS,
        "HAS_WINDOW": has_window,
        "HAS_SOFT_CAP": has_soft_cap,
        "IEEE": element_size == 4,
    }


def _aot_case(
    head_dim: int,
    num_heads: int,
    num_kv_heads: int,
    dtype: str = "bf16",
    cache: str = "",
    *,
    is_decode: bool,
    has_sinks: bool = False,
    has_window: bool = False,
) -> AotCase:
    shape = PagedShape(num_kv_heads, num_heads // num_kv_heads, head_dim, 16, bool(cache))
    element_size = 4 if dtype == "fp32" else 2
    pointers = dict.fromkeys(("out", "query"), dtype) | {"kv_cache": cache or dtype}
    pointers |= dict.fromkeys(("block_table", "query_start_loc", "seq_lens"), "i32")
    pointers |= {"sinks": "fp32"}
    if is_decode:
        pointers |= {"part_out": "fp32", "part_lse": "fp32", "arrived": "i32"}
    else:
        pointers["tiles"] = "i32"
    constants = _constants(shape, element_size, has_window, False, is_decode=is_decode)
    return aot_case(
        f"invariant_attention {'decode' if is_decode else 'prompt'} d{head_dim} "
        f"h{num_heads}/{num_kv_heads} {dtype}{fp8_suffix(cache)}"
        + " sinks" * has_sinks
        + " window" * has_window,
        invariant_decodes if is_decode else invariant_prompts,
        pointers,
        constants | ({} if has_sinks else NO_SINKS),
        _tile(shape, element_size),
        fuses_floats=False,
    )


AOT_CASES = tuple(
    case
    for is_decode in (True, False)
    for case in (
        *(_aot_case(dim, 32, 8, is_decode=is_decode) for dim in (64, 80, 128, 256)),
        _aot_case(64, 64, 8, is_decode=is_decode, has_sinks=True),
        _aot_case(128, 32, 8, is_decode=is_decode, has_window=True),
        _aot_case(128, 32, 8, "fp16", is_decode=is_decode),
        _aot_case(128, 32, 8, "fp32", is_decode=is_decode),
        _aot_case(128, 32, 8, "bf16", FP8, is_decode=is_decode),
    )
)
