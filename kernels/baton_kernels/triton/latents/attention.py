"""Attention over latents (MLA): a token's vector is the key and the value of all query heads.

    a latent      | rank: key and value | rotary: key |
    rows of a tile  token 0: heads 0..GROUP | token 1: heads 0..GROUP | ...

Prompts and decodes use the absorbed form (DeepSeek-AI, arXiv:2405.04434): a tile of latents is
loaded once, and multiplied twice, as keys and as values. If a request computes one token, its keys
are split over programs and the results merged, as in `decode_attention`; otherwise, a program
computes a tile of the request's tokens. Refuses to know: layers, how latents come into the cache.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.attention.base import AttentionMetadata
from baton_kernels.triton.aot import AotCase
from baton_kernels.triton.attention_tile import (
    PagedShape,
    divisor_of,
    fold,
    padded_side,
    score_factors,
)
from baton_kernels.triton.decode_attention import (
    DecodeBuffers,
    merge_parts,
)
from baton_kernels.triton.launch import Launcher

_MOST_HEADS = 16  # maximum number of heads in a tile; tl.dot has at least 16 rows
_PROMPT_ROWS = 32  # rows of a prompt's tile; half as many in float32, because registers are few


@dataclass(frozen=True, slots=True)
class LatentShape:
    """The sizes for which a kernel is compiled."""

    num_heads: int
    rank: int
    rotary_dim: int
    block_size: int
    element_size: int

    @property
    def group(self) -> int:
        """Number of heads in a tile, which divides the number of all heads."""
        return next(n for n in range(_MOST_HEADS, 0, -1) if self.num_heads % n == 0)

    @property
    def num_groups(self) -> int:
        """Number of groups into which the heads are divided, one per tile."""
        return self.num_heads // self.group

    @property
    def padded_group(self) -> int:
        """Number of rows per token in a tile for prompts: `group`, rounded up to a power of 2."""
        return 1 << (self.group - 1).bit_length()

    @property
    def tile_tokens(self) -> int:
        """Number of tokens in a tile for prompts."""
        rows = _PROMPT_ROWS if self.element_size < 4 else _PROMPT_ROWS // 2
        return max(1, rows // self.padded_group)

    @property
    def tile_keys(self) -> int:
        """Number of latents loaded at once: 36 KiB with DeepSeek's sizes."""
        return 32 if self.element_size < 4 else 16

    @property
    def tile_kib(self) -> float:
        """Size of the latents that are loaded at once, in KiB."""
        width = padded_side(self.rank) + padded_side(self.rotary_dim)
        return self.tile_keys * width * self.element_size / 1024

    @property
    def num_warps(self) -> int:
        """Number of warps; with 8, sums of 16 heads of rank 512 take 32 registers per thread."""
        return 8 if self.rank > 128 else 4

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages; two load block tables. float32 has no room for two tiles."""
        return 4 if self.element_size < 4 else 2

    @property
    def as_paged(self) -> PagedShape:
        """Return the shape by which decodes are divided; a group of heads counts as a KV head."""
        return PagedShape(self.num_groups, self.group, self.rank, self.block_size)


@triton.jit
def attend(
    q,  # [M, R]
    q_turned,  # [M, P]
    cache,
    table_row,
    start,
    end,
    last_seen,  # [M], last token that the row sees
    block_stride,
    token_stride,
    score_scale,
    BLOCK_SIZE: tl.constexpr,
    RANK: tl.constexpr,
    ROTARY: tl.constexpr,
    M: tl.constexpr,
    R: tl.constexpr,
    P: tl.constexpr,
    TILE: tl.constexpr,
    IEEE: tl.constexpr,
):
    """Attend to the latents [start, end); return the softmax's ``(highest, total, acc)``."""
    ranks, turns = tl.arange(0, R), tl.arange(0, P)
    highest = tl.full([M], -float("inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, R], tl.float32)
    precision: tl.constexpr = "ieee" if IEEE else "tf32"
    for first in range(start, end, TILE):
        tokens = first + tl.arange(0, TILE)
        there = tokens < end
        block_ids = tl.load(table_row + tokens // BLOCK_SIZE, mask=there, other=0)
        places = block_ids.to(tl.int64) * block_stride + tokens % BLOCK_SIZE * token_stride
        rows = cache + places[:, None]
        # Tokens from the end on become zeros, because their memory may contain NaN.
        latents = tl.load(
            rows + ranks[None, :], mask=there[:, None] & (ranks < RANK)[None, :], other=0.0
        )
        turned = tl.load(
            rows + RANK + turns[None, :], mask=there[:, None] & (turns < ROTARY)[None, :], other=0.0
        )
        products = tl.dot(q, tl.trans(latents), input_precision=precision)
        products = tl.dot(q_turned, tl.trans(turned), products, input_precision=precision)
        seen = there[None, :] & (tokens[None, :] <= last_seen[:, None])
        scores = tl.where(seen, products * score_scale, -float("inf"))
        highest, total, acc = fold(scores, latents, highest, total, acc, IEEE)
    return highest, total, acc


@triton.jit(do_not_specialize=["num_requests", "num_tokens", "table_stride"])
def latent_decodes(
    out,  # [num_tokens, num_heads, RANK]
    part_out,  # [num_slots, num_heads, RANK] float32, normalized
    part_lse,  # [num_slots, num_heads] float32, log2 of the sum of weights
    arrived,  # [num_requests, num_groups] int32, zero before and after
    query,  # [num_tokens, num_heads, RANK + ROTARY], strided tokens
    cache,  # [num_blocks, BLOCK_SIZE, RANK + ROTARY], strided blocks and tokens
    block_table,  # [num_requests, max_blocks] int32
    query_start_loc,  # [num_requests + 1] int32
    work,  # see plan_decodes
    first_slot,  # see plan_decodes
    score_scale,
    num_requests,
    num_tokens,
    query_stride,
    table_stride,
    block_stride,
    token_stride,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    RANK: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    M: tl.constexpr,  # GROUP rounded up
    R: tl.constexpr,  # RANK rounded up
    P: tl.constexpr,  # ROTARY rounded up
    TILE: tl.constexpr,
    HEADS: tl.constexpr,  # GROUP rounded up, for merging
    IEEE: tl.constexpr,
):
    """Attend for requests that compute one token. Grid (num_groups, num_slots).

    A program computes one group of heads over one part of a request's latents. The program that
    finishes a request's last part merges all parts.
    """
    group, slot = tl.program_id(0), tl.program_id(1)
    rows, ranks, turns = tl.arange(0, M), tl.arange(0, R), tl.arange(0, P)
    heads = group * GROUP + rows
    in_group = rows < GROUP
    in_tile = in_group[:, None] & (ranks < RANK)[None, :]
    places = heads[:, None] * RANK + ranks[None, :]  # [M, R], offsets within a token's results

    num_rows = tl.load(query_start_loc + num_requests)
    for padding in range(num_rows + slot, num_tokens, tl.num_programs(1)):
        tl.store(out + padding * NUM_HEADS * RANK + places, 0.0, mask=in_tile)

    if slot >= tl.load(first_slot + num_requests):
        return
    request = tl.load(work + slot * 4)
    start = tl.load(work + slot * 4 + 1)
    end = tl.load(work + slot * 4 + 2)
    parts = tl.load(work + slot * 4 + 3)
    token = tl.load(query_start_loc + request).to(tl.int64)
    q_rows = query + token * query_stride + heads[:, None] * (RANK + ROTARY)
    q = tl.load(q_rows + ranks[None, :], mask=in_tile, other=0.0)
    q_turned = tl.load(
        q_rows + RANK + turns[None, :],
        mask=in_group[:, None] & (turns < ROTARY)[None, :],
        other=0.0,
    )
    highest, total, acc = attend(
        q, q_turned, cache, block_table + request.to(tl.int64) * table_stride, start, end,
        tl.zeros([M], tl.int32) + end, block_stride, token_stride, score_scale, BLOCK_SIZE, RANK,
        ROTARY, M, R, P, TILE, IEEE,
    )  # fmt: skip
    result = acc / divisor_of(total, None, heads, in_group, highest, True)[:, None]
    if parts == 1:
        to = out + token * NUM_HEADS * RANK + places
        tl.store(to, result.to(out.dtype.element_ty), mask=in_tile)
    else:
        tl.store(part_out + slot.to(tl.int64) * NUM_HEADS * RANK + places, result, mask=in_tile)
        tl.store(part_lse + slot * NUM_HEADS + heads, highest + tl.log2(total), mask=in_group)
        # As in decode_attention: the last part must see what all other parts stored.
        tl.debug_barrier()
        counter = arrived + request * (NUM_HEADS // GROUP) + group
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == parts - 1:
            tl.store(counter, 0)
            merged = merge_parts(
                part_out, part_lse, None, tl.load(first_slot + request), parts, group, NUM_HEADS,
                GROUP, RANK, R, HEADS, 1,
            )  # fmt: skip
            merged_heads = tl.arange(0, HEADS)
            present = (merged_heads < GROUP)[:, None] & (ranks < RANK)[None, :]
            merged_places = (group * GROUP + merged_heads)[:, None] * RANK + ranks[None, :]
            to = out + token * NUM_HEADS * RANK + merged_places
            tl.store(to, merged.to(out.dtype.element_ty), mask=present)


@triton.jit(do_not_specialize=["table_stride"])
def latent_prompts(
    out,
    query,
    cache,
    block_table,
    # [num_tiles, 4] int32: request, first row of the step, number of rows, first row's position.
    tiles,
    score_scale,
    query_stride,
    table_stride,
    block_stride,
    token_stride,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    RANK: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,  # GROUP rounded up: rows of a token
    M: tl.constexpr,  # rows of a tile
    R: tl.constexpr,
    P: tl.constexpr,
    TILE: tl.constexpr,
    IEEE: tl.constexpr,
):
    """Attend for requests that compute several tokens. Grid (num_groups, num_tiles).

    A program computes one group of heads for one tile of tokens.
    """
    group, tile = tl.program_id(0), tl.program_id(1)
    request = tl.load(tiles + tile * 4)
    first_row = tl.load(tiles + tile * 4 + 1).to(tl.int64)
    num_rows = tl.load(tiles + tile * 4 + 2)
    position = tl.load(tiles + tile * 4 + 3)
    rows, ranks, turns = tl.arange(0, M), tl.arange(0, R), tl.arange(0, P)
    nth = rows // ROWS  # token of the tile
    heads = group * GROUP + rows % ROWS
    present = (nth < num_rows) & (rows % ROWS < GROUP)
    in_tile = present[:, None] & (ranks < RANK)[None, :]
    q_rows = query + (first_row + nth) * query_stride + heads * (RANK + ROTARY)
    q = tl.load(q_rows[:, None] + ranks[None, :], mask=in_tile, other=0.0)
    q_turned = tl.load(
        q_rows[:, None] + RANK + turns[None, :],
        mask=present[:, None] & (turns < ROTARY)[None, :],
        other=0.0,
    )
    highest, total, acc = attend(
        q, q_turned, cache, block_table + request.to(tl.int64) * table_stride, 0,
        position + num_rows, position + nth, block_stride, token_stride, score_scale, BLOCK_SIZE,
        RANK, ROTARY, M, R, P, TILE, IEEE,
    )  # fmt: skip
    result = acc / divisor_of(total, None, heads, present, highest, True)[:, None]
    to = out + ((first_row + nth) * NUM_HEADS + heads)[:, None] * RANK + ranks[None, :]
    tl.store(to, result.to(out.dtype.element_ty), mask=in_tile)


# ------------------------------------------------------------------ launches


def allocate(num_requests: int, shape: LatentShape, device: torch.device) -> DecodeBuffers:
    """Allocate buffers for steps of up to ``num_requests`` requests."""
    paged = shape.as_paged
    return DecodeBuffers.for_tiles(num_requests, shape.tile_keys, shape.tile_kib, paged, device)


def launch_decodes(
    out: Tensor,
    query: Tensor,
    cache: Tensor,
    metadata: AttentionMetadata,
    buffers: DecodeBuffers,
    shape: LatentShape,
    scale: float,
) -> None:
    """Attend for requests that compute one token; zero the padding after all requests."""
    num_slots = metadata.num_requests + buffers.num_programs
    table, starts = metadata.block_table, metadata.query_start_loc
    _decode_launcher(shape)(
        (shape.num_groups, num_slots),
        (
            *(out, buffers.part_out, buffers.part_lse, buffers.arrived, query, cache, table),
            *(starts, buffers.work, buffers.first_slot),
        ),
        (
            *(score_factors(scale, None)[0], metadata.num_requests, len(query), query.stride(0)),
            *(table.stride(0), *cache.stride()[:2]),
        ),
    )


def list_tiles(metadata: AttentionMetadata, shape: LatentShape) -> Tensor:
    """Divide requests that compute several tokens into tiles; copy the list to the device."""
    tiles: list[list[int]] = []
    row = 0
    lengths = zip(metadata.query_lens, metadata.seq_lens_host, strict=True)
    for request, (query_len, seq_len) in enumerate(lengths):
        for first in range(0, query_len if query_len > 1 else 0, shape.tile_tokens):
            size = min(shape.tile_tokens, query_len - first)
            tiles.append([request, row + first, size, seq_len - query_len + first])
        row += query_len
    listed = torch.tensor(tiles, dtype=torch.int32).view(-1, 4)
    return listed.to(metadata.seq_lens.device, non_blocking=True)


def launch_prompts(
    out: Tensor,
    query: Tensor,
    cache: Tensor,
    metadata: AttentionMetadata,
    tiles: Tensor,
    shape: LatentShape,
    scale: float,
) -> None:
    """Attend for the prompts of a step, whose tiles `list_tiles` made."""
    table = metadata.block_table
    _prompt_launcher(shape)(
        (shape.num_groups, len(tiles)),
        (out, query, cache, table, tiles),
        (score_factors(scale, None)[0], query.stride(0), table.stride(0), *cache.stride()[:2]),
    )


@functools.cache
def _decode_launcher(shape: LatentShape) -> Launcher:
    options = _decode_constants(shape)
    stages = {"num_warps": shape.num_warps, "num_stages": shape.num_stages}
    return Launcher(latent_decodes, **options, **stages)


@functools.cache
def _prompt_launcher(shape: LatentShape) -> Launcher:
    options = _prompt_constants(shape)
    stages = {"num_warps": shape.num_warps, "num_stages": shape.num_stages}
    return Launcher(latent_prompts, **options, **stages)


def _constants(shape: LatentShape) -> dict[str, int]:
    return {
        "NUM_HEADS": shape.num_heads,
        "GROUP": shape.group,
        "RANK": shape.rank,
        "ROTARY": shape.rotary_dim,
        "BLOCK_SIZE": shape.block_size,
        "R": padded_side(shape.rank),
        "P": padded_side(shape.rotary_dim),
        "TILE": shape.tile_keys,
        "IEEE": shape.element_size == 4,
    }


def _decode_constants(shape: LatentShape) -> dict[str, int]:
    return _constants(shape) | {"M": padded_side(shape.group), "HEADS": shape.padded_group}


def _prompt_constants(shape: LatentShape) -> dict[str, int]:
    rows = shape.tile_tokens * shape.padded_group
    return _constants(shape) | {"M": rows, "ROWS": shape.padded_group}


def _aot_cases(num_heads: int, dtype: str) -> list[AotCase]:
    """Return the cases to compile for DeepSeek V2 and V3, on ranks with ``num_heads`` heads."""
    shape = LatentShape(num_heads, 512, 64, 16, 4 if dtype == "fp32" else 2)
    pointers = {
        **dict.fromkeys(("out", "query", "cache"), f"*{dtype}"),
        **dict.fromkeys(("part_out", "part_lse"), "*fp32"),
        **dict.fromkeys(("arrived", "block_table", "query_start_loc", "work"), "*i32"),
        **dict.fromkeys(("first_slot", "tiles"), "*i32"),
        "score_scale": "fp32",
        **dict.fromkeys(("query_stride", "block_stride", "token_stride"), "i32:16"),
    }

    def case(kernel: object, name: str, constants: dict[str, int]) -> AotCase:
        types = pointers | dict.fromkeys(constants, "constexpr")
        names: list[str] = kernel.arg_names  # type: ignore[attr-defined]
        signature = {argument: types.get(argument, "i32") for argument in names}
        title = f"{name} h{num_heads} r512+64 {dtype}"
        return AotCase(title, kernel, signature, constants, shape.num_warps, shape.num_stages)

    return [
        case(latent_decodes, "latent_decodes", _decode_constants(shape)),
        case(latent_prompts, "latent_prompts", _prompt_constants(shape)),
    ]


AOT_CASES = (*_aot_cases(128, "bf16"), *_aot_cases(16, "bf16"), *_aot_cases(16, "fp32"))
