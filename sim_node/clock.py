"""NodeClock: the time of one simulated node, which can be paused, continued and ended.

Sits between a node and the event loop: events due while the node is stopped happen when it
continues; events due after its end never happen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

# Maximum number of seconds by which steps may be dated back, to make up for a busy event loop.
MAX_CATCH_UP_S = 0.1


class Timers(Protocol):
    """The methods of an event loop that `NodeClock` uses; tests pass a virtual clock."""

    def time(self) -> float:
        """Return monotonic seconds."""

    def call_at(self, when: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        """Call ``callback`` at ``when``, on the clock of `time`."""


class NodeClock:
    """Keeps one node's time.

    Args:
        timers: the event loop.

    Attributes:
        max_lag_s: longest delay of a timer; if large, the machine is too busy for this simulation.
    """

    def __init__(self, timers: Timers) -> None:
        self._timers = timers
        self._stopped = False
        self._ended = False
        self._backlog: list[Callable[[], None]] = []
        self.max_lag_s = 0.0

    def now(self) -> float:
        return self._timers.time()

    def call_at(self, when: float, callback: Callable[[float], None]) -> None:
        """Call ``callback`` with the due time, which is at most `MAX_CATCH_UP_S` ago."""

        def fire() -> None:
            if self._stopped:  # run when the node continues
                self._backlog.append(lambda: callback(self.now()))
            elif not self._ended:
                now = self.now()
                self.max_lag_s = max(self.max_lag_s, now - when)
                callback(max(when, now - MAX_CATCH_UP_S))

        self._timers.call_at(when, fire)

    def run(self, action: Callable[[], None]) -> None:
        """Run an action now, or when a stopped node continues; never after the end."""
        if self._stopped:
            self._backlog.append(action)
        elif not self._ended:
            action()

    def stop(self) -> None:
        """Pause the node: nothing happens until `go_on`."""
        self._stopped = True

    def go_on(self) -> None:
        """Continue; run, in order, the events that became due during the pause."""
        self._stopped = False
        backlog, self._backlog = self._backlog, []
        for action in backlog:
            self.run(action)

    def halt(self) -> None:
        """End the node: nothing happens from now on."""
        self._stopped, self._ended = False, True
        self._backlog.clear()
