"""KVCacheCoordinator: several KV cache groups behind one interface, over one BlockPool.

A sequence's blocks lie in one flat list with a stride; logical block j of group g has this place:

    block_ids   [ j=0: g0 g1 g2 | j=1: g0 g1 g2 | ... ]        j * num_groups + g

Each group keeps and finds blocks by its own attention pattern (`kv_retention.py`). Cached
content has a name per group, so that no group finds another's. Refuses to know: requests, tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.block_hash import BlockHash
from engine.core.block_pool import BlockPool
from engine.core.kv_retention import NULL_BLOCK, Find, FullAttention, KVRetention, SlidingWindow


class KVCacheCoordinator:
    """The groups of one KV cache.

    Args:
        sliding_windows: of each group; None: full attention.
        block_size: tokens per block.
        block_pool: serves all groups. One of its blocks is taken for good if a group has a window.

    Attributes:
        null_block: stands in a block table where a block slid out; None if that never happens.
    """

    def __init__(
        self, sliding_windows: Sequence[int | None], block_size: int, block_pool: BlockPool
    ) -> None:
        self.num_groups = len(sliding_windows)
        self.null_block: int | None = None
        self._pool = block_pool
        if any(window is not None for window in sliding_windows):
            # What slid out is pointed at one block that nobody writes.
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
        self._finds = {
            reads: [self._find_in(group, reads=reads) for group in range(self.num_groups)]
            for reads in (False, True)
        }

    # ------------------------------------------------------------------ prefix cache

    def longest_hit(self, hashes: Sequence[BlockHash], *, reads: bool = False) -> list[int]:
        """Block ids of all groups for the longest prefix of which each has what it needs.

        A group answers with a prefix that may be shorter, which the others are then asked for,
        until none shortens it: no group's longest hit is shorter than the common one, so nothing
        is lost on the way.

        Args:
            hashes: of the logical blocks that may be used.
            reads: whether who guesses must have read them, too.
        """
        finds = self._finds[reads]
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

    def cache(
        self,
        block_ids: Sequence[int],
        hashes: Sequence[BlockHash],
        first: int,
        end: int,
        *,
        is_read: bool = True,
    ) -> None:
        """Cache full, committed blocks in each group, but for those that slid out.

        Only group 0's hashes go into the pool's events: a router looks for whole prefixes.

        Args:
            block_ids: of the sequence, all groups.
            hashes: of its logical blocks.
            first: logical block to begin with.
            end: logical block to end before.
            is_read: whether who guesses has read them.
        """
        stride = self.num_groups
        for group in range(stride):
            start = first
            own = block_ids[group + first * stride : end * stride : stride]
            if self.null_block is not None:
                num_null = own.count(self.null_block)  # they come before all others
                start, own = first + num_null, own[num_null:]
            own_hashes = hashes[start:end]
            if group:
                suffix = _suffix(group)
                own_hashes = [block_hash + suffix for block_hash in own_hashes]
            parent = hashes[start - 1] if start else None
            self._pool.cache(own, own_hashes, parent, silent=group > 0, is_read=is_read)

    # ------------------------------------------------------------------ blocks

    def free_slid_out(self, block_ids: list[int], num_computed_tokens: int) -> None:
        """Drop, in place, the blocks that no layer looks at any more."""
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

    def kept_indices(self, num_tokens: int, num_blocks: int) -> list[int]:
        """Places in the flat list of blocks that are still needed after ``num_tokens`` tokens.

        Args:
            num_blocks: logical blocks that hold these tokens.
        """
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

    def _find_in(self, group: int, *, reads: bool) -> Find:
        suffix, find = _suffix(group), self._pool.find_read if reads else self._pool.find
        if group == 0:
            return find
        return lambda block_hash: find(block_hash + suffix)


def _suffix(group: int) -> bytes:
    """What a group's names have behind the hash; a hash has a fixed length, so they never meet."""
    return bytes((group,)) if group else b""
