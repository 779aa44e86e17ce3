"""BeatPace: waits until a node's next beat is due; nodes that rest beat half as often."""

from __future__ import annotations

import asyncio

from baton.link.beat_interval import BEAT_INTERVAL_S
from baton.processes.ticks import SOON, next_tick

# A node at rest sends one beat in this many intervals. Each wake of a resting process takes about
# 0.2 ms, because its data is in no cache.
INTERVALS_AT_REST = 2
_SLACK_S = BEAT_INTERVAL_S / 10  # timers may fire this much early


class BeatPace:
    """The pauses between the beats of one node, on its asyncio loop."""

    def __init__(self) -> None:
        self._due: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._began_at = 0.0

    async def wait(self, *, rests: bool) -> int:
        """Wait for one interval, or for at most `INTERVALS_AT_REST` intervals if the node rests.

        Beats at rest are sent at shared ticks, so that processes of one machine wake together: code
        and data that one of them has just used are in the caches for the others.

        Returns:
            The number of intervals for which the next beat counts.
        """
        loop = asyncio.get_running_loop()
        num_intervals = INTERVALS_AT_REST if rests else 1
        self._due, self._began_at = loop.create_future(), loop.time()
        due_at = self._began_at + BEAT_INTERVAL_S
        if rests:
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
