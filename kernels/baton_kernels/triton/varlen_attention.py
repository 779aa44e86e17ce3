"""Paged causal attention for prompt chunks: several tokens per request, with or without a prefix.

The method is FlashAttention-2 (Dao, arXiv:2307.08691), with a block table. A program computes a
tile of new tokens with all query heads of one KV head, over a range of keys (``tile_plan``). So
each key is loaded only once for all of these heads.

Requests with one new token have another kernel. Refuses to know: how the host makes tiles.
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
    divisor_of,
    fold,
    key_offsets,
    load_rows,
    num_multiprocessors,
    scaled_scores,
    score_factors,
    sink_weights,
)
from baton_kernels.triton.launch import Launch, Launcher
from baton_kernels.triton.tile_plan import most_parts, plan_tiles
from baton_kernels.triton.tile_sizes import (
    LEAST_SHARED_KIB,
    SHARED_KIB,
    shared_kib,
    varlen_rows,
    varlen_tile,
)

_NO_TOKEN = 2**30  # a position beyond the last token of every request
_MERGED_ROWS = 16  # rows of a tile that a program of merge_tiles merges


@triton.jit
def attend_tile(
    q,
    positions,  # [M], position of each row's token
    first,
    end,
    window,
    table_row,
    keys,
    values,
    block_stride,
    score_scale,
    cap,
    highest,
    total,
    acc,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    D: tl.constexpr,
    TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    MASKED: tl.constexpr,
    IEEE: tl.constexpr,  # float32, not TensorFloat-32
):
    """Attend to the keys ``[first, first + TILE)``: add them to the sums of the softmax.

    Unless MASKED is set, each row sees all of these keys.
    """
    tokens = first + tl.arange(0, TILE)
    offsets = key_offsets(table_row, tokens, end, block_stride, BLOCK_SIZE, HEAD_DIM)
    k = load_rows(keys + offsets, tokens, end, HEAD_DIM, D, MASKED).to(q.dtype)
    v = load_rows(values + offsets, tokens, end, HEAD_DIM, D, MASKED).to(q.dtype)
    products = tl.dot(q, tl.trans(k), input_precision="ieee" if IEEE else "tf32")
    scores = scaled_scores(products, score_scale, cap, HAS_SOFT_CAP)
    if MASKED:
        seen = tokens[None, :] <= positions[:, None]
        if HAS_WINDOW:
            seen = seen & (tokens[None, :] > positions[:, None] - window)
        scores = tl.where(seen, scores, -float("inf"))
    return fold(scores, v, highest, total, acc, IEEE)


@triton.jit(do_not_specialize=["window", "table_stride"])
def varlen_attention(
    out,  # [num_tokens, num_heads, HEAD_DIM]
    query,  # [num_tokens, num_heads, HEAD_DIM], strided tokens
    kv_cache,  # [num_blocks, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM], strided blocks
    block_table,  # [num_requests, max_blocks] int32
    query_start_loc,  # [num_requests + 1] int32
    seq_lens,  # [num_requests] int32
    parts,  # [num_parts, 5] int32, see TilePlan
    part_out,  # [num_slots, NUM_KV_HEADS, M, HEAD_DIM] float32, normalized
    part_lse,  # [num_slots, NUM_KV_HEADS, M] float32, log2 of the sum of weights
    sinks,  # [num_heads] float32, or None
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
    M: tl.constexpr,  # rows of a tile
    D: tl.constexpr,  # HEAD_DIM rounded up
    TILE: tl.constexpr,  # keys at once
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    IEEE: tl.constexpr,  # float32, not TensorFloat-32
):
    """Attend to one part of a tile's keys, for one KV head. Grid (NUM_KV_HEADS, num_parts)."""
    kv_head = tl.program_id(0)
    part = parts + tl.program_id(1) * 5
    request = tl.load(part)
    first_new = tl.load(part + 1)
    start = tl.load(part + 2)
    end = tl.load(part + 3)
    slot = tl.load(part + 4)
    query_start = tl.load(query_start_loc + request)
    query_len = tl.load(query_start_loc + request + 1) - query_start
    num_earlier = tl.load(seq_lens + request) - query_len

    TOKENS: tl.constexpr = M // GROUP
    rows = tl.arange(0, M)
    dims = tl.arange(0, D)
    new = first_new + rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    present = (rows < TOKENS * GROUP) & (new < query_len)
    in_tile = present[:, None] & (dims < HEAD_DIM)[None, :]
    token = (query_start + new).to(tl.int64)
    places = (heads * HEAD_DIM)[:, None] + dims[None, :]  # [M, D], within a token
    q = tl.load(query + token[:, None] * query_stride + places, mask=in_tile, other=0.0)

    positions = num_earlier + new
    diagonal = start  # each row has another window, so all tiles need masks
    if not HAS_WINDOW:
        seen_by_all = tl.minimum(num_earlier + first_new + 1, end)
        diagonal += tl.maximum(seen_by_all - start, 0) // TILE * TILE
    highest = tl.full([M], -float("inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    table_row = block_table + request.to(tl.int64) * table_stride
    keys = kv_cache + kv_head * (BLOCK_SIZE * HEAD_DIM)
    values = keys + NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM
    # Positions are relative to start, the beginning of a block, because this saves registers.
    table_row += start // BLOCK_SIZE
    positions -= start
    diagonal -= start
    end -= start
    for first in range(0, diagonal, TILE):
        highest, total, acc = attend_tile(
            q, positions, first, end, window, table_row, keys, values, block_stride,
            score_scale, cap, highest, total, acc,
            HEAD_DIM, BLOCK_SIZE, D, TILE, HAS_WINDOW, HAS_SOFT_CAP, False, IEEE,
        )  # fmt: skip
    for first in range(diagonal, end, TILE):
        highest, total, acc = attend_tile(
            q, positions, first, end, window, table_row, keys, values, block_stride,
            score_scale, cap, highest, total, acc,
            HEAD_DIM, BLOCK_SIZE, D, TILE, HAS_WINDOW, HAS_SOFT_CAP, True, IEEE,
        )  # fmt: skip
    result = acc / divisor_of(total, sinks, heads, present, highest, slot < 0)[:, None]
    if slot < 0:
        in_out = out + token[:, None] * (NUM_KV_HEADS * GROUP * HEAD_DIM) + places
        tl.store(in_out, result.to(out.dtype.element_ty), mask=in_tile)
    else:
        slot_rows = (slot * NUM_KV_HEADS + kv_head) * M + rows
        in_part = part_out + slot_rows[:, None] * HEAD_DIM + dims[None, :]
        tl.store(in_part, result, mask=in_tile)
        lse = tl.where(total == 0, -float("inf"), highest + tl.log2(tl.maximum(total, 1e-37)))
        tl.store(part_lse + slot_rows, lse, mask=present)


@triton.jit
def merge_tiles(
    out,  # [num_tokens, num_heads, HEAD_DIM]
    part_out,  # [num_slots, NUM_KV_HEADS, M, HEAD_DIM] float32
    part_lse,  # [num_slots, NUM_KV_HEADS, M] float32
    query_start_loc,  # [num_requests + 1] int32
    merges,  # [num_merges, 4] int32, see TilePlan
    sinks,  # [num_heads] float32, or None
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    M: tl.constexpr,  # rows of a tile
    D: tl.constexpr,
    ROWS: tl.constexpr,  # rows of a program
):
    """Merge the parts of a tile, for some rows. Grid (NUM_KV_HEADS, num_merges, M / ROWS)."""
    kv_head = tl.program_id(0)
    merge = merges + tl.program_id(1) * 4
    request = tl.load(merge)
    first_new = tl.load(merge + 1)
    first_slot = tl.load(merge + 2)
    num_parts = tl.load(merge + 3)
    query_start = tl.load(query_start_loc + request)
    query_len = tl.load(query_start_loc + request + 1) - query_start
    rows = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, D)
    new = first_new + rows // GROUP
    present = (rows < M // GROUP * GROUP) & (new < query_len)
    in_tile = present[:, None] & (dims < HEAD_DIM)[None, :]
    highest = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)
    for slot in range(first_slot, first_slot + num_parts):
        slot_rows = (slot * NUM_KV_HEADS + kv_head) * M + rows
        lse = tl.load(part_lse + slot_rows, mask=present, other=0.0)
        pointers = part_out + slot_rows[:, None] * HEAD_DIM + dims[None, :]
        values = tl.load(pointers, mask=in_tile, other=0.0)
        new_highest = tl.maximum(highest, lse)
        # For a row that has seen no key, -inf - -inf would give NaN.
        anchor = tl.where(new_highest == -float("inf"), 0.0, new_highest)
        weight = tl.exp2(lse - anchor)
        shrink = tl.exp2(highest - anchor)
        total = total * shrink + weight
        acc = acc * shrink[:, None] + weight[:, None] * values
        highest = new_highest
    heads = kv_head * GROUP + rows % GROUP
    if sinks is not None:
        total += sink_weights(sinks, heads, present, highest)
    result = (acc / total[:, None]).to(out.dtype.element_ty)
    token = (query_start + new).to(tl.int64)
    row_starts = (token * (NUM_KV_HEADS * GROUP) + heads) * HEAD_DIM
    tl.store(out + row_starts[:, None] + dims[None, :], result, mask=in_tile)


@dataclass(frozen=True, slots=True)
class Tiles:
    """The arrays of a ``TilePlan``, on the device."""

    parts: Tensor  # [num_parts, 5] int32
    merges: Tensor  # [num_merges, 4] int32
    num_slots: int


def plan_step(
    metadata: AttentionMetadata,
    shape: PagedShape,
    element_size: int,
    sliding_window: int | None,
    device: torch.device,
) -> Tiles:
    """Plan a step's tiles for all layers with this window, and copy the plan to the device."""
    cut = _cut(shape, element_size, device)
    plan = plan_tiles(
        metadata.query_lens, metadata.seq_lens_host, sliding_window=sliding_window, **cut
    )
    parts, merges = torch.from_numpy(plan.parts), torch.from_numpy(plan.merges)
    if device.type == "cuda":
        # torch does not reuse pinned memory before it is copied
        parts = parts.pin_memory().to(device, non_blocking=True)
        merges = merges.pin_memory().to(device, non_blocking=True)
    return Tiles(parts, merges, plan.num_slots)


def _cut(shape: PagedShape, element_size: int, device: torch.device) -> dict[str, int]:
    """Return the arguments of `plan_tiles` that depend on shape and device."""
    return {
        "tokens_per_tile": varlen_rows(shape, element_size) // shape.group,
        "keys_per_step": varlen_tile(shape, element_size, shared_kib(device)).tokens,
        "block_size": shape.block_size,
        "num_programs": -(-num_multiprocessors(device) // shape.num_kv_heads),
    }


class CapturedTiles:
    """Tiles at fixed addresses, for a captured CUDA graph.

    The graph can compute all steps of up to ``num_tokens`` tokens and ``num_requests`` requests.
    Requests with one new token are in tiles, too. Parts that a step does not need get positions
    beyond the end of every request, so that they compute nothing.

    Args:
        num_tokens: number of tokens of the captured step.
        num_requests: maximum number of requests of a step.
        shape: sizes of the layers' heads and cache.
        element_size: bytes per number of a query.
        sliding_window: sliding window of the layers; None: no window.
        device: device of the cache.

    Attributes:
        tiles: the tiles on the device.
    """

    def __init__(
        self,
        num_tokens: int,
        num_requests: int,
        shape: PagedShape,
        element_size: int,
        sliding_window: int | None,
        device: torch.device,
    ) -> None:
        self._cut = _cut(shape, element_size, device)
        self._sliding_window = sliding_window
        parts_of_work = self._cut["tokens_per_tile"], self._cut["num_programs"]
        capacity = most_parts(num_tokens, num_requests, *parts_of_work)
        capacity = -(-capacity // 4) * 4  # so that merges begin at a multiple of 16 bytes
        parts = np.tile(np.array([0, _NO_TOKEN, 0, 0, -1], dtype=np.int32), (capacity, 1))
        # At most half as many merges as parts, because a split tile has two parts or more. Unused
        # entries have one part, to avoid a division by 0.
        merges = np.tile(np.array([0, _NO_TOKEN, 0, 1], dtype=np.int32), (capacity // 2, 1))
        self._num_in_parts = parts.size
        self._idle = np.concatenate((parts.reshape(-1), merges.reshape(-1)))
        self._memory = torch.from_numpy(self._idle).to(device, copy=True)
        self.tiles = Tiles(
            self._memory[: parts.size].view(parts.shape),
            self._memory[parts.size :].view(merges.shape),
            capacity,
        )

    def fill(self, query_lens: Sequence[int], seq_lens: Sequence[int]) -> None:
        """Plan a step's tiles, and start their copy to the device.

        Args:
            query_lens: number of new tokens of each request.
            seq_lens: number of all tokens of each request, including its new tokens.
        """
        plan = plan_tiles(
            query_lens, seq_lens, sliding_window=self._sliding_window, least_new=1, **self._cut
        )
        packed = self._idle.copy()
        packed[: plan.parts.size] = plan.parts.reshape(-1)
        merges = packed[self._num_in_parts :]
        merges[: plan.merges.size] = plan.merges.reshape(-1)
        host = torch.from_numpy(packed)
        if self._memory.is_cuda:
            host = host.pin_memory()  # torch does not reuse it before it is copied
        self._memory.copy_(host, non_blocking=True)


@dataclass(frozen=True, slots=True)
class BoundTiles:
    """A step's launches for prompt chunks, in all layers with equal options.

    Attributes:
        attend, merge: the bound kernels; ``merge`` is None if no tile is split.
    """

    attend: Launch
    merge: Launch | None
    metadata: AttentionMetadata
    tiles: Tiles
    part_out: Tensor
    part_lse: Tensor

    def launch(self, out: Tensor, query: Tensor, kv_cache: Tensor, sinks: Tensor | None) -> None:
        """Compute attention for the tokens in the tiles.

        Args:
            out: ``[num_tokens, num_heads, head_dim]``, contiguous; other rows are not written.
            query: ``[num_tokens, num_heads, head_dim]``, with gaps between tokens only.
            kv_cache: cache of one layer, with gaps between blocks only.
            sinks: ``[num_heads]`` float32, an additional score per head; None: no sinks.
        """
        step, tiles = self.metadata, self.tiles
        self.attend(
            out, query, kv_cache, step.block_table, step.query_start_loc, step.seq_lens,
            tiles.parts, self.part_out, self.part_lse, sinks,
        )  # fmt: skip
        if self.merge is not None:
            self.merge(out, self.part_out, self.part_lse, step.query_start_loc, tiles.merges, sinks)


def bind_tiles(
    query: Tensor,
    kv_cache: Tensor,
    metadata: AttentionMetadata,
    tiles: Tiles,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
) -> BoundTiles:
    """Bind a step's launches to the shapes of these tensors; layers of equal shapes share them.

    Args:
        query: ``[num_tokens, num_heads, head_dim]``, with gaps between tokens only.
        kv_cache: cache of one layer, with gaps between blocks only.
        metadata: lengths and blocks of the step's requests.
        tiles: the tiles that :func:`plan_step` made for this step and window.
        scale: factor of the dot products.
        sliding_window: number of newest keys that a query attends to; None: all.
        soft_cap: scores ``s`` become ``soft_cap * tanh(s / soft_cap)``; None: no cap.
    """
    shape = PagedShape.of(query, kv_cache)
    num_rows = varlen_rows(shape, query.element_size())
    slots = (tiles.num_slots, shape.num_kv_heads, num_rows)
    attend, merge = _launchers(
        shape,
        query.element_size(),
        shared_kib(query.device),
        sliding_window is not None,
        soft_cap is not None,
    )
    strides = query.stride(0), metadata.block_table.stride(0), kv_cache.stride(0)
    numbers = (*score_factors(scale, soft_cap), sliding_window or 0, *strides)
    merge_grid = (shape.num_kv_heads, len(tiles.merges), num_rows // _MERGED_ROWS)
    return BoundTiles(
        Launch(attend, (shape.num_kv_heads, len(tiles.parts)), numbers),
        Launch(merge, merge_grid) if tiles.num_slots else None,
        metadata,
        tiles,
        torch.empty(*slots, shape.head_dim, device=query.device),
        torch.empty(slots, device=query.device),
    )


@functools.cache
def _launchers(
    shape: PagedShape, element_size: int, shared: int, has_window: bool, has_soft_cap: bool
) -> tuple[Launcher, Launcher]:
    """Return the launchers of `varlen_attention` and `merge_tiles`.

    Args:
        shared: shared memory of a program, in KiB.
    """
    tile = varlen_tile(shape, element_size, shared)
    return (
        Launcher(
            varlen_attention,
            **_constants(shape, tile, element_size, has_window, has_soft_cap),
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        ),
        Launcher(
            merge_tiles,
            NUM_KV_HEADS=shape.num_kv_heads, GROUP=shape.group, HEAD_DIM=shape.head_dim,
            M=varlen_rows(shape, element_size), D=shape.padded_head_dim, ROWS=_MERGED_ROWS,
        ),
    )  # fmt: skip


def _constants(
    shape: PagedShape, tile: TileSize, element_size: int, has_window: bool, has_soft_cap: bool
) -> dict[str, int | float | bool | None]:
    return {
        "NUM_KV_HEADS": shape.num_kv_heads,
        "GROUP": shape.group,
        "HEAD_DIM": shape.head_dim,
        "BLOCK_SIZE": shape.block_size,
        "M": varlen_rows(shape, element_size),
        "D": shape.padded_head_dim,
        "TILE": tile.tokens,
        "HAS_WINDOW": has_window,
        "HAS_SOFT_CAP": has_soft_cap,
        "IEEE": element_size == 4,
    }


def _aot_case(
    head_dim: int,
    num_heads: int = 32,
    num_kv_heads: int = 8,
    dtype: str = "bf16",
    cache: str = "",
    *,
    has_window: bool = False,
    has_soft_cap: bool = False,
    has_sinks: bool = False,
    is_small: bool = False,
) -> AotCase:
    shape = PagedShape(num_kv_heads, num_heads // num_kv_heads, head_dim, 16, bool(cache))
    element_size = 4 if dtype == "fp32" else 2
    tables = dict.fromkeys(("block_table", "query_start_loc", "seq_lens", "parts"), "i32")
    tables |= dict.fromkeys(("part_out", "part_lse"), "fp32")
    options = fp8_suffix(cache) + " window" * has_window + " soft_cap" * has_soft_cap
    options += " sinks" * has_sinks
    tile = varlen_tile(
        shape, element_size, LEAST_SHARED_KIB if is_small else min(SHARED_KIB.values())
    )
    return aot_case(
        f"varlen_attention d{head_dim} h{num_heads}/{num_kv_heads} {dtype}{options}"
        + f" {LEAST_SHARED_KIB} KiB" * is_small,
        varlen_attention,
        dict.fromkeys(("out", "query"), dtype)
        | {"kv_cache": cache or dtype, "sinks": "fp32"}
        | tables,
        _constants(shape, tile, element_size, has_window, has_soft_cap)
        | ({} if has_sinks else NO_SINKS),
        tile,
        (86, 89) if is_small else (80, 90),
    )


AOT_CASES = (
    *(_aot_case(head_dim) for head_dim in (64, 80, 96, 128, 256)),
    *(_aot_case(128, *heads) for heads in ((16, 8), (40, 8), (64, 8), (32, 4), (32, 32))),
    _aot_case(128, has_window=True),
    _aot_case(256, 16, has_window=True, has_soft_cap=True),
    _aot_case(64, 64, has_window=True, has_sinks=True),
    _aot_case(128, dtype="fp16"),
    _aot_case(128, dtype="fp32"),
    *(_aot_case(head_dim, cache=FP8) for head_dim in (64, 80, 128, 256)),
    *(_aot_case(128, dtype=dtype, cache=FP8) for dtype in ("fp16", "fp32")),
    *(_aot_case(head_dim, is_small=True) for head_dim in (64, 128, 256)),
    _aot_case(128, has_window=True, is_small=True),
    _aot_case(256, 16, has_window=True, has_soft_cap=True, is_small=True),
    aot_case(
        "merge_tiles d128 bf16",
        merge_tiles,
        {"out": "bf16", "part_out": "fp32", "part_lse": "fp32"}
        | {"query_start_loc": "i32", "merges": "i32"},
        {"NUM_KV_HEADS": 8, "GROUP": 4, "HEAD_DIM": 128, "M": 128, "D": 128, "ROWS": _MERGED_ROWS}
        | NO_SINKS,
        TileSize(64, 4, 2),
    ),
)
