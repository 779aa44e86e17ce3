"""Kernels between the fused projection and attention: normalize and rotate heads, store KV.

A program processes some heads of one token: query and key heads are normalized and rotated, key and
value heads are written to the cache. Refuses to know: models, how slots are chosen.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_kernels import reference
from baton_kernels.triton.aot import FP8, AotCase, fp8_suffix
from baton_kernels.triton.fp8 import has_fp8, to_stored
from baton_kernels.triton.launch import (
    NUM_KEPT,
    Launcher,
    bind,
    dependent_options,
    wait_for_kernel_before,
)
from baton_kernels.triton.norm import rms_norm

HEADS = 8  # heads that a program processes, if there are few tokens
# With many tokens, a program processes more heads, which share its loads of angles and weights.
MANY_TOKENS = 1024
MANY_DIMS = 2048  # dims that a program then processes: 32 per thread


def norm_rotary_store(
    qkv: Tensor,
    num_heads: int,
    cos: Tensor,
    sin: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor | None,
    *,
    query_weight: Tensor | None = None,
    key_weight: Tensor | None = None,
    value_weight: Tensor | None = None,
    eps: float = 0.0,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> Tensor:
    """Compute `baton_kernels.reference.norm_rotary_store` in one launch.

    A norm over all heads together is a separate launch before. On a GPU without float8, a float8
    cache is left to the reference.
    """
    if kv_cache.dtype == reference.FP8 and not has_fp8(kv_cache.device):
        return reference.norm_rotary_store(
            *(qkv, num_heads, cos, sin, kv_cache, slot_mapping), query_weight=query_weight,
            key_weight=key_weight, value_weight=value_weight, eps=eps, key_scale=key_scale,
            value_scale=value_scale,
        )  # fmt: skip
    if query_weight is not None and len(query_weight) != kv_cache.shape[4]:
        qkv = _norm_all_heads(qkv, query_weight, key_weight, eps)
        query_weight = key_weight = None
    shape, launch = _bind(
        qkv.shape, qkv.stride(), qkv.dtype, num_heads, cos.shape, cos.dtype,
        kv_cache.shape, kv_cache.stride(), kv_cache.dtype,
        None if query_weight is None else query_weight.dtype,
        None if key_weight is None else key_weight.dtype,
        None if value_weight is None else value_weight.dtype,
        eps, key_scale, value_scale, slot_mapping is not None,
    )  # fmt: skip
    out = qkv.new_empty(shape)
    launch(
        qkv, cos.contiguous(), sin.contiguous(), query_weight, key_weight, value_weight,
        slot_mapping, out, kv_cache,
    )  # fmt: skip
    return out


@functools.lru_cache(NUM_KEPT)
def _bind(
    qkv_shape: torch.Size,
    qkv_stride: tuple[int, ...],
    dtype: torch.dtype,
    num_heads: int,
    angles_shape: torch.Size,
    angles_dtype: torch.dtype,
    cache_shape: torch.Size,
    cache_stride: tuple[int, ...],
    cache_dtype: torch.dtype,
    query_weight_dtype: torch.dtype | None,
    key_weight_dtype: torch.dtype | None,
    value_weight_dtype: torch.dtype | None,
    eps: float,
    key_scale: float,
    value_scale: float,
    stores: bool,
) -> tuple[tuple[int, int, int], Callable[..., None]]:
    """Bind the launch to these shapes and dtypes; return the queries' shape, and the launch."""
    _, _, num_kv_heads, block_size, head_dim = cache_shape
    assert qkv_stride[1] == cache_stride[4] == 1
    known = (dtype, reference.FP8)
    assert cache_dtype in known, f"kv_cache: {dtype} or float8, got {cache_dtype}"
    num_tokens = qkv_shape[0]
    if not stores:  # the rows have only query heads
        num_kv_heads = 0
    heads = heads_of_program(num_tokens, head_dim)
    launcher = _launcher(num_heads, num_kv_heads, head_dim, block_size, angles_shape[-1], heads)
    grid = (num_tokens, -(-(num_heads + 2 * num_kv_heads) // heads))
    numbers = (qkv_stride[0], *cache_stride[:4], eps, 1 / key_scale, 1 / value_scale)
    return (num_tokens, num_heads, head_dim), bind(launcher, grid, numbers)


def _norm_all_heads(
    qkv: Tensor, query_weight: Tensor | None, key_weight: Tensor | None, eps: float
) -> Tensor:
    """Normalize all query heads of a token together, and all key heads together."""
    assert query_weight is not None
    assert key_weight is not None
    sizes = [len(query_weight), len(key_weight)]
    query, key, value = qkv.split([*sizes, qkv.shape[1] - sum(sizes)], dim=1)
    return torch.cat(
        (rms_norm(query, query_weight, eps), rms_norm(key, key_weight, eps), value), dim=1
    )


def heads_of_program(num_tokens: int, head_dim: int) -> int:
    """Return how many heads of a token a program processes."""
    if num_tokens < MANY_TOKENS:
        return HEADS
    return max(MANY_DIMS // (1 << (head_dim - 1).bit_length()), 1)


@functools.cache
def _launcher(
    num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, rotary_dim: int, heads: int
) -> Launcher:
    return Launcher(
        norm_rotary_store_kernel,
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
        HALF=rotary_dim // 2, HEADS=heads, num_warps=2, **_blocks(head_dim, rotary_dim),
        **dependent_options(),
    )  # fmt: skip


def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `baton_kernels.reference.rotary` with Triton."""
    return _rotate(query, cos, sin), _rotate(key, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    num_tokens, num_heads, head_dim = x.shape
    rotary_dim = cos.shape[-1]
    assert x.stride(2) == 1
    out = x.new_empty(x.shape)
    if num_tokens:
        rotary_kernel[(num_tokens, triton.cdiv(num_heads, HEADS))](
            x, cos.contiguous(), sin.contiguous(), out, x.stride(0), x.stride(1),
            NUM_HEADS=num_heads, HEAD_DIM=head_dim, HALF=rotary_dim // 2, HEADS=HEADS,
            num_warps=2, **_blocks(head_dim, rotary_dim),
        )  # fmt: skip
    return out


def store_kv(
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    *,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """Compute `baton_kernels.reference.store_kv` with Triton."""
    num_tokens, num_kv_heads, head_dim = key.shape
    assert key.stride(2) == value.stride(2) == kv_cache.stride(4) == 1
    if num_tokens:
        store_kv_kernel[(num_tokens, 2)](
            key, value, slot_mapping, kv_cache, key.stride(0), key.stride(1), value.stride(0),
            value.stride(1), *kv_cache.stride()[:4], 1 / key_scale, 1 / value_scale,
            NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, BLOCK_SIZE=kv_cache.shape[3],
            HEADS=triton.next_power_of_2(num_kv_heads), DIMS=triton.next_power_of_2(head_dim),
            num_warps=2,
        )  # fmt: skip


def _blocks(head_dim: int, rotary_dim: int) -> dict[str, int]:
    """Choose tile sizes for half of the rotated dims, and for the dims that are not rotated.

    The second size is 0 if all dims are rotated.
    """
    tail = head_dim - rotary_dim
    return {
        "HALF_BLOCK": triton.next_power_of_2(rotary_dim // 2),
        "TAIL_BLOCK": triton.next_power_of_2(tail) if tail else 0,
    }


# ------------------------------------------------------------------ kernels


@triton.jit
def turn(x1, x2, cos_ptr, sin_ptr, pair, HALF: tl.constexpr):
    """Rotate the two halves of some heads of a token, each ``[HEADS, HALF_BLOCK]``, in float32."""
    exists = pair < HALF
    cos1 = tl.load(cos_ptr + pair, mask=exists, other=0.0).to(tl.float32)[None, :]
    cos2 = tl.load(cos_ptr + HALF + pair, mask=exists, other=0.0).to(tl.float32)[None, :]
    sin1 = tl.load(sin_ptr + pair, mask=exists, other=0.0).to(tl.float32)[None, :]
    sin2 = tl.load(sin_ptr + HALF + pair, mask=exists, other=0.0).to(tl.float32)[None, :]
    return x1 * cos1 - x2 * sin1, x2 * cos2 + x1 * sin2


@triton.jit
def normalize(
    x, inverse_rms, is_query, is_key, is_value, query_weight_ptr, key_weight_ptr,
    value_weight_ptr, dim, exists, dtype: tl.constexpr,
):  # fmt: skip
    """Normalize some dims of heads, ``[HEADS, n]``, by the query's, key's or value's weight.

    Rounds as the reference does.
    """
    wide = x * inverse_rms[:, None]
    normed = wide.to(dtype).to(tl.float32)
    if value_weight_ptr is not None:
        of_value = normed
        if value_weight_ptr.dtype.element_ty != dtype:
            of_value = wide
        weight = tl.load(value_weight_ptr + dim, mask=exists, other=0.0).to(tl.float32)[None, :]
        x = tl.where(is_value[:, None], (of_value * weight).to(dtype).to(tl.float32), x)
    if query_weight_ptr is not None:
        # A float32 weight is applied before rounding.
        if query_weight_ptr.dtype.element_ty != dtype:
            normed = wide
        weight = tl.load(query_weight_ptr + dim, mask=exists, other=0.0).to(tl.float32)[None, :]
        x = tl.where(is_query[:, None], (normed * weight).to(dtype).to(tl.float32), x)
    if key_weight_ptr is not None:
        if key_weight_ptr.dtype.element_ty != dtype:
            normed = wide
        weight = tl.load(key_weight_ptr + dim, mask=exists, other=0.0).to(tl.float32)[None, :]
        x = tl.where(is_key[:, None], (normed * weight).to(dtype).to(tl.float32), x)
    return x


@triton.jit
def norm_rotary_store_kernel(
    qkv_ptr, cos_ptr, sin_ptr, query_weight_ptr, key_weight_ptr, value_weight_ptr, slots_ptr,
    out_ptr, cache_ptr, qkv_stride, block_stride, plane_stride, head_stride, token_stride, eps,
    key_factor, value_factor,  # reciprocals of the scales of keys and values, for a float8 cache
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, HALF_BLOCK: tl.constexpr,
    TAIL_BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Normalize, rotate and store HEADS heads of one token; all dims are in registers.

    | x1 (HALF) | x2 (HALF) | tail (HEAD_DIM - 2 * HALF) |
    """
    wait_for_kernel_before(PDL)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    stored_dtype: tl.constexpr = cache_ptr.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_query, is_value = head < NUM_HEADS, head >= NUM_HEADS + NUM_KV_HEADS
    is_key = (head >= NUM_HEADS) & (head < NUM_HEADS + NUM_KV_HEADS)
    head_exists = (head < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None]
    pair, tail = tl.arange(0, HALF_BLOCK), 2 * HALF
    exists = head_exists & (pair < HALF)[None, :]
    x_ptrs = qkv_ptr + token * qkv_stride + head[:, None] * HEAD_DIM
    x1 = tl.load(x_ptrs + pair[None, :], mask=exists, other=0.0).to(tl.float32)
    x2 = tl.load(x_ptrs + HALF + pair[None, :], mask=exists, other=0.0).to(tl.float32)
    squares = tl.sum(x1 * x1 + x2 * x2, axis=1)
    if TAIL_BLOCK > 0:
        tail += tl.arange(0, TAIL_BLOCK)
        tail_exists = head_exists & (tail < HEAD_DIM)[None, :]
        rest = tl.load(x_ptrs + tail[None, :], mask=tail_exists, other=0.0).to(tl.float32)
        squares += tl.sum(rest * rest, axis=1)
    inverse_rms = squares
    has_norm: tl.constexpr = query_weight_ptr is not None or key_weight_ptr is not None
    if has_norm or value_weight_ptr is not None:
        inverse_rms = tl.rsqrt(squares / HEAD_DIM + eps)
    x1 = normalize(
        x1, inverse_rms, is_query, is_key, is_value, query_weight_ptr, key_weight_ptr,
        value_weight_ptr, pair, pair < HALF, dtype,
    )  # fmt: skip
    x2 = normalize(
        x2, inverse_rms, is_query, is_key, is_value, query_weight_ptr, key_weight_ptr,
        value_weight_ptr, HALF + pair, pair < HALF, dtype,
    )  # fmt: skip
    turned1, turned2 = turn(
        x1, x2, cos_ptr + token * 2 * HALF, sin_ptr + token * 2 * HALF, pair, HALF
    )
    x1 = tl.where(is_value[:, None], x1, turned1).to(dtype)
    x2 = tl.where(is_value[:, None], x2, turned2).to(dtype)

    slot = tl.full((), -1, tl.int64)  # without slots, nothing is stored
    if slots_ptr is not None:
        slot = tl.load(slots_ptr + token)
    kv_head = tl.where(is_value, head - NUM_KV_HEADS, head) - NUM_HEADS
    place = slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * token_stride
    cache_ptrs = cache_ptr + place + (is_value * plane_stride + kv_head * head_stride)[:, None]
    out_ptrs = out_ptr + (token * NUM_HEADS + head)[:, None] * HEAD_DIM
    factor = tl.where(is_value, value_factor, key_factor)[:, None]
    queries, stored = is_query[:, None], ~is_query[:, None] & (slot >= 0)
    tl.store(out_ptrs + pair[None, :], x1, mask=exists & queries)
    tl.store(out_ptrs + HALF + pair[None, :], x2, mask=exists & queries)
    x1, x2 = to_stored(x1, factor, stored_dtype), to_stored(x2, factor, stored_dtype)
    tl.store(cache_ptrs + pair[None, :], x1, mask=exists & stored)
    tl.store(cache_ptrs + HALF + pair[None, :], x2, mask=exists & stored)
    if TAIL_BLOCK > 0:
        rest = normalize(
            rest, inverse_rms, is_query, is_key, is_value, query_weight_ptr, key_weight_ptr,
            value_weight_ptr, tail, tail < HEAD_DIM, dtype,
        ).to(dtype)  # fmt: skip
        tl.store(out_ptrs + tail[None, :], rest, mask=tail_exists & queries)
        rest = to_stored(rest, factor, stored_dtype)
        tl.store(cache_ptrs + tail[None, :], rest, mask=tail_exists & stored)


@triton.jit
def rotary_kernel(
    x_ptr, cos_ptr, sin_ptr, out_ptr, token_stride, head_stride,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr,
    HALF_BLOCK: tl.constexpr, TAIL_BLOCK: tl.constexpr,
):  # fmt: skip
    """Rotate HEADS heads of one token."""
    dtype = out_ptr.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    pair = tl.arange(0, HALF_BLOCK)
    exists = (head < NUM_HEADS) & (pair < HALF)[None, :]
    x_ptrs = x_ptr + token * token_stride + head * head_stride
    x1 = tl.load(x_ptrs + pair[None, :], mask=exists, other=0.0).to(tl.float32)
    x2 = tl.load(x_ptrs + HALF + pair[None, :], mask=exists, other=0.0).to(tl.float32)
    x1, x2 = turn(x1, x2, cos_ptr + token * 2 * HALF, sin_ptr + token * 2 * HALF, pair, HALF)
    out_ptrs = out_ptr + (token * NUM_HEADS + head) * HEAD_DIM
    tl.store(out_ptrs + pair[None, :], x1.to(dtype), mask=exists)
    tl.store(out_ptrs + HALF + pair[None, :], x2.to(dtype), mask=exists)
    if TAIL_BLOCK > 0:
        tail = (2 * HALF + tl.arange(0, TAIL_BLOCK))[None, :]
        exists = (head < NUM_HEADS) & (tail < HEAD_DIM)
        tl.store(out_ptrs + tail, tl.load(x_ptrs + tail, mask=exists), mask=exists)


@triton.jit
def store_kv_kernel(
    key_ptr, value_ptr, slots_ptr, cache_ptr, key_token_stride, key_head_stride,
    value_token_stride, value_head_stride, block_stride, plane_stride, head_stride, token_stride,
    key_factor, value_factor,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """Store the keys or the values of one token."""
    token, plane = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head, dim = tl.arange(0, HEADS)[:, None], tl.arange(0, DIMS)[None, :]
    slot = tl.load(slots_ptr + token)
    stored = (head < NUM_KV_HEADS) & (dim < HEAD_DIM) & (slot >= 0)
    factor = key_factor
    if plane == 0:
        x = tl.load(key_ptr + token * key_token_stride + head * key_head_stride + dim, mask=stored)
    else:
        x = tl.load(
            value_ptr + token * value_token_stride + head * value_head_stride + dim, mask=stored
        )
        factor = value_factor
    place = slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * token_stride
    target = cache_ptr + place + plane * plane_stride + head * head_stride + dim
    tl.store(target, to_stored(x, factor, cache_ptr.dtype.element_ty), mask=stored)


# ------------------------------------------------------------------ cases to compile ahead of time


def _case(
    name: str,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    with_norm: bool,
    cache: str = "bf16",
    weight: str = "bf16",
    num_tokens: int = 1,
    is_dependent: bool = False,
) -> AotCase:
    weights = ("query_weight_ptr", "key_weight_ptr", "value_weight_ptr")
    constants: dict[str, int | float | bool | None] = {
        "NUM_HEADS": num_heads, "NUM_KV_HEADS": num_kv_heads, "HEAD_DIM": head_dim,
        "BLOCK_SIZE": 16, "HALF": rotary_dim // 2,
        "HEADS": heads_of_program(num_tokens, head_dim), **_blocks(head_dim, rotary_dim),
        "PDL": is_dependent, **dict.fromkeys(weights[2:] if with_norm else weights),
    }  # fmt: skip
    pointers = ("qkv_ptr", "cos_ptr", "sin_ptr", *weights, "out_ptr", "cache_ptr")
    strides = ("qkv_stride", "block_stride", "plane_stride", "head_stride", "token_stride")
    signature = {
        **dict.fromkeys(pointers, "*bf16"), **dict.fromkeys(weights, f"*{weight}"),
        "cache_ptr": f"*{cache}", "slots_ptr": "*i64",
        **dict.fromkeys(strides, "i32:16"),
        **dict.fromkeys(("eps", "key_factor", "value_factor"), "fp32"),
        **dict.fromkeys(constants, "constexpr"),
    }  # fmt: skip
    return AotCase(
        f"norm_rotary_store {name} bf16{fp8_suffix(cache)}"
        + " fp32 norms" * (weight == "fp32")
        + " many tokens" * (num_tokens >= MANY_TOKENS)
        + " dependent" * is_dependent,
        norm_rotary_store_kernel,
        signature,
        constants,
        num_warps=2,
        capabilities=(90,) if cache == FP8 or is_dependent else (80, 90),
    )


AOT_CASES = (
    _case("d128 with norms", 32, 8, 128, 128, True),
    _case("d128", 32, 8, 128, 128, False),
    _case("d96 of which 48", 32, 8, 96, 48, False),
    _case("d256 with norms", 16, 8, 256, 256, True),
    _case("d256 with norms", 16, 8, 256, 256, True, weight="fp32"),
    _case("d128 with norms", 32, 8, 128, 128, True, FP8),
    _case("d96 of which 48", 32, 8, 96, 48, False, FP8),
    _case("d128 with norms", 32, 8, 128, 128, True, num_tokens=MANY_TOKENS),
    _case("d96 of which 48", 32, 8, 96, 48, False, num_tokens=MANY_TOKENS),
    _case("d128 with norms", 32, 8, 128, 128, True, FP8, num_tokens=MANY_TOKENS),
    _case("d128 with norms", 16, 8, 128, 128, True, is_dependent=True),
)
