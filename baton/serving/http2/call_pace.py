"""CallPace: lets only so many calls begin at a time, and each connection in its turn."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

# More than a router can serve: 3,200 a second. What comes at once is begun within a few turns.
MAX_AT_ONCE = 64
INTERVAL_S = 0.02


class CallPace:
    """Hands out turns to begin a call, so many in each interval.

    The loop's other work runs between two intervals, however many calls there are. Connections
    take turns, so many calls on one connection hardly delay a call on another one.
    """

    def __init__(self, max_at_once: int = MAX_AT_ONCE, interval_s: float = INTERVAL_S) -> None:
        self._max_at_once = max_at_once
        self._interval_s = interval_s
        self._num_left = max_at_once
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
        """Call ``begin`` once, when it is the turn of one more call."""
        self._waiting.append(begin)
        self._start_timer()

    def close(self) -> None:
        """Give nobody a turn any more."""
        self._waiting.clear()
        self._num_left = 0
        if self._timer is not None:
            self._timer.cancel()

    def _start_timer(self) -> None:
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._interval_s, self._begin_interval)

    def _begin_interval(self) -> None:
        self._timer = None
        self._num_left = self._max_at_once
        while self._waiting and self._num_left:
            self._num_left -= 1
            self._waiting.popleft()()
        if self._waiting or self._num_left < self._max_at_once:
            self._start_timer()
