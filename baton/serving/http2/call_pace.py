"""CallPace: limits how many calls begin per interval of time; connections take turns."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

# 64 calls per 20 ms are 3,200 per second, more than a router can serve; so a burst of calls hardly
# waits.
MAX_AT_ONCE, MIN_AT_ONCE = 64, 16
INTERVAL_S = 0.02
_MORE_AT_ONCE = 8


class CallPace:
    """Gives out turns to begin or cancel a call, a limited number in each interval of time.

    Between the intervals, the event loop does its other work, however many calls wait. Connections
    take turns, so many calls on one connection hardly delay calls on another connection. If the
    event loop was late, the next interval has half as many turns, but at least `MIN_AT_ONCE`.
    """

    def __init__(self, max_at_once: int = MAX_AT_ONCE, interval_s: float = INTERVAL_S) -> None:
        self._max_at_once = max_at_once
        self._interval_s = interval_s
        self._num_at_once = self._num_left = max_at_once
        self._began_at = 0.0
        self._waiting: deque[Callable[[], None]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def take_turn(self) -> bool:
        """Return whether a call may begin now."""
        if self._waiting or not self._num_left:
            return False
        self._num_left -= 1
        self._start_timer()
        return True

    def wait_turn(self, begin: Callable[[], None]) -> None:
        """Call ``begin`` once, when a turn to begin or cancel a call is free."""
        self._waiting.append(begin)
        self._start_timer()

    def close(self) -> None:
        """Give out no more turns."""
        self._waiting.clear()
        self._num_left = 0
        if self._timer is not None:
            self._timer.cancel()

    def _start_timer(self, began_at: float | None = None) -> None:
        """Start an interval at ``began_at``, or now, unless one is running."""
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._began_at = loop.time() if began_at is None else began_at
            self._timer = loop.call_later(self._interval_s, self._begin_interval)

    def _begin_interval(self) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._began_at > 1.5 * self._interval_s:
            self._num_at_once = max(self._num_at_once // 2, min(MIN_AT_ONCE, self._max_at_once))
        else:
            self._num_at_once = min(self._num_at_once + _MORE_AT_ONCE, self._max_at_once)
        self._num_left = self._num_at_once
        while self._waiting and self._num_left:
            self._num_left -= 1
            self._waiting.popleft()()
        self._timer = None
        if self._waiting or self._num_left < self._num_at_once:
            self._start_timer(now)
