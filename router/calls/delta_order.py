"""DeltaOrder: puts the deltas of an attempt's two legs into output order."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import msgspec

from router.fleet.node import LegDelta

# One leg's link may stall until its node counts as silent, while the other leg goes on.
MAX_EARLY = 4096


class DeltaOrder:
    """Pass on each token once and in order; of duplicates, the first that came.

    Args:
        next_index: output index where the attempt begins.
        end_index: one past the last output index that the request may have.
    """

    def __init__(self, next_index: int, end_index: int = 2**32) -> None:
        self.next_index = next_index
        self._end_index = end_index
        self._early: dict[int, LegDelta] = {}  # by output index: deltas that came too early
        self._indexes: list[int] = []  # keys of `_early`, as a heap

    def admits(self, item: LegDelta) -> bool:
        """Return whether a delta lies within this output, and is not impossibly early."""
        delta = item.delta
        is_within = delta.output_index + max(len(delta.token_ids), 1) <= self._end_index
        return is_within and len(self._early) < MAX_EARLY

    def push_next(self, output_index: int) -> bool:
        """Accept one token if it is next and none came early; return whether it was accepted."""
        if output_index != self.next_index or self._early or output_index >= self._end_index:
            return False
        self.next_index += 1
        return True

    def push(self, item: LegDelta) -> Iterator[LegDelta]:
        """Take a delta without an error; yields the deltas that are next now."""
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
        """Return the part of a delta that was not passed on yet, or None."""
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
