"""Paged causal attention for prompt chunks: several tokens per request, with or without a prefix.

FlashAttention-2 (Dao, arXiv:2307.08691) over a block table. A tile is as many tokens of one
request as fit with all query heads of one KV head, so that a key is loaded once for all of them.
Tiles are listed on the host, those with the most keys first, so that none is left over at the end.

Refuses to know: how requests with one token are split, see ``decode_attention``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.attention.base import AttentionMetadata
from baton_kernels.triton.aot import AotCase
from baton_kernels.triton.attention_tile import (
    PagedShape,
    TileSize,
    aot_case,
    choose_tile,
    fold,
    key_offsets,
    load_rows,
    padded_side,
    scaled_scores,
    score_factors,
)

# By padded head size: the largest tiles that do not spill registers and stay below 99 KiB of
# shared memory, which the smallest GPUs of capability 8.0 and newer have.
_TILE_ROWS = {16: 128, 32: 128, 64: 128, 128: 128, 256: 64}  # query tokens times heads
_TILE_SIZES = {
    16: TileSize(128, 8, 3),
    32: TileSize(128, 8, 3),
    64: TileSize(128, 8, 3),
    128: TileSize(64, 8, 3),
    256: TileSize(32, 4, 3),
}


@triton.jit
def attend_tile(
    q,
    positions,  # [M], of each row's token
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
    """Fold in the keys ``[first, first + TILE)``; unless MASKED, every row sees all of them."""
    tokens = first + tl.arange(0, TILE)
    offsets = key_offsets(table_row, tokens, end, block_stride, BLOCK_SIZE, HEAD_DIM)
    k = load_rows(keys + offsets, tokens, end, HEAD_DIM, D, MASKED)
    v = load_rows(values + offsets, tokens, end, HEAD_DIM, D, MASKED)
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
    tiles,  # [num_tiles, 2] int32: request, first token of the tile among the request's new ones
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
    """Grid (NUM_KV_HEADS, num_tiles)."""
    kv_head = tl.program_id(0)
    request = tl.load(tiles + tl.program_id(1) * 2)
    first_new = tl.load(tiles + tl.program_id(1) * 2 + 1)
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
    places = (heads * HEAD_DIM)[:, None] + dims[None, :]  # [M, D], inside a token
    q = tl.load(query + token[:, None] * query_stride + places, mask=in_tile, other=0.0)

    positions = num_earlier + new
    first_position = num_earlier + first_new
    end = num_earlier + tl.minimum(first_new + TOKENS, query_len)
    if HAS_WINDOW:
        start = tl.maximum(first_position - window + 1, 0)
        diagonal = start  # masks everywhere: each row's window begins elsewhere
    else:
        start = 0
        diagonal = (first_position + 1) // TILE * TILE
    highest = tl.full([M], -float("inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    table_row = block_table + request.to(tl.int64) * table_stride
    keys = kv_cache + kv_head * (BLOCK_SIZE * HEAD_DIM)
    values = keys + NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM
    stride = tl.multiple_of(block_stride, 8)
    for first in range(start, diagonal, TILE):
        highest, total, acc = attend_tile(
            q, positions, first, end, window, table_row, keys, values, stride, score_scale, cap,
            highest, total, acc,
            HEAD_DIM, BLOCK_SIZE, D, TILE, HAS_WINDOW, HAS_SOFT_CAP, False, IEEE,
        )  # fmt: skip
    for first in range(diagonal, end, TILE):
        highest, total, acc = attend_tile(
            q, positions, first, end, window, table_row, keys, values, stride, score_scale, cap,
            highest, total, acc,
            HEAD_DIM, BLOCK_SIZE, D, TILE, HAS_WINDOW, HAS_SOFT_CAP, True, IEEE,
        )  # fmt: skip
    total = tl.where(total == 0, 1.0, total)  # rows of no token may have seen no key
    result = (acc / total[:, None]).to(out.dtype.element_ty)
    token_size = NUM_KV_HEADS * GROUP * HEAD_DIM
    tl.store(out + token[:, None] * token_size + places, result, mask=in_tile)


def tile_rows(shape: PagedShape, element_size: int) -> int:
    """Rows of a tile: tokens times query heads of one KV head; see ``choose_tile`` for float32."""
    rows = _TILE_ROWS[shape.padded_head_dim] // (1 if element_size <= 2 else 4)
    return max(rows, padded_side(shape.group))


def plan_tiles(
    query_lens: Sequence[int], seq_lens: Sequence[int], tokens_per_tile: int
) -> npt.NDArray[np.int32]:
    """Cut all requests with more than one new token into tiles, those with the most keys first.

    Returns:
        ``[num_tiles, 2]``: request, and the tile's first token among the request's new ones.
    """
    lens = np.array(query_lens)
    num_tiles = np.where(lens > 1, -(-lens // tokens_per_tile), 0)  # [num_requests]
    request = np.arange(len(lens)).repeat(num_tiles)  # [num_tiles]
    index = np.arange(len(request)) - (num_tiles.cumsum() - num_tiles)[request]
    first_new = index * tokens_per_tile
    num_keys = (np.array(seq_lens) - lens)[request] + first_new
    order = np.argsort(-num_keys, kind="stable")
    return np.stack((request[order], first_new[order]), axis=1).astype(np.int32)


def launch_tiles(
    out: Tensor,
    query: Tensor,
    kv_cache: Tensor,
    metadata: AttentionMetadata,
    tiles: Tensor,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
) -> None:
    """Attend for the tokens in ``tiles``.

    Args:
        out: ``[num_tokens, num_heads, head_dim]``, contiguous; other rows are left alone.
        query: ``[num_tokens, num_heads, head_dim]``, see ``PagedShape.of``.
        kv_cache: one layer's, see ``PagedShape.of``.
        metadata: the step.
        tiles: of :func:`plan_tiles`, on the device; ``tile_rows // group`` tokens per tile.
        scale: see ``AttentionBackend.run``.
        sliding_window: see ``AttentionBackend.run``.
        soft_cap: see ``AttentionBackend.run``.
    """
    shape = PagedShape.of(query, kv_cache)
    tile = choose_tile(_TILE_SIZES, shape.padded_head_dim, query.element_size())
    score_scale, cap = score_factors(scale, soft_cap)
    varlen_attention[shape.num_kv_heads, len(tiles)](
        out,
        query,
        kv_cache,
        metadata.block_table,
        metadata.query_start_loc,
        metadata.seq_lens,
        tiles,
        score_scale,
        cap,
        sliding_window or 0,
        query.stride(0),
        metadata.block_table.stride(0),
        kv_cache.stride(0),
        **_constants(shape, query.element_size(), sliding_window is not None, soft_cap is not None),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _constants(
    shape: PagedShape, element_size: int, has_window: bool, has_soft_cap: bool
) -> dict[str, int | float | bool | None]:
    return {
        "NUM_KV_HEADS": shape.num_kv_heads,
        "GROUP": shape.group,
        "HEAD_DIM": shape.head_dim,
        "BLOCK_SIZE": shape.block_size,
        "M": tile_rows(shape, element_size),
        "D": shape.padded_head_dim,
        "TILE": choose_tile(_TILE_SIZES, shape.padded_head_dim, element_size).tokens,
        "HAS_WINDOW": has_window,
        "HAS_SOFT_CAP": has_soft_cap,
        "IEEE": element_size == 4,
    }


def _aot_case(
    head_dim: int,
    num_heads: int = 32,
    num_kv_heads: int = 8,
    dtype: str = "bf16",
    *,
    has_window: bool = False,
    has_soft_cap: bool = False,
) -> AotCase:
    shape = PagedShape(num_kv_heads, num_heads // num_kv_heads, head_dim, block_size=16)
    element_size = 4 if dtype == "fp32" else 2
    tables = dict.fromkeys(("block_table", "query_start_loc", "seq_lens", "tiles"), "i32")
    options = " window" * has_window + " soft_cap" * has_soft_cap
    return aot_case(
        f"varlen_attention d{head_dim} h{num_heads}/{num_kv_heads} {dtype}{options}",
        varlen_attention,
        dict.fromkeys(("out", "query", "kv_cache"), dtype) | tables,
        _constants(shape, element_size, has_window, has_soft_cap),
        choose_tile(_TILE_SIZES, shape.padded_head_dim, element_size),
    )


AOT_CASES = (
    *(_aot_case(head_dim) for head_dim in (64, 80, 96, 128, 256)),
    *(_aot_case(128, *heads) for heads in ((16, 8), (40, 8), (64, 8), (32, 4), (32, 32))),
    _aot_case(128, has_window=True),
    _aot_case(256, 16, has_window=True, has_soft_cap=True),
    _aot_case(128, dtype="fp16"),
    _aot_case(128, dtype="fp32"),
)
