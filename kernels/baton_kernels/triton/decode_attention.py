"""Paged attention for requests that compute one token (decodes): a request's keys are split.

The method is Flash-Decoding (Dao et al., 2023, pytorch.org/blog/flash-decoding): all query heads of
a KV head form one tile, and a request's keys are divided among several GPU programs, to fill the
GPU. ``plan_decodes`` divides the keys on the device, by the lengths of all requests. So one long
request among short ones is split finely, no launch depends on a length, and a CUDA graph can hold
all launches. The program that finishes a request's last part merges all parts::

    slot        0       1       2       3       4       5..
    work      r0 part 0  r0 part 1  r0 part 2  r1  r3   -        r2 has no decode
    first_slot  r0: 0   r1: 3   r2: 4   r3: 4   end: 5

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
from baton_kernels.triton.launch import Launch, Launcher
from baton_kernels.triton.tile_sizes import decode_tile

# Programs per multiprocessor. A program's two tiles in flight take 64 KiB, so three programs fit,
# and use all bandwidth of an H200, which needs 30 KiB in flight per multiprocessor (latency times
# bandwidth).
_PROGRAMS_PER_SM = 3
_MIN_PART_TOKENS = 128  # fewest keys of a part: with fewer, merging costs more than is saved
_MERGED_AT_ONCE = 4096  # numbers that merge_parts loads at once: 32 registers per thread
_NO_WINDOW = 2**31 - 1


@triton.jit(do_not_specialize=["num_requests", "window", "spare_slots", "num_slots"])
def plan_decodes(
    work,  # [num_slots, 4] int32: request, first token, end token, number of parts
    first_slot,  # [num_requests + 1] int32
    query_start_loc,  # [num_requests + 1] int32
    seq_lens,  # [num_requests] int32
    num_requests,
    window,  # maximum number of keys that a query attends to
    spare_slots,  # number of programs per KV head that fill the GPU
    num_slots,  # at least num_requests + spare_slots
    TILE: tl.constexpr,  # parts are whole tiles, except a request's last part
    MIN_PART_TOKENS: tl.constexpr,
    REQUESTS: tl.constexpr,  # num_requests rounded up
    SLOTS: tl.constexpr,  # num_slots rounded up
):
    """Divide the keys of all decodes among slots; one program does all the work."""
    requests = tl.arange(0, REQUESTS)
    present = requests < num_requests
    row = tl.load(query_start_loc + requests, mask=present, other=0)
    next_row = tl.load(query_start_loc + requests + 1, mask=present, other=0)
    ends = tl.load(seq_lens + requests, mask=present, other=0)
    ends = tl.where(next_row - row == 1, ends, 0)
    starts = tl.maximum(ends - window, 0)
    lens = ends - starts
    # With this size, there are at most spare_slots full parts and num_requests smaller parts.
    part_tokens = tl.maximum(tl.cdiv(tl.sum(lens), spare_slots), MIN_PART_TOKENS)
    part_tokens = tl.cdiv(part_tokens, TILE) * TILE
    parts = tl.cdiv(lens, part_tokens)
    firsts = tl.cumsum(parts) - parts
    used = tl.sum(parts)
    tl.store(first_slot + requests, firsts, mask=present)
    tl.store(first_slot + num_requests, used)
    even = tl.cdiv(tl.cdiv(lens, tl.maximum(parts, 1)), TILE) * TILE
    for part in range(0, tl.max(parts)):
        mine = part < parts
        pointers = work + (firsts + part) * 4
        tl.store(pointers, requests, mask=mine)
        tl.store(pointers + 1, starts + part * even, mask=mine)
        tl.store(pointers + 2, tl.minimum(starts + (part + 1) * even, ends), mask=mine)
        tl.store(pointers + 3, parts, mask=mine)
    slots = tl.arange(0, SLOTS)
    idle = (slots >= used) & (slots < num_slots)
    tl.store(work + slots * 4 + 1, 0, mask=idle)
    tl.store(work + slots * 4 + 2, 0, mask=idle)


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
    HEADS: tl.constexpr,  # GROUP rounded up
    PARTS: tl.constexpr,  # parts merged at once
):
    """Merge the results of a request's parts for one KV head, by weight: ``[HEADS, D]``."""
    heads = tl.arange(0, HEADS)
    dims = tl.arange(0, D)
    highest = tl.full([HEADS], -float("inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, D], tl.float32)
    for first in range(0, num_parts, PARTS):
        part = first + tl.arange(0, PARTS)
        present = (part < num_parts)[:, None] & (heads < GROUP)[None, :]  # [PARTS, HEADS]
        rows = (first_slot + part)[:, None] * NUM_HEADS + (kv_head * GROUP + heads)[None, :]
        in_tile = present[:, :, None] & (dims < HEAD_DIM)[None, None, :]
        pointers = part_out + rows[:, :, None] * HEAD_DIM + dims[None, None, :]
        # Other multiprocessors wrote these values, so this multiprocessor's cache may be stale.
        lse = tl.load(part_lse + rows, mask=present, other=-float("inf"), cache_modifier=".cg")
        values = tl.load(pointers, mask=in_tile, other=0.0, cache_modifier=".cg")
        new_highest = tl.maximum(highest, tl.max(lse, 0))
        anchor = tl.where(heads < GROUP, new_highest, 0.0)
        weights = tl.exp2(lse - anchor[None, :])
        shrink = tl.exp2(highest - anchor)
        total = total * shrink + tl.sum(weights, 0)
        acc = acc * shrink[:, None] + tl.sum(weights[:, :, None] * values, 0)
        highest = new_highest
    if sinks is not None:
        total += sink_weights(sinks, kv_head * GROUP + heads, heads < GROUP, highest)
    return acc / tl.where(heads < GROUP, total, 1.0)[:, None]


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
):
    """Attend to one part of a request's keys, for one KV head. Grid (NUM_KV_HEADS, num_slots).

    The program that finishes a request's last part merges all parts.
    """
    kv_head = tl.program_id(0)
    slot = tl.program_id(1)
    rows = tl.arange(0, M)
    dims = tl.arange(0, D)
    heads = kv_head * GROUP + rows
    in_tile = (rows < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    places = heads[:, None] * HEAD_DIM + dims[None, :]  # [M, D], within a token
    token_size = NUM_KV_HEADS * GROUP * HEAD_DIM

    num_rows = tl.load(query_start_loc + num_requests)
    for padding in range(num_rows + slot, num_tokens, tl.num_programs(1)):
        tl.store(out + padding * token_size + places, 0.0, mask=in_tile)

    request = tl.load(work + slot * 4)
    start = tl.load(work + slot * 4 + 1)
    end = tl.load(work + slot * 4 + 2)
    parts = tl.load(work + slot * 4 + 3)
    if start >= end:
        return
    token = tl.load(query_start_loc + request).to(tl.int64)
    q = tl.load(query + token * query_stride + places, mask=in_tile, other=0.0)
    highest = tl.full([M], -float("inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    table_row = block_table + request.to(tl.int64) * table_stride
    keys = kv_cache + kv_head * (BLOCK_SIZE * HEAD_DIM)
    values = keys + NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM
    for first in range(start, end, TILE):
        tokens = first + tl.arange(0, TILE)
        offsets = key_offsets(table_row, tokens, end, block_stride, BLOCK_SIZE, HEAD_DIM)
        k = load_rows(keys + offsets, tokens, end, HEAD_DIM, D, True).to(q.dtype)
        v = load_rows(values + offsets, tokens, end, HEAD_DIM, D, True).to(q.dtype)
        products = tl.dot(q, tl.trans(k), input_precision="ieee" if IEEE else "tf32")
        scores = scaled_scores(products, score_scale, cap, HAS_SOFT_CAP)
        scores = tl.where((tokens < end)[None, :], scores, -float("inf"))
        highest, total, acc = fold(scores, v, highest, total, acc, IEEE)
    result = acc / divisor_of(total, sinks, heads, rows < GROUP, highest, parts == 1)[:, None]
    if parts == 1:
        tl.store(out + token * token_size + places, result.to(out.dtype.element_ty), mask=in_tile)
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


@dataclass(frozen=True, slots=True)
class DecodeBuffers:
    """Buffers in which a step's programs leave results for each other; later steps reuse them."""

    work: Tensor  # [num_slots, 4] int32
    first_slot: Tensor  # [num_requests + 1] int32
    part_out: Tensor  # [num_slots, num_heads, head_dim] float32
    part_lse: Tensor  # [num_slots, num_heads] float32
    arrived: Tensor  # [num_requests, num_kv_heads] int32: finished parts; zero between launches

    @classmethod
    def allocate(cls, num_requests: int, shape: PagedShape, device: torch.device) -> DecodeBuffers:
        """Allocate buffers for steps of up to ``num_requests`` requests."""
        num_slots = num_requests + spare_slots(shape, device)
        num_heads = shape.num_kv_heads * shape.group
        return cls(
            torch.empty(num_slots, 4, dtype=torch.int32, device=device),
            torch.empty(num_requests + 1, dtype=torch.int32, device=device),
            torch.empty(num_slots, num_heads, shape.head_dim, device=device),
            torch.empty(num_slots, num_heads, device=device),
            torch.zeros(num_requests, shape.num_kv_heads, dtype=torch.int32, device=device),
        )


def spare_slots(shape: PagedShape, device: torch.device) -> int:
    """Return how many slots, besides one per request, are needed to fill the GPU."""
    return -(-num_multiprocessors(device) * _PROGRAMS_PER_SM // shape.num_kv_heads)


def launch_plan(
    buffers: DecodeBuffers,
    metadata: AttentionMetadata,
    shape: PagedShape,
    element_size: int,
    sliding_window: int | None,
) -> None:
    """Launch the kernel that fills ``work`` and ``first_slot``; the host reads no tensor."""
    spare = spare_slots(shape, metadata.seq_lens.device)
    num_slots = metadata.num_requests + spare
    tile = decode_tile(shape, element_size)
    window = _NO_WINDOW if sliding_window is None else sliding_window
    launch = _plan_launcher(tile.tokens, padded_side(metadata.num_requests), padded_side(num_slots))
    launch(
        (1,),
        (buffers.work, buffers.first_slot, metadata.query_start_loc, metadata.seq_lens),
        (metadata.num_requests, window, spare, num_slots),
    )


@functools.cache
def _plan_launcher(tile: int, requests: int, slots: int) -> Launcher:
    return Launcher(
        plan_decodes, TILE=tile, MIN_PART_TOKENS=_MIN_PART_TOKENS, REQUESTS=requests, SLOTS=slots
    )


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
            step.block_table, step.query_start_loc, buffers.work, buffers.first_slot, sinks,
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
    grid = (shape.num_kv_heads, metadata.num_requests + spare_slots(shape, query.device))
    launcher = _launcher(shape, query.element_size(), soft_cap is not None)
    counts = metadata.num_requests, len(query)
    strides = query.stride(0), metadata.block_table.stride(0), kv_cache.stride(0)
    numbers = (*score_factors(scale, soft_cap), *counts, *strides)
    return BoundDecodes(Launch(launcher, grid, numbers), metadata, buffers)


@functools.cache
def _launcher(shape: PagedShape, element_size: int, has_soft_cap: bool) -> Launcher:
    """Return the launcher of `decode_attention`."""
    tile = decode_tile(shape, element_size)
    return Launcher(
        decode_attention,
        **_constants(shape, element_size, has_soft_cap),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _constants(
    shape: PagedShape, element_size: int, has_soft_cap: bool
) -> dict[str, int | float | bool | None]:
    heads = 1 << (shape.group - 1).bit_length()
    return {
        "NUM_KV_HEADS": shape.num_kv_heads,
        "GROUP": shape.group,
        "HEAD_DIM": shape.head_dim,
        "BLOCK_SIZE": shape.block_size,
        "M": padded_side(shape.group),
        "D": shape.padded_head_dim,
        "TILE": decode_tile(shape, element_size).tokens,
        "HEADS": heads,
        "PARTS": max(_MERGED_AT_ONCE // (heads * shape.padded_head_dim), 1),
        "HAS_SOFT_CAP": has_soft_cap,
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
) -> AotCase:
    shape = PagedShape(num_kv_heads, num_heads // num_kv_heads, head_dim, 16, bool(cache))
    element_size = 4 if dtype == "fp32" else 2
    parts = dict.fromkeys(("part_out", "part_lse"), "fp32")
    tables = dict.fromkeys(("block_table", "query_start_loc", "work"), "i32")
    tables |= dict.fromkeys(("first_slot", "arrived"), "i32")
    return aot_case(
        f"decode_attention d{head_dim} h{num_heads}/{num_kv_heads} {dtype}{fp8_suffix(cache)}"
        + " sinks" * has_sinks,
        decode_attention,
        dict.fromkeys(("out", "query"), dtype)
        | {"kv_cache": cache or dtype, "sinks": "fp32"}
        | parts
        | tables,
        _constants(shape, element_size, has_soft_cap=False) | ({} if has_sinks else NO_SINKS),
        decode_tile(shape, element_size),
    )


AOT_CASES = (
    *(_aot_case(head_dim, 32, 8, "bf16") for head_dim in (64, 80, 96, 128, 256)),
    *(_aot_case(128, *heads, "bf16") for heads in ((16, 8), (40, 8), (64, 8), (32, 4), (32, 32))),
    _aot_case(64, 64, 8, "bf16", has_sinks=True),
    _aot_case(128, 32, 8, "fp16"),
    _aot_case(128, 32, 8, "fp32"),
    *(_aot_case(head_dim, 32, 8, "bf16", FP8) for head_dim in (64, 80, 128, 256)),
    *(_aot_case(128, 32, 8, dtype, FP8) for dtype in ("fp16", "fp32")),
    aot_case(
        "plan_decodes r256",
        plan_decodes,
        dict.fromkeys(("work", "first_slot", "query_start_loc", "seq_lens"), "i32"),
        {"TILE": 64, "MIN_PART_TOKENS": _MIN_PART_TOKENS, "REQUESTS": 256, "SLOTS": 512},
        TileSize(64, 4, 2),
    ),
)
