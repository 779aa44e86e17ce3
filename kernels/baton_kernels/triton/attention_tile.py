"""Functions of attention kernels for one tile of keys: load keys, score, add to the softmax.

Refuses to know: requests, grids, which query a row belongs to.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_kernels import reference
from baton_kernels.triton.aot import FP8, AotCase

# Constants of cases that are compiled ahead of time, for attention without sinks.
NO_SINKS: dict[str, int | float | bool | None] = {"sinks": None}
_LOG2_E = math.log2(math.e)


def padded_side(size: int) -> int:
    """Round the side of a tile up to what ``tl.dot`` needs: a power of two of at least 16."""
    return max(16, 1 << (size - 1).bit_length())


@dataclass(frozen=True, slots=True)
class PagedShape:
    """The sizes of heads and KV cache for which a kernel is compiled."""

    num_kv_heads: int
    group: int  # number of query heads that share a KV head
    head_dim: int
    block_size: int
    is_fp8: bool = False  # whether the cache is float8; queries never are

    @classmethod
    def of(cls, query: Tensor, kv_cache: Tensor) -> PagedShape:
        """Return the sizes of one layer's tensors; assert that the kernels support their strides.

        Args:
            query: ``[num_tokens, num_heads, head_dim]``; gaps are allowed between tokens only.
            kv_cache: ``[num_blocks, 2, num_kv_heads, block_size, head_dim]``; gaps are allowed
                between blocks only.
        """
        is_fp8 = kv_cache.dtype == reference.FP8
        return _paged_shape(
            query.shape[1:], query.stride()[1:], kv_cache.shape[2:4], kv_cache.stride(), is_fp8
        )

    @property
    def padded_head_dim(self) -> int:
        """Return ``head_dim`` rounded up for ``tl.dot``: the constant ``D`` of kernels."""
        return padded_side(self.head_dim)


@functools.lru_cache  # all layers of a model mostly have equal arguments
def _paged_shape(
    token: tuple[int, int],
    token_strides: tuple[int, int],
    heads: tuple[int, int],
    strides: tuple[int, ...],
    is_fp8: bool,
) -> PagedShape:
    """Make the result of `PagedShape.of`; equal arguments give a cached result.

    Args:
        token: ``(num_heads, head_dim)``.
        token_strides: strides of heads and dims in the query.
        heads: ``(num_kv_heads, block_size)``.
        strides: strides of the cache.
        is_fp8: whether the cache is float8.
    """
    (num_heads, head_dim), (num_kv_heads, block_size) = token, heads
    inside = (num_kv_heads * block_size * head_dim, block_size * head_dim, head_dim, 1)
    assert strides[1:] == inside, f"a block is not contiguous: {strides}"
    assert token_strides == (head_dim, 1), f"a token is not: {token_strides}"
    # A thread loads 16 bytes at once.
    assert strides[0] % 8 == 0, f"stride of blocks is odd: {strides[0]}"
    assert num_heads % num_kv_heads == 0
    return PagedShape(num_kv_heads, num_heads // num_kv_heads, head_dim, block_size, is_fp8)


@dataclass(frozen=True, slots=True)
class TileSize:
    """A kernel's tile sizes for one size of heads."""

    tokens: int  # keys per tile
    num_warps: int
    num_stages: int  # pipeline stages: up to two load the block table, the others load keys


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Return a GPU's number of multiprocessors; without a GPU (interpreter), a small number."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


def score_factors(scale: float, soft_cap: float | None) -> tuple[float, float]:
    """Return the factors ``(score_scale, cap)`` that :func:`scaled_scores` needs."""
    if soft_cap is None:
        return scale * _LOG2_E, 0.0
    return scale / soft_cap * 2 * _LOG2_E, soft_cap * _LOG2_E


@triton.jit
def scaled_scores(products, score_scale, cap, HAS_SOFT_CAP: tl.constexpr):
    """Turn products of queries and keys into scores, whose ``exp2`` are softmax weights."""
    scores = products * score_scale
    if HAS_SOFT_CAP:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1); score_scale contains the factor 2 log2(e).
        scores = cap - 2 * cap / (tl.exp2(scores) + 1)
    return scores


