"""BlockPool: which KV blocks are free and how many holders the others have. Knows no request.

A block is free or referenced, never both. Free blocks form a doubly linked list between two
sentinels, so that any of them can be taken out in O(1):

    head <-> oldest <-> ... <-> newest <-> tail        allocate at the head, free at the tail
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class KVCacheBlock:
    """One block. ``previous`` and ``next`` are set exactly while it is free."""

    block_id: int
    ref_count: int = 0
    previous: KVCacheBlock | None = None
    next: KVCacheBlock | None = None


class BlockPool:
    """All blocks of one KV cache.

    Args:
        num_blocks: ids are ``0 .. num_blocks - 1``.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = 0
        self._blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
        self._head = KVCacheBlock(-1)
        self._tail = KVCacheBlock(-1)
        self._head.next = self._tail
        self._tail.previous = self._head
        for block in self._blocks:
            self._append_free(block)

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Give ``num_blocks`` block ids with one reference each, or None if too few are free."""
        if num_blocks > self.num_free:
            return None
        block_ids = []
        for _ in range(num_blocks):
            block = self._head.next
            assert block is not None
            assert block is not self._tail
            self._remove_free(block)
            block.ref_count = 1
            block_ids.append(block.block_id)
        return block_ids

    def hold(self, block_ids: Iterable[int]) -> None:
        """Take one more reference on each block; a block must have a holder already."""
        for block_id in block_ids:
            block = self._blocks[block_id]
            assert block.ref_count > 0, f"block {block_id} is free"
            block.ref_count += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Drop one reference on each block; the last one frees it.

        Blocks are freed in the order given, and the first freed is the first to be given out
        again: callers give a request's tail first.
        """
        for block_id in block_ids:
            block = self._blocks[block_id]
            assert block.ref_count > 0, f"block {block_id} is free already"
            block.ref_count -= 1
            if block.ref_count == 0:
                self._append_free(block)

    def check(self) -> None:
        """Assert the invariants; O(num_blocks), for tests and debug runs."""
        free_ids = set()
        block = self._head.next
        while block is not None and block is not self._tail:
            assert block.ref_count == 0
            assert block.next is not None
            assert block.next.previous is block
            free_ids.add(block.block_id)
            block = block.next
        assert len(free_ids) == self.num_free
        for block in self._blocks:
            assert (block.ref_count == 0) == (block.block_id in free_ids)

    def num_references(self) -> int:
        """Sum of all reference counts; what all holders together must account for."""
        return sum(block.ref_count for block in self._blocks)

    def _append_free(self, block: KVCacheBlock) -> None:
        last = self._tail.previous
        assert last is not None
        last.next = block
        block.previous = last
        block.next = self._tail
        self._tail.previous = block
        self.num_free += 1

    def _remove_free(self, block: KVCacheBlock) -> None:
        assert block.previous is not None
        assert block.next is not None
        block.previous.next = block.next
        block.next.previous = block.previous
        block.previous = block.next = None
        self.num_free -= 1
