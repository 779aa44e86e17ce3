"""RunClock: seconds since a run began, exact sleeps, and the lag of the event loop.

asyncio's loops sleep whole milliseconds and may wake early, so this class sleeps again until the
moment.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable

_PROBE_EVERY_S = 0.01
_EARLY_S = 1e-6


class RunClock:
    """A clock that shows the seconds since the run began.

    Args:
        now: returns monotonic seconds.

    Attributes:
        began_at: the time when the run began, on the clock ``now``.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.began_at = now()

    def start(self) -> None:
        """Set the beginning of the run to now."""
        self.began_at = self._now()

    def now_s(self) -> float:
        return self._now() - self.began_at

    async def sleep_until(self, moment_s: float) -> None:
        """Sleep until a moment, not shorter; if the moment has passed, let other tasks run once."""
        left_s = moment_s - self.now_s()
        await asyncio.sleep(max(left_s, 0))
        while (left_s := moment_s - self.now_s()) > _EARLY_S:  # noqa: ASYNC110  # time sets no event
            await asyncio.sleep(left_s)


class LoopLag:
    """Lag of this process's event loop, measured every 10 ms.

    Events that arrive while the event loop is late are noted late, so all times that a run measures
    can be wrong by this lag.

    Attributes:
        times_s: times of the measurements, in seconds since the run began.
        lags_s: the lag in seconds at each of these times.
    """

    def __init__(self, clock: RunClock) -> None:
        self._clock = clock
        self.times_s = array("d")
        self.lags_s = array("d")

    async def watch(self) -> None:
        """Measure the event loop's lag until cancelled."""
        due_s = self._clock.now_s()
        while True:
            # Measurements that were due during a stop are skipped: a stop of one second gives a
            # single lag of one second.
            due_s = max(due_s, self._clock.now_s()) + _PROBE_EVERY_S
            await self._clock.sleep_until(due_s)
            now_s = self._clock.now_s()
            self.times_s.append(now_s)
            self.lags_s.append(now_s - due_s)
