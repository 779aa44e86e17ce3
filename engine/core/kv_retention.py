"""KV retention: which of a sequence's blocks an attention pattern still needs.

    full attention     [ b0 b1 b2 b3 b4 b5 ]      all of them, for ever
    sliding window     [ -- -- -- b3 b4 b5 ]      blocks that slid out are freed

Each group of layers with equal windows has one `KVRetention` (`engine/core/kv_cache_groups.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from baton.kv.block_hash import BlockHash

NULL_BLOCK = 0  # replaces blocks that slid out of the window; never written nor allocated
Find = Callable[[BlockHash], int | None]


class KVRetention(Protocol):
    """Decides which blocks of a sequence an attention pattern keeps."""

    def longest_hit(self, hashes: Sequence[BlockHash], find: Find) -> list[int]:
        """Return the block ids of the longest prefix whose needed blocks are all cached.

        The null block replaces each block that slid out.
        """

    def num_expired_blocks(self, num_computed_tokens: int) -> int:
        """Return the number of leading blocks that no later token attends to."""


class FullAttention:
    """Full attention: every token attends to all tokens before it."""

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
    """Sliding-window attention: a token attends to itself and the ``window - 1`` tokens before it.

    Args:
        window: size of the window, in tokens.
        block_size: tokens per block.
        null_block: replaces blocks that slid out; never written nor allocated.
    """

    def __init__(self, window: int, block_size: int, null_block: int) -> None:
        self._window = window
        self._block_size = block_size
        self._null_block = null_block

    def longest_hit(self, hashes: Sequence[BlockHash], find: Find) -> list[int]:
        """Search from the end: a prefix is a hit if the blocks in its last window are cached."""
        end = len(hashes)
        # With a window of 1 token, the next token attends to no earlier block.
        if self.num_expired_blocks(end * self._block_size) >= end:
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
        # The next token, at position num_computed_tokens, attends to no position before this one.
        oldest = num_computed_tokens - self._window + 1
        return max(oldest, 0) // self._block_size


def make_retentions(windows: Sequence[int | None], block_size: int) -> list[KVRetention]:
    """Return the retention of each KV cache group, from its window in tokens (None: no window)."""
    return [
        FullAttention() if window is None else SlidingWindow(window, block_size, NULL_BLOCK)
        for window in windows
    ]


def longest_common_hit(
    retentions: Sequence[KVRetention], hashes: Sequence[BlockHash], finds: Sequence[Find]
) -> list[list[int]]:
    """Return the blocks, by group, of the longest prefix that is cached in all groups.

    Shorten the prefix to one group's longest hit after another, until no group shortens it further.
    """
    hits: list[list[int]] = [[] for _ in retentions]
    num_blocks, num_agreed, group = len(hashes), 0, 0
    while num_agreed < len(retentions):
        hit = retentions[group].longest_hit(hashes[:num_blocks], finds[group])
        if len(hit) < num_blocks:
            num_blocks, num_agreed = len(hit), 0
        hits[group] = hit
        num_agreed += 1
        group = (group + 1) % len(retentions)
    return hits
