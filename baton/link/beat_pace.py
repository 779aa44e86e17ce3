"""BeatPace: waits until a node's next beat is due; nodes that rest beat less often."""

from __future__ import annotations

import asyncio

from baton.link.beat_interval import BEAT_INTERVAL_S
from baton.processes.ticks import SOON, next_tick

# A node at rest sends one beat in this many intervals. Each wake of a resting process takes about
# 0.2 ms, because its data is in no cache. The router of a large fleet tells its nodes to wait up to
# `MAX_INTERVALS_AT_REST` intervals.
INTERVALS_AT_REST, MAX_INTERVALS_AT_REST = 2, 4
_SLACK_S = BEAT_INTERVAL_S / 10  # timers may fire this much early


class BeatPace:
    """The pauses between the beats of one node, on its asyncio loop."""

    def __init__(self) -> None:
        self._due: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._began_at = 0.0

    async def wait(self, num_intervals: int) -> int:
        """Wait for about ``num_intervals`` beat intervals, or less if `hurry` is called meanwhile.

        A pause of several intervals ends at a shared tick, so that the resting processes of a
        machine wake together: code that one of them has just used is in the caches for the others.
        The first such pause may be much shorter.

        Returns:
            The number of intervals for which the next beat counts.
        """
        loop = asyncio.get_running_loop()
        self._due, self._began_at = loop.create_future(), loop.time()
        due_at = self._began_at + BEAT_INTERVAL_S
        if num_intervals > 1:
            due_at = next_tick(self._began_at, num_intervals * BEAT_INTERVAL_S, SOON)
        self._timer = loop.call_at(due_at, self._end)
        try:
            await self._due
        finally:
            self._timer.cancel()
            self._due = None
        # A late timer counts as one in time, because the whole process may have stood still.
        elapsed = (loop.time() - self._began_at + _SLACK_S) / BEAT_INTERVAL_S
        return max(1, min(num_intervals, int(elapsed)))

    def hurry(self) -> None:
        """Shorten the present pause to one interval, because the node rests no longer."""
        if self._due is None or self._timer is None:
            return
        loop = asyncio.get_running_loop()
        due_at = min(self._began_at + BEAT_INTERVAL_S, self._timer.when())
        self._timer.cancel()
        if due_at > loop.time():
            self._timer = loop.call_at(due_at, self._end)
        else:
            self._end()

    def _end(self) -> None:
        if self._due is not None and not self._due.done():
            self._due.set_result(None)


def read_intervals_at_rest(told: int) -> int:
    """Return the intervals between beats at rest that a router asks for, within the limits.

    Args:
        told: the number in the router's message; 0: the router is of a release without the field.
    """
    return min(max(told, INTERVALS_AT_REST), MAX_INTERVALS_AT_REST)


def more_patience(intervals_at_rest: int) -> int:
    """Return how many more beat intervals of silence both ends of a link accept in a large fleet.

    A process that is slowed down by a factor sends its beats late by this factor. So silence is
    noticed after three times the interval between beats at rest, whatever this interval is.

    Args:
        intervals_at_rest: beat intervals between two beats at rest.
    """
    return 3 * (intervals_at_rest - INTERVALS_AT_REST)
