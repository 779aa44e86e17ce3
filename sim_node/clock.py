"""NodeClock: the time of one simulated node, which may stand still (a stopped process) or end.

Lies between a node and the event loop: what is due while the node is stopped happens when it goes
on, and what is due after its end never happens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

# Steps may begin as if their timer had been on time, up to so much: a busy loop is made good again.
MAX_CATCH_UP_S = 0.1


class Timers(Protocol):
    """What is needed of an event loop; tests bring a virtual one."""

    def time(self) -> float:
        """Seconds that never go back."""

    def call_at(self, when: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        """Call back at a time."""


class NodeClock:
    """One node's time.

    Args:
        timers: the event loop.

    Attributes:
        max_lag_s: how late a timer was at most: a lot means that the machine is too busy to
            simulate so much.
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
        """Call back with the time it was due, or with a later one if that is too long ago."""

        def fire() -> None:
            if self._stopped:  # what it missed, it missed
                self._backlog.append(lambda: callback(self.now()))
            elif not self._ended:
                now = self.now()
                self.max_lag_s = max(self.max_lag_s, now - when)
                callback(max(when, now - MAX_CATCH_UP_S))

        self._timers.call_at(when, fire)

    def run(self, action: Callable[[], None]) -> None:
        """Do something now; when the node goes on, if it is stopped; never, if it has ended."""
        if self._stopped:
            self._backlog.append(action)
        elif not self._ended:
            action()

    def stop(self) -> None:
        """Let nothing happen until `go_on`."""
        self._stopped = True

    def go_on(self) -> None:
        """Do what was due meanwhile, in its order."""
        self._stopped = False
        backlog, self._backlog = self._backlog, []
        for action in backlog:
            self.run(action)

    def end(self) -> None:
        """Let nothing happen any more."""
        self._stopped, self._ended = False, True
        self._backlog.clear()