@triton.jit
def key_offsets(
    block_table_row,
    tokens,
    end,
    block_stride,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Return the offset of each token's key (KV head 0) in the cache; 0 from token ``end`` on."""
    block_ids = tl.load(block_table_row + tokens // BLOCK_SIZE, mask=tokens < end, other=0)
    return block_ids.to(tl.int64) * tl.multiple_of(block_stride, 8) + tokens % BLOCK_SIZE * HEAD_DIM


@triton.jit
def load_rows(rows, tokens, end, HEAD_DIM: tl.constexpr, D: tl.constexpr, MASKED: tl.constexpr):
    """Load keys or values, ``[number of rows, D]``.

    Tokens from ``end`` on, whose memory may contain NaN, and dims from ``HEAD_DIM`` on become
    zeros.
    """
    dims = tl.arange(0, D)
    pointers = rows[:, None] + dims[None, :]
    if MASKED:
        wanted = (tokens < end)[:, None]
        if D != HEAD_DIM:
            wanted = wanted & (dims < HEAD_DIM)[None, :]
        loaded = tl.load(pointers, mask=wanted, other=0.0)
    elif D != HEAD_DIM:
        loaded = tl.load(pointers, mask=(dims < HEAD_DIM)[None, :], other=0.0)
    else:
        loaded = tl.load(pointers)
    return loaded


@triton.jit
def sink_weights(sinks, heads, present, highest):
    """Return each row's softmax weight of the sink, relative to the highest score."""
    scores = tl.load(sinks + heads, mask=present, other=0.0) * 1.4426950408889634  # log2(e)
    return tl.exp2(tl.minimum(scores - highest, 126.0))  # 2^128 exceeds a float


@triton.jit
def divisor_of(total, sinks, heads, present, highest, is_whole):
    """Return each row's divisor of the softmax; 1 for a row without keys.

    If the part is a whole row (``is_whole``), the sinks' weights are included.
    """
    divisor = tl.where(total == 0, 1.0, total)
    if sinks is not None:
        divisor += tl.where(is_whole, sink_weights(sinks, heads, present, highest), 0.0)
    return divisor


@triton.jit
def fold(scores, values, highest, total, acc, IEEE: tl.constexpr):
    """Add one tile to the online softmax (Milakov and Gimelshein, arXiv:1805.02867).

    Args:
        scores: ``[M, TILE]``, -inf where hidden.
        values: ``[TILE, D]``.
        highest: ``[M]``, the highest score so far; -inf while a row has seen no key.
        total: ``[M]``, the sum of weights relative to ``highest``.
        acc: ``[M, D]``, the sum of weighted values relative to ``highest``.

    Returns:
        The new ``(highest, total, acc)``.
    """
    new_highest = tl.maximum(highest, tl.max(scores, 1))
    # If a row has seen no key, -inf minus -inf would give NaN.
    anchor = tl.where(new_highest == -float("inf"), 0.0, new_highest)
    weights = tl.exp2(scores - anchor[:, None])
    shrink = tl.exp2(highest - anchor)
    total = total * shrink + tl.sum(weights, 1)
    acc = tl.dot(
        weights.to(values.dtype),
        values,
        acc * shrink[:, None],
        input_precision="ieee" if IEEE else "tf32",
    )
    return new_highest, total, acc


def aot_case(
    name: str,
    kernel: Any,
    pointers: Mapping[str, str],
    constants: Mapping[str, int | float | bool | None],
    tile: TileSize,
    capabilities: tuple[int, ...] = (80, 90),
    *,
    fuses_floats: bool = True,
) -> AotCase:
    """Make the case by which an attention kernel is compiled ahead of time.

    Arguments of the kernel that are in neither ``pointers`` nor ``constants`` have the same types
    in all attention kernels.
    """
    types = {"score_scale": "fp32", "cap": "fp32"}
    types |= dict.fromkeys(("query_stride", "block_stride"), "i32:16")
    types |= {argument: f"*{dtype}" for argument, dtype in pointers.items()}
    types |= dict.fromkeys(constants, "constexpr")
    signature = {argument: types.get(argument, "i32") for argument in kernel.arg_names}
    if FP8 in pointers.values():
        capabilities = tuple(capability for capability in capabilities if capability >= 89)
    return AotCase(
        *(name, kernel, signature, constants, tile.num_warps, tile.num_stages, capabilities),
        fuses_floats,
    )
