"""Whole KV blocks moved on the device: within a cache, out of it and back into it.

A block is one contiguous range of memory with all its layers, whatever the dtype: it is moved as
32-bit words, four of them (16 bytes) per thread and access. Refuses to know: what is in a block,
who owns it, and copies over a link.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.triton.aot import AotCase

BLOCK = 2048  # words of a program


def copy_blocks(kv_cache: Tensor, source_ids: Tensor, target_ids: Tensor) -> None:
    """``kv_cache[target_ids] = kv_cache[source_ids]``, in place.

    Args:
        kv_cache: ``[num_blocks, ...]``, contiguous within a block.
        source_ids: ``[n]`` int64; a pair with a negative id is not copied.
        target_ids: ``[n]`` int64, without repetition, and none of them a source.
    """
    _move(_words(kv_cache), _words(kv_cache), source_ids, target_ids)


def gather_blocks(kv_cache: Tensor, block_ids: Tensor, out: Tensor) -> None:
    """``out[i] = kv_cache[block_ids[i]]``.

    Args:
        kv_cache: ``[num_blocks, ...]``, contiguous within a block.
        block_ids: ``[n]`` int64; where an id is negative ``out`` stays as it is.
        out: ``[n, ...]``, shape and dtype of a block as in ``kv_cache``.
    """
    _move(_words(kv_cache), _words(out), block_ids, None)


def scatter_blocks(buffer: Tensor, kv_cache: Tensor, block_ids: Tensor) -> None:
    """``kv_cache[block_ids[i]] = buffer[i]``, in place: the way back of `gather_blocks`.

    Args:
        buffer: ``[n, ...]``, shape and dtype of a block as in ``kv_cache``.
        kv_cache: ``[num_blocks, ...]``, contiguous within a block.
        block_ids: ``[n]`` int64 without repetition; a negative id is not written.
    """
    _move(_words(buffer), _words(kv_cache), None, block_ids)


def _words(blocks: Tensor) -> Tensor:
    """Return the same memory as ``[num_blocks, words]`` int32."""
    return blocks.view(len(blocks), math.prod(blocks.shape[1:])).view(torch.int32)


def _move(
    source: Tensor, target: Tensor, source_ids: Tensor | None, target_ids: Tensor | None
) -> None:
    num_words = source.shape[1]
    assert num_words == target.shape[1], "blocks of one size"
    ids = source_ids if target_ids is None else target_ids
    assert ids is not None
    if len(ids):
        move_kernel[(triton.cdiv(num_words, BLOCK), len(ids))](
            source, target, source_ids, target_ids, source.stride(0), target.stride(0), num_words,
            BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip


@triton.jit
def move_kernel(
    source_ptr, target_ptr, source_ids_ptr, target_ids_ptr, source_stride, target_stride,
    num_words, BLOCK: tl.constexpr,
):  # fmt: skip
    """Some words of one block; where there are no ids, blocks are in order."""
    index = tl.program_id(1).to(tl.int64)
    source, target = index, index
    if source_ids_ptr is not None:
        source = tl.load(source_ids_ptr + index)
    if target_ids_ptr is not None:
        target = tl.load(target_ids_ptr + index)
    word = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    moved = (word < num_words) & (source >= 0) & (target >= 0)
    words = tl.load(source_ptr + source * source_stride + word, mask=moved)
    tl.store(target_ptr + target * target_stride + word, words, mask=moved)


def _case(name: str, source_ids: str, target_ids: str) -> AotCase:
    signature = {
        "source_ptr": "*i32", "target_ptr": "*i32", "source_ids_ptr": source_ids,
        "target_ids_ptr": target_ids, "source_stride": "i32:16", "target_stride": "i32:16",
        "num_words": "i32:16", "BLOCK": "constexpr",
    }  # fmt: skip
    ids = {name: None for name in ("source_ids_ptr", "target_ids_ptr") if signature[name][0] != "*"}
    return AotCase(name, move_kernel, signature, {"BLOCK": BLOCK, **ids})


AOT_CASES = (
    _case("copy_blocks", "*i64", "*i64"),
    _case("gather_blocks", "*i64", "constexpr"),
    _case("scatter_blocks", "constexpr", "*i64"),
)
