"""DeltaOrder: puts what the two legs of an attempt say into the order of the output."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import msgspec

from router.fleet.node import LegDelta

# One leg's link may stand still for as long as a node may be silent, while the other goes on.
MAX_EARLY = 4096


class DeltaOrder:
    """Each token once and none before those that it follows; of doubles, the first that came.

    Args:
        next_index: of the output, where the attempt begins.
        end_index: behind the last one that the request may have.
    """

    def __init__(self, next_index: int, end_index: int = 2**32) -> None:
        self.next_index = next_index
        self._end_index = end_index
        self._early: dict[int, LegDelta] = {}  # by output index; legs overtake each other
        self._indexes: list[int] = []  # of these, the lowest first (a heap)

    def admits(self, item: LegDelta) -> bool:
        """Whether a delta is of this output, and not further ahead than one leg can be."""
        delta = item.delta
        is_within = delta.output_index + max(len(delta.token_ids), 1) <= self._end_index
        return is_within and len(self._early) < MAX_EARLY

    def push_next(self, output_index: int) -> bool:
        """Take a single token, if it is the next one and nothing waits for it; else do nothing."""
        if output_index != self.next_index or self._early or output_index >= self._end_index:
            return False
        self.next_index += 1
        return True

    def push(self, item: LegDelta) -> Iterator[LegDelta]:
        """Take a delta without an error; yields those that are next now."""
        index = item.delta.output_index
        if index not in self._early:
            self._early[index] = item
            heapq.heappush(self._indexes, index)
        while self._indexes and self._indexes[0] <= self.next_index:
            ready = self._behind(self._early.pop(heapq.heappop(self._indexes)))
            if ready is not None:
                self.next_index += len(ready.delta.token_ids)
                yield ready

    def _behind(self, item: LegDelta) -> LegDelta | None:
        """The part of a delta that is not told yet; None if all of it is."""
        delta = item.delta
        num_told = self.next_index - delta.output_index
        if num_told == 0:
            return item
        if num_told >= len(delta.token_ids):
            return None
        untold = msgspec.structs.replace(
            delta,
            output_index=self.next_index,
            token_ids=delta.token_ids[num_told:],
            logprobs=delta.logprobs[num_told:],
        )
        return msgspec.structs.replace(item, delta=untold)
