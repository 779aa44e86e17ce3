"""PlacementMemory: the nodes to which prompts were sent lately, if they do not report their caches.

Entries have no expiry time of their own. Instead, two generations of entries are kept, and the
older one expires as a whole.

    note ->  [ newest ]   every lifetime_s / 2, or when it is full:  newest -> previous -> gone
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from baton.kv.block_hash import ShortHash


class PlacementMemory:
    """Remembers for each block of a prompt to which nodes it was sent.

    A set of nodes is an integer with one bit per node.

    Args:
        max_blocks: maximum number of blocks remembered.
        lifetime_s: longest time that an entry is remembered; the shortest time is half as long, or
            less if there are too many entries.
        clock: returns monotonic seconds.

    Attributes:
        generation: number of generations that have begun after the first.
    """

    def __init__(
        self,
        max_blocks: int,
        lifetime_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.generation = 0
        self._max_newest = max(max_blocks // 2, 1)
        self._lifetime_s = lifetime_s
        self._clock = clock
        self._newest: dict[ShortHash, int] = {}
        self._previous: dict[ShortHash, int] = {}
        self._change_at = clock() + lifetime_s / 2

    @property
    def num_blocks(self) -> int:
        """Number of entries in both generations; a block that is in both counts twice."""
        return len(self._newest) + len(self._previous)

    def note(self, bit: int, hashes: Iterable[ShortHash]) -> None:
        """Remember that these blocks were sent to the node with this bit."""
        for block_hash in hashes:
            if len(self._newest) >= self._max_newest:
                self._change()
            self._newest[block_hash] = self._newest.get(block_hash, 0) | bit

    def get(self, block_hash: ShortHash, default: int) -> int:
        """Return the nodes to which this block was sent lately, as bits; ``default`` if none."""
        newest = self._newest.get(block_hash, 0)
        return newest | self._previous.get(block_hash, 0) or default

    def has_forgotten(self, generation: int) -> bool:
        """Return whether all entries of this generation and earlier ones are forgotten."""
        return self.generation >= generation + 2 or not self.num_blocks

    def expire(self) -> None:
        """Forget the generations that are older than the lifetime."""
        now = self._clock()
        if now < self._change_at:
            return
        # After a long pause, both generations are too old.
        if now >= self._change_at + self._lifetime_s / 2:
            self._change()
        self._change()

    def _change(self) -> None:
        self.generation += 1
        self._previous, self._newest = self._newest, {}
        self._change_at = self._clock() + self._lifetime_s / 2
