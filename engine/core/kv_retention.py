"""KV retention: which of a sequence's blocks an attention pattern still needs.

    full attention     [ b0 b1 b2 b3 b4 b5 ]      all of them, for ever
    sliding window     [ -- -- -- b3 b4 b5 ]      what slid out is free for others

One instance serves one group of layers (`engine/core/kv_cache_groups.py`), whose windows are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from baton.block_hash import BlockHash

NULL_BLOCK = 0  # where blocks can slide out: never written nor given out
Find = Callable[[BlockHash], int | None]


class KVRetention(Protocol):
    """What the manager asks of an attention pattern."""

    def longest_hit(self, hashes: Sequence[BlockHash], find: Find) -> list[int]:
        """Block ids of the longest prefix whose needed blocks are all cached.

        Where a block is not needed because it slid out, the null block stands for it.
        """

    def num_expired_blocks(self, num_computed_tokens: int) -> int:
        """Leading blocks that no token computed from now on looks at."""


class FullAttention:
    """Every token looks at all before it."""

    def longest_hit(self, hashes: Sequence[BlockHash], find: Find) -> list[int]:
        block_ids: list[int] = []
        for block_hash in hashes:
            block_id = find(block_hash)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def num_expired_blocks(self, num_computed_tokens: int) -> int:
        return 0


class SlidingWindow:
    """Every token looks at itself and the ``window - 1`` before it.

    Args:
        window: tokens.
        block_size: tokens per block.
        null_block: stands where a block slid out; it is never written nor given out.
    """

    def __init__(self, window: int, block_size: int, null_block: int) -> None:
        self._window = window
        self._block_size = block_size
        self._null_block = null_block

    def longest_hit(self, hashes: Sequence[BlockHash], find: Find) -> list[int]:
        """From the right: a prefix counts when the blocks in its window are there."""
        end = len(hashes)
        if self.num_expired_blocks(end * self._block_size) >= end:  # it looks at itself only
            return [self._null_block] * end
        run: list[int] = []  # cached blocks up to `end`, the last one first
        for index in range(len(hashes) - 1, -1, -1):
            block_id = find(hashes[index])
            if block_id is None:
                run, end = [], index
                continue
            run.append(block_id)
            if index <= self.num_expired_blocks(end * self._block_size):
                return [self._null_block] * index + run[::-1]
        return []

    def num_expired_blocks(self, num_computed_tokens: int) -> int:
        # The next token, at position num_computed_tokens, looks back to this position.
        oldest = num_computed_tokens - self._window + 1
        return max(oldest, 0) // self._block_size
