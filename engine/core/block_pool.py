"""BlockPool: tracks free KV blocks, reference counts, and the prefix cache's contents.

A block is free or referenced, never both. Free blocks form a doubly linked list between
sentinels, so that any free block can be unlinked in O(1):

    head <-> newest blank <-> ... <-> oldest cached <-> ... <-> fence <-> pinned <-> ... <-> tail

Blocks are allocated from the head on. Blank blocks have no cached content. The newest blank block
goes first, because the CPU's caches most likely still hold its memory. Never-used blocks join the
list only when too few are blank, because new memory must be cleared first. Pinned blocks, which
`keeps` chose as they became free, go last.

Until it is allocated again, a free block keeps its content, which requests can reuse (`touch`).

For a hand-off, blocks are taken in extents: runs of blocks that are adjacent in memory, so that a
transfer copies few, long ranges.

    first free blocks    40 41 7 90 8 9 42 ...      wanted: 5
    runs among them      [7 8 9] [40 41 42] [90]    given:  7 8 9, 40 41

Cached blocks have a class, a number whose meaning only callers know: a look-up of class c finds
blocks of classes 0 to c. Refuses to know: requests, tensors.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from baton.kv.block_hash import BlockHash
from baton.kv.residency import BlockResidency

# Extents are chosen among this many times the wanted number of blocks, the first in the free list.
WINDOW_FACTOR = 8
MAX_EXTRA = 2048  # maximum number of candidates beyond the wanted blocks
# Never-used blocks become extents if the blank ones form more than `FEW_EXTENTS` runs with fewer
# than `SHORT_EXTENT` blocks on average: clearing memory then costs less than many short copies.
FEW_EXTENTS, SHORT_EXTENT = 2, 8
_NO_REFERENCES: Mapping[int, int] = {}


class BlocksStored(msgspec.Struct, frozen=True, gc=False):
    """Event: the prefix cache holds these contents; ``parent``: hash of the block before."""

    hashes: tuple[BlockHash, ...]
    parent: BlockHash | None


class BlocksRemoved(msgspec.Struct, frozen=True, gc=False):
    """Event: the prefix cache no longer holds these contents."""

    hashes: tuple[BlockHash, ...]


class BlocksCleared(msgspec.Struct, frozen=True, gc=False):
    """Event: the prefix cache is empty now."""


KVCacheEvent = BlocksStored | BlocksRemoved | BlocksCleared


@dataclass(slots=True, eq=False)
class KVCacheBlock:
    """A block of the pool: its reference count and its cached content.

    Attributes:
        ref_count: number of holders; 0 exactly while the block is in the free list.
        block_hash: hash of its content, once the block is full and committed; None: blank.
        silent: whether events leave out this block's content.
        cache_class: cache class of its content (see top of file).
        cached_at, freed_at: when its content was cached, and last released, by the pool's clock.
        previous, next: neighbours in the free list; meaningless while the block is in use.
    """

    block_id: int
    ref_count: int = 0
    block_hash: BlockHash | None = None
    silent: bool = False
    cache_class: int = 0
    cached_at: float = 0.0
    freed_at: float = 0.0
    previous: KVCacheBlock = field(init=False, repr=False)
    next: KVCacheBlock = field(init=False, repr=False)


class BlockPool:
    """All blocks of one KV cache, and the prefix cache over them.

    Args:
        num_blocks: number of blocks; their ids are ``0 .. num_blocks - 1``.
        record_events: whether to record stored and removed contents for `take_events`.
        clock: returns seconds.

    Attributes:
        num_evicted: cached blocks evicted from the prefix cache since the start.
        least_free: fewest free blocks since the start.
        keeps: returns whether to allocate a cached block after all other blocks; None: never.
        residency: how long blocks kept their cached contents.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        record_events: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_blocks = num_blocks
        self.num_free = self.least_free = num_blocks
        self.num_evicted = 0
        self.keeps: Callable[[KVCacheBlock], bool] | None = None
        self.residency = BlockResidency()
        self._clock = clock
        self._blocks: list[KVCacheBlock] = []  # blocks by id; all other blocks were never allocated
        self._num_blank = 0  # number of blank blocks, at the front of the free list
        self._head, self._fence, self._tail = (KVCacheBlock(-1) for _ in range(3))
        self._head.next, self._tail.previous = self._fence, self._fence
        self._fence.previous, self._fence.next = self._head, self._tail
        # For each hash: one block, or a dict by block id if several blocks hold the content.
        self._cached: dict[BlockHash, KVCacheBlock | dict[int, KVCacheBlock]] = {}
        self._events: list[KVCacheEvent] | None = [] if record_events else None

    @property
    def num_made(self) -> int:
        """Return the number of blocks that were ever allocated; they have the lowest ids."""
        return len(self._blocks)

    # ------------------------------------------------------------------ references

    def allocate(self, num_blocks: int, *, extents: bool = False) -> list[int] | None:
        """Return ``num_blocks`` block ids with one reference each, or None if too few are free.

        Blank blocks are allocated first, then the cached blocks that were freed longest ago, which
        are evicted from the prefix cache.

        Args:
            extents: prefer runs of consecutive ids among the first free blocks; prefer never-used
                blocks, which are consecutive, to scattered blank blocks.
        """
        if num_blocks > self.num_free:
            return None
        block_ids = self._take_extents(num_blocks) if extents and num_blocks > 1 else None
        if block_ids is None:
            self._make_new(num_blocks if extents else num_blocks - self._num_blank)
            block_ids = self._take_first(num_blocks)
        self.num_free -= num_blocks
        self.least_free = min(self.least_free, self.num_free)
        return block_ids

    def hold(self, block_ids: Iterable[int]) -> None:
        """Take one more reference on each block; every block must already have a reference."""
        for block in map(self._blocks.__getitem__, block_ids):
            assert block.ref_count > 0, f"block {block.block_id} is free"
            block.ref_count += 1

    def touch(self, block_ids: Iterable[int], *, is_use: bool = True) -> None:
        """Take one more reference on each cached block, and unlink free ones from the free list.

        Without ``is_use``, neither `residency` nor `least_free` changes.
        """
        now, blocks, note_gap = self._clock(), self._blocks, self.residency.reuse_gap.note
        for block_id in block_ids:
            block = blocks[block_id]
            assert block.block_hash is not None, f"block {block_id} caches nothing"
            if block.ref_count == 0:
                block.previous.next, block.next.previous = block.next, block.previous
                self.num_free -= 1
                if is_use:
                    note_gap(now - block.freed_at)
            block.ref_count += 1
        self.least_free = min(self.least_free, self.num_free if is_use else self.num_blocks)

    def release(self, block_ids: Iterable[int], *, is_use: bool = True) -> None:
        """Drop one reference on each block; a block without references becomes free.

        Without ``is_use``, `residency` does not count this release as a use of the block.

        Callers pass a request's last blocks first: cached blocks are allocated again in the order
        of their release, blank ones in reverse order.
        """
        now, blocks, keeps, fence = self._clock(), self._blocks, self.keeps, self._fence
        for block_id in block_ids:
            block = blocks[block_id]
            assert block.ref_count > 0, f"block {block_id} is free already"
            block.ref_count -= 1
            if block.ref_count:
                continue
            if is_use:
                block.freed_at = now
            if block.block_hash is None:
                previous = self._head
                self._num_blank += 1
            else:
                previous = (self._tail if keeps is not None and keeps(block) else fence).previous
            block.previous, block.next = previous, previous.next
            previous.next = block.next.previous = block
            self.num_free += 1

    def num_free_among(self, ids: Iterable[int], held: Mapping[int, int] = _NO_REFERENCES) -> int:
        """Return how many of these blocks have no references but those that ``held`` counts."""
        return sum(self._blocks[one].ref_count == held.get(one, 0) for one in ids)

    # ------------------------------------------------------------------ prefix cache

    def find(self, block_hash: BlockHash, cache_class: int = 0) -> int | None:
        """Return a block, free or not, with this content and at most this class, or None."""
        found = self._cached.get(block_hash)
        if found is None:
            return None
        if isinstance(found, KVCacheBlock):
            return found.block_id if found.cache_class <= cache_class else None
        return next((b.block_id for b in found.values() if b.cache_class <= cache_class), None)

    def cached_at(self, block_id: int, block_hash: BlockHash) -> float | None:
        """Return when a block's content was cached; None: the block has other content."""
        block = self._blocks[block_id]
        return block.cached_at if block.block_hash == block_hash else None

    def cache(
        self,
        block_ids: Iterable[int],
        hashes: Iterable[BlockHash],
        parent: BlockHash | None,
        *,
        silent: bool = False,
        cache_class: int = 0,
    ) -> None:
        """Enter full, committed blocks into the prefix cache; they are never written again.

        Args:
            parent: hash of the block before these; None: the first block begins a sequence.
            silent: record no event when these contents are stored or removed.
            cache_class: cache class of contents not cached before; see top of file.
        """
        now = self._clock()
        if silent or self._events is None:
            for block_id, block_hash in zip(block_ids, hashes, strict=True):
                self._index(block_id, block_hash, cache_class, now)
                self._blocks[block_id].silent = silent
            return
        stored: list[BlockHash] = []
        for block_id, block_hash in zip(block_ids, hashes, strict=True):
            if self._index(block_id, block_hash, cache_class, now):
                stored.append(block_hash)
            else:  # already cached: the blocks stored next have this one as parent
                self._note_stored(stored, parent)
                stored, parent = [], block_hash
        self._note_stored(stored, parent)

    def reset_prefix_cache(self) -> None:
        """Drop all contents from the prefix cache; blocks in use stay in use."""
        for block in self._blocks:
            block.block_hash, block.silent = None, False
        while self._fence.next is not self._tail:
            self._unpin_first()
        self._num_blank = sum(block.ref_count == 0 for block in self._blocks)
        self._cached.clear()
        if self._events is not None:
            self._events.append(BlocksCleared())

    @property
    def num_cached(self) -> int:
        """Return the number of different contents in the prefix cache."""
        return len(self._cached)

    def start_events(self) -> list[BlockHash]:
        """Record events from now on; drop events that `take_events` has not returned.

        Returns:
            The contents that are cached now and that events report. The first blocks of a prefix
            come before its last ones, unless the first ones were cached again later.
        """
        self._events = []
        return [
            block_hash
            for block_hash, known in self._cached.items()
            if not (known if isinstance(known, KVCacheBlock) else next(iter(known.values()))).silent
        ]

    def take_events(self) -> list[KVCacheEvent]:
        """Return all events since the last call, in order."""
        if not self._events:
            return []
        events, self._events = self._events, []
        return events

    # ------------------------------------------------------------------ checks

    def check(self) -> None:
        """Assert the invariants; O(num_blocks), for tests and debug runs."""
        free_ids = {block.block_id for block in self._free_blocks()}
        are_blank = [block.block_hash is None for block in self._free_blocks()]
        assert are_blank == [place < self._num_blank for place in range(len(are_blank))]
        assert len(free_ids) + self.num_blocks - len(self._blocks) == self.num_free
        num_hashed = 0
        for block in self._blocks:
            assert (block.ref_count == 0) == (block.block_id in free_ids)
            if block.block_hash is not None:
                num_hashed += 1
                known = self._cached[block.block_hash]
                assert known is block or (isinstance(known, dict) and block.block_id in known)
        sizes = [1 if isinstance(k, KVCacheBlock) else len(k) for k in self._cached.values()]
        assert (sum(sizes), all(sizes)) == (num_hashed, True)

    def ref_counts(self) -> dict[int, int]:
        """Return the reference count of each block in use, by block id, to check invariants."""
        return {block.block_id: block.ref_count for block in self._blocks if block.ref_count}

    def _free_blocks(self) -> Iterator[KVCacheBlock]:
        block = self._head.next
        while block is not self._tail:
            assert block.next.previous is block
            if block is not self._fence:
                assert block.ref_count == 0
                yield block
            block = block.next

    # ------------------------------------------------------------------ inside

    def _make_new(self, num_wanted: int) -> None:
        """Put up to ``num_wanted`` never-used blocks at the front of the free list."""
        first = len(self._blocks)
        num_new = min(num_wanted, self.num_blocks - first)
        if num_new > 0:
            self._num_blank += num_new
            new = [KVCacheBlock(first + index) for index in range(num_new)]
            self._blocks += new
            for previous, block in itertools.pairwise([self._head, *new, self._head.next]):
                previous.next, block.previous = block, previous

    def _take_first(self, num_blocks: int) -> list[int]:
        """Unlink the first ``num_blocks`` blocks of the free list, and return their ids."""
        block_ids = []
        block, fence, now = self._head, self._fence, self._clock()
        for _ in range(num_blocks):
            if block.next is fence:
                self._unpin_first()
            block = block.next
            self._assign(block, now)
            block_ids.append(block.block_id)
        self._head.next, block.next.previous = block.next, self._head
        return block_ids

    def _take_extents(self, num_blocks: int) -> list[int] | None:
        """Unlink runs of blocks with consecutive ids, preferably from the free list's first half.

        While there are never-used blocks, only blank blocks are considered. Returns None if
        never-used blocks are better, because blank ones are too few or too scattered.
        """
        # Look into the second half of the free list only if the first half has too few blocks.
        wide = min(num_blocks * WINDOW_FACTOR, num_blocks + MAX_EXTRA)
        window = max(num_blocks, min(wide, self.num_free // 2))
        have_all = len(self._blocks) == self.num_blocks
        if not have_all:
            window = min(window, self._num_blank)
            if window < num_blocks:
                return None
        candidates, block = list[int](), self._head
        for _ in range(window):
            if block.next is self._fence:
                if len(candidates) >= num_blocks:
                    break
                self._unpin_first()
            block = block.next
            candidates.append(block.block_id)
        block_ids = choose_extents(candidates, num_blocks)
        num_extents = 1 + int(np.count_nonzero(np.diff(block_ids) != 1))
        if not have_all and (num_extents - FEW_EXTENTS) * SHORT_EXTENT > num_blocks:
            return None
        now = self._clock()
        for block_id in block_ids:
            block = self._blocks[block_id]
            block.previous.next, block.next.previous = block.next, block.previous
            self._assign(block, now)
        return block_ids

    def _unpin_first(self) -> None:
        """Move the fence behind the pinned block that was released first, to allocate it next."""
        fence, block = self._fence, self._fence.next
        fence.previous.next, block.previous = block, fence.previous
        block.next.previous, fence.next = fence, block.next
        block.next, fence.previous = fence, block

    def _assign(self, block: KVCacheBlock, now: float) -> None:
        """Give a free block its first reference; evict its content, if it has any."""
        if block.block_hash is None:
            self._num_blank -= 1
        else:
            self._forget(block)
            self.num_evicted += 1
            self.residency.note_eviction(block.cached_at, block.freed_at, now)
        block.ref_count = 1

    def _index(self, block_id: int, block_hash: BlockHash, cache_class: int, now: float) -> bool:
        """Index a block by its content's hash; return whether the content was not cached before."""
        block = self._blocks[block_id]
        assert block.ref_count > 0, f"block {block_id} is free"
        if block.block_hash is not None:
            assert block.block_hash == block_hash
            return False
        block.block_hash, block.cache_class, block.cached_at = block_hash, cache_class, now
        known = self._cached.get(block_hash)
        if known is None:
            self._cached[block_hash] = block
        elif isinstance(known, KVCacheBlock):
            self._cached[block_hash] = {known.block_id: known, block_id: block}
        else:
            known[block_id] = block
        return known is None

    def _note_stored(self, hashes: list[BlockHash], parent: BlockHash | None) -> None:
        if hashes and self._events is not None:
            self._events.append(BlocksStored(tuple(hashes), parent))

    def _forget(self, block: KVCacheBlock) -> None:
        """Remove a block's content from the index, because the block is about to be overwritten."""
        block_hash, silent = block.block_hash, block.silent
        assert block_hash is not None
        block.block_hash, block.silent = None, False
        known = self._cached[block_hash]
        if isinstance(known, dict):
            del known[block.block_id]
            if known:  # another block still holds the content
                return
        del self._cached[block_hash]
        if self._events is not None and not silent:
            self._events.append(BlocksRemoved((block_hash,)))


def choose_extents(candidates: Sequence[int], num_blocks: int) -> list[int]:
    """Choose ``num_blocks`` of the candidates, in the fewest possible runs of consecutive ids.

    Takes the longest runs first, then the shortest run that covers the remainder.

    Args:
        candidates: different block ids, at least ``num_blocks`` and at least one.
    """
    ordered = np.sort(np.array(candidates, dtype=np.int64))
    starts = np.concatenate(([0], np.flatnonzero(np.diff(ordered) != 1) + 1))
    lengths = np.diff(starts, append=len(ordered))
    # Equally long runs are sorted by their lowest id
    longest_first = np.argsort(-lengths, kind="stable")
    lengths = lengths[longest_first]
    totals = np.cumsum(lengths)
    num_whole = int(np.searchsorted(totals, num_blocks))
    missing = num_blocks - (int(totals[num_whole - 1]) if num_whole else 0)
    shortest = int(np.searchsorted(-lengths, -missing, side="right")) - 1
    chosen: list[int] = []
    for run, length in [*((i, lengths[i]) for i in range(num_whole)), (shortest, missing)]:
        start = starts[longest_first[run]]
        chosen += ordered[start : start + length].tolist()
    return chosen
