"""An event loop on a virtual clock: it never waits, and runs only as long as somebody has to do
something now. What runs on it is real asyncio, its timers included."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import selectors
from collections.abc import Callable, Iterator
from contextvars import Context
from typing import Any, TypeVarTuple

from tests.fakes.time.virtual_clock import VirtualClock

Ts = TypeVarTuple("Ts")
MAX_ROUNDS = 10_000


class _NeverWaits(selectors.SelectSelector):
    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """See `asyncio.SelectorEventLoop`; only its time is another.

    Attributes:
        errors: errors that no task retrieved.
    """

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._num_calls = 0
        self._timers: list[float] = []  # a heap; those that were cancelled, too
        super().__init__(_NeverWaits())
        self.errors: list[dict[str, Any]] = []
        self.set_exception_handler(lambda loop, context: self.errors.append(context))

    def time(self) -> float:
        return self._clock()

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        self._num_calls += 1
        return super().call_soon(callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        heapq.heappush(self._timers, when)
        return super().call_at(when, callback, *args, context=context)

    @property
    def idle_s(self) -> float:
        """Seconds until the next timer may be due; 0 if there is none."""
        while self._timers and self._timers[0] <= self.time():
            heapq.heappop(self._timers)
        return self._timers[0] - self.time() if self._timers else 0.0

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Make this loop the running one within the context, as its callbacks see it."""
        asyncio._set_running_loop(self)
        try:
            yield
        finally:
            asyncio._set_running_loop(None)

    def run_until_idle(self) -> None:
        """Run all that can run now: timers that are due, and what follows from them."""
        for _ in range(MAX_ROUNDS):
            before = self._num_calls
            self.call_soon(self.stop)
            self.run_forever()
            if self._num_calls == before + 1:
                return
        raise AssertionError("a task runs for ever and no time passes")
