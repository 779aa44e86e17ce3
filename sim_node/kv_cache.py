"""SimKVCache: how much room a simulated node has for KV, and which prefixes it has.

Counts blocks and knows names (baton/block_hash.py); there is no memory behind them, so blocks have
no ids. A block with a name is shared by all who hold the name; without holders it is free, and
found again until its room is needed: the one that was held the longest ago goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.block_hash import BlockHash


@dataclass(slots=True)
class Holding:
    """The blocks of one request: the first ones by name, the others by number."""

    hashes: list[BlockHash] = field(default_factory=list)
    num_unnamed: int = 0

    @property
    def num_blocks(self) -> int:
        return len(self.hashes) + self.num_unnamed


class SimKVCache:
    """Blocks of one node.

    Args:
        num_blocks: all there are.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._ref_counts: dict[BlockHash, int] = {}  # of held names
        self._idle: OrderedDict[BlockHash, None] = OrderedDict()  # free; the next to go first
        self._num_unnamed = 0
        # Since the last `take_changes`: True for stored, False for removed.
        self._changes: dict[BlockHash, bool] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds."""
        return self.num_blocks - self._num_unnamed - len(self._ref_counts)

    def num_cached(self, hashes: Sequence[BlockHash]) -> int:
        """How many of the first blocks of a sequence are here."""
        for index, block_hash in enumerate(hashes):
            if block_hash not in self._ref_counts and block_hash not in self._idle:
                return index
        return len(hashes)

    def take(
        self, hashes: Sequence[BlockHash], num_blocks: int, *, headroom: int = 0
    ) -> Holding | None:
        """Blocks for a request, those that are here by name; None if there is no room.

        Args:
            hashes: of its first blocks, as far as they may be shared.
            num_blocks: that it needs in all.
            headroom: blocks that must be free after it.
        """
        shared = list(hashes[: self.num_cached(hashes)])
        num_unnamed = num_blocks - len(shared)
        num_revived = sum(block_hash in self._idle for block_hash in shared)
        if num_unnamed + num_revived + headroom > self.num_free_blocks:
            return None
        for block_hash in shared:
            self._hold(block_hash)
        self._num_unnamed += num_unnamed
        self._evict()
        return Holding(shared, num_unnamed)

    def grow(self, holding: Holding) -> bool:
        """One block more; False if there is none."""
        if self.num_free_blocks < 1:
            return False
        holding.num_unnamed += 1
        self._num_unnamed += 1
        self._evict()
        return True

    def name(self, holding: Holding, hashes: Sequence[BlockHash]) -> None:
        """Make a holding's first blocks known by these names; those it has already stay.

        Where a name is here already, its block takes the place of the new one.
        """
        new = hashes[len(holding.hashes) :]
        for block_hash in new:
            if block_hash not in self._ref_counts and block_hash not in self._idle:
                self._note(block_hash, stored=True)
            self._hold(block_hash)
        holding.hashes += new
        holding.num_unnamed -= len(new)
        self._num_unnamed -= len(new)

    def free(self, holding: Holding) -> None:
        """Give a holding back; named blocks can be found until their room is needed."""
        for block_hash in reversed(holding.hashes):  # the tail is the first to go
            count = self._ref_counts[block_hash] - 1
            if count:
                self._ref_counts[block_hash] = count
            else:
                del self._ref_counts[block_hash]
                self._idle[block_hash] = None
        self._num_unnamed -= holding.num_unnamed
        holding.hashes, holding.num_unnamed = [], 0

    def names(self) -> tuple[BlockHash, ...]:
        """All prefixes that are here, heads before their tails."""
        # A head is held by all who hold its tail; idle, it is the later one to go.
        return (*self._ref_counts, *reversed(self._idle))

    def take_changes(self) -> tuple[tuple[BlockHash, ...], tuple[BlockHash, ...]]:
        """What was stored and what was removed since the last call, taken together."""
        changes, self._changes = self._changes, {}
        stored = tuple(block_hash for block_hash, is_new in changes.items() if is_new)
        return stored, tuple(block_hash for block_hash, is_new in changes.items() if not is_new)

    def check(self) -> None:
        """Assert that the counts add up; for tests."""
        assert self._num_unnamed >= 0
        assert 0 <= self.num_free_blocks <= self.num_blocks
        assert len(self._idle) <= self.num_free_blocks
        assert not self._idle.keys() & self._ref_counts.keys()

    def _hold(self, block_hash: BlockHash) -> None:
        self._idle.pop(block_hash, None)
        self._ref_counts[block_hash] = self._ref_counts.get(block_hash, 0) + 1

    def _evict(self) -> None:
        while len(self._idle) > self.num_free_blocks:
            self._note(self._idle.popitem(last=False)[0], stored=False)

    def _note(self, block_hash: BlockHash, *, stored: bool) -> None:
        if self._changes.get(block_hash, stored) != stored:
            del self._changes[block_hash]  # it came and went, or went and came
        else:
            self._changes[block_hash] = stored
