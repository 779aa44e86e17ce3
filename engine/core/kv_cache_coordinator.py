"""KVCacheCoordinator: several KV cache groups behind one interface, over one BlockPool.

A request's block ids are one flat list, interleaved by group. Block j of group g has index:

    block_ids   [ j=0: g0 g1 g2 | j=1: g0 g1 g2 | ... ]        j * num_groups + g

The attention pattern of a group decides which blocks the group keeps and finds (`kv_retention.py`).
Each group has hashes of its own, so that no group finds another group's content. Refuses to know:
requests, tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.kv.block_hash import BlockHash
from engine.core.block_pool import BlockPool
from engine.core.kv_retention import NULL_BLOCK, Find, FullAttention, KVRetention, SlidingWindow


class KVCacheCoordinator:
    """The blocks of all groups of one KV cache.

    Args:
        sliding_windows: window of each group, in tokens; None: full attention.
        block_size: tokens per block.
        block_pool: the pool of all groups. If any group has a window, one of its blocks becomes the
            null block forever.

    Attributes:
        null_block: replaces, in block tables, blocks that slid out of the window; None: no group
            has a window.
    """

    def __init__(
        self, sliding_windows: Sequence[int | None], block_size: int, block_pool: BlockPool
    ) -> None:
        self.num_groups, self._block_size = len(sliding_windows), block_size
        self.null_block: int | None = None
        self._pool = block_pool
        if any(window is not None for window in sliding_windows):
            # Reserve one block that is never written; in block tables, it replaces all blocks that
            # slid out of the window.
            self.null_block = NULL_BLOCK
            taken = block_pool.allocate(1)
            assert taken == [NULL_BLOCK]
        self._retentions: list[KVRetention] = []
        for window in sliding_windows:
            if window is None:
                self._retentions.append(FullAttention())
            else:
                assert self.null_block is not None
                self._retentions.append(SlidingWindow(window, block_size, self.null_block))
        self._finds = [self._find_in(group, 0) for group in range(self.num_groups)]

    # ------------------------------------------------------------------ prefix cache

    def longest_hit(self, hashes: Sequence[BlockHash], cache_class: int = 0) -> list[int]:
        """Return block ids, interleaved over groups, of the longest prefix cached in all groups.

        Each group in turn shortens the prefix to its own longest hit, until no group shortens the
        prefix further.

        Args:
            hashes: hashes of the leading logical blocks of a request.
            cache_class: highest class of blocks that may be used; see `block_pool.py`.
        """
        finds = self._finds
        if cache_class:
            finds = [self._find_in(group, cache_class) for group in range(self.num_groups)]
        hits: list[list[int]] = [[] for _ in self._retentions]
        num_blocks, num_agreed, group = len(hashes), 0, 0
        while num_agreed < self.num_groups:
            hit = self._retentions[group].longest_hit(hashes[:num_blocks], finds[group])
            if len(hit) < num_blocks:
                num_blocks, num_agreed = len(hit), 0
            hits[group] = hit
            num_agreed += 1
            group = (group + 1) % self.num_groups
        if self.num_groups == 1:
            return hits[0]
        return [block_id for logical in zip(*hits, strict=True) for block_id in logical]

    def names_needed(self, hashes: Sequence[BlockHash]) -> tuple[BlockHash, ...]:
        """Return the names, in the pool, of the cached blocks that a hit of a whole prefix needs.

        Args:
            hashes: hashes of the prefix's logical blocks.
        """
        stride = self.num_groups
        places = self.kept_places(len(hashes) * self._block_size, len(hashes))
        return tuple(hashes[place // stride] + _suffix(place % stride) for place in places)

    def num_needed(self, num_blocks: int) -> int:
        """Return how many cached blocks a hit of ``num_blocks`` logical blocks needs."""
        num_tokens = num_blocks * self._block_size
        expired = [retention.num_expired_blocks(num_tokens) for retention in self._retentions]
        return sum(max(num_blocks - num_expired, 0) for num_expired in expired)

    def cache(
        self,
        block_ids: Sequence[int],
        hashes: Sequence[BlockHash],
        first: int,
        end: int,
        *,
        cache_class: int = 0,
    ) -> None:
        """Cache full, committed blocks in each group, except blocks that slid out of the window.

        The pool records events only for group 0, because routers compare whole prefixes of prompts.

        Args:
            block_ids: one request's blocks, interleaved over groups.
            hashes: hashes of the request's logical blocks.
            first: index of the first logical block to cache.
            end: index of the logical block to stop before.
            cache_class: class of the newly cached blocks; see `block_pool.py`.
        """
        stride = self.num_groups
        for group in range(stride):
            start = first
            own = block_ids[group + first * stride : end * stride : stride]
            if self.null_block is not None:
                num_null = own.count(self.null_block)  # null blocks come before the others
                start, own = first + num_null, own[num_null:]
            own_hashes = hashes[start:end]
            if group:
                suffix = _suffix(group)
                own_hashes = [block_hash + suffix for block_hash in own_hashes]
            parent = hashes[start - 1] if start else None
            self._pool.cache(own, own_hashes, parent, silent=group > 0, cache_class=cache_class)

    # ------------------------------------------------------------------ blocks

    def free_slid_out(self, block_ids: list[int], num_computed_tokens: int) -> None:
        """Free the blocks that no later token attends to, and put the null block in their place."""
        null_block, stride = self.null_block, self.num_groups
        if null_block is None:
            return
        for group, retention in enumerate(self._retentions):
            num_expired = retention.num_expired_blocks(num_computed_tokens)
            index = (num_expired - 1) * stride + group
            while index >= 0 and block_ids[index] != null_block:
                self._pool.release((block_ids[index],))
                block_ids[index] = null_block
                index -= stride

    def kept_places(self, num_tokens: int, num_blocks: int) -> list[int]:
        """Return the places in the flat list of the blocks needed after ``num_tokens`` tokens."""
        stride = self.num_groups
        if self.null_block is None:
            return list(range(num_blocks * stride))
        expired = [retention.num_expired_blocks(num_tokens) for retention in self._retentions]
        return [
            index * stride + group
            for index in range(min(expired), num_blocks)
            for group in range(stride)
            if index >= expired[group]
        ]

    # ------------------------------------------------------------------ inside

    def _find_in(self, group: int, cache_class: int) -> Find:
        suffix, find = _suffix(group), self._pool.find
        if not group and not cache_class:
            return find
        return lambda block_hash: find(block_hash + suffix, cache_class)


def _suffix(group: int) -> bytes:
    """Return a suffix for a group's block hashes, so that hashes of two groups always differ."""
    return bytes((group,)) if group else b""
