"""NodeClock: the clock and timers of one simulated node, which can be paused and ended.

All events of a node go through its clock: events that are due while the node is paused happen when
it continues, and events that are due after its end never happen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

# A late event is treated as if it came on time if it is at most this many seconds late, so that a
# busy event loop does not slow the simulated node.
MAX_CATCH_UP_S = 0.1


class Timers(Protocol):
    """The methods of an event loop that `NodeClock` uses; tests pass a virtual clock."""

    def time(self) -> float:
        """Return the time, in monotonic seconds."""

    def call_at(self, when: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        """Call ``callback`` at ``when``, on the clock of `time`."""


class NodeClock:
    """The clock of one node, and the events that wait while the node is paused.

    Args:
        timers: the event loop.

    Attributes:
        max_lag_s: longest delay of a timer so far, in seconds; if it is large, the machine is too
            busy for this simulation.
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
        """Call ``callback`` at ``when``, with the time that counts as now.

        This time is ``when``, but at most `MAX_CATCH_UP_S` before the real time.
        """

        def fire() -> None:
            if self._stopped:  # `go_on` will call the callback
                self._backlog.append(lambda: callback(self.now()))
            elif not self._ended:
                now = self.now()
                self.max_lag_s = max(self.max_lag_s, now - when)
                callback(max(when, now - MAX_CATCH_UP_S))

        self._timers.call_at(when, fire)

    def run(self, action: Callable[[], None]) -> None:
        """Run an action now, or once a paused node continues; drop it if the node has ended."""
        if self._stopped:
            self._backlog.append(action)
        elif not self._ended:
            action()

    def stop(self) -> None:
        """Pause the node: its events wait until `go_on`."""
        self._stopped = True

    def go_on(self) -> None:
        """Continue the node; run the events that became due during the pause, in order."""
        self._stopped = False
        backlog, self._backlog = self._backlog, []
        for action in backlog:
            self.run(action)

    def halt(self) -> None:
        """End the node: none of its events happen from now on."""
        self._stopped, self._ended = False, True
        self._backlog.clear()
