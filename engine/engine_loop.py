"""EngineLoop: the one thread that owns an engine and steps it; other threads only wake it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar, cast

from baton.api.errors import BatonError, EngineDeadError
from baton.telemetry.round_watch import Progress, Rounds

logger = logging.getLogger(__name__)

T = TypeVar("T")

TICK_S = 0.25  # seconds; an idle engine's loop wakes at this interval


class EngineLoop:
    """A thread that calls ``step`` while there is work, and otherwise sleeps until it is woken.

    Args:
        step: runs one step; returns whether there is more to do at once.
        on_death: called once, on the loop's thread, with the exception of ``step``. The engine is
            not stepped again, and the process must end.
        name: name of the thread.
        when_idle: does a little work that can wait, and returns whether more is left. After an
            exception, this function is not called again.
        after_death: called after ``on_death``, with the same exception, for work that may hang.
        tick_s: returns the seconds after which the loop steps again without a wake.
    """

    def __init__(
        self,
        step: Callable[[], bool],
        on_death: Callable[[Exception], None],
        *,
        name: str,
        when_idle: Callable[[], bool] = lambda: False,
        after_death: Callable[[Exception], None] = lambda error: None,
        tick_s: Callable[[], float] = lambda: TICK_S,
    ) -> None:
        self._tick_s = tick_s
        self._step, self._when_idle = step, when_idle
        self._on_death, self._after_death = on_death, after_death
        self._calls: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._has_ended = False
        self._wake = threading.Event()
        self._stopping = False
        self._num_rounds = 0
        self._in_round = False
        self._progress = Progress()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Wake the loop because there is new work; safe from any thread."""
        self._wake.set()

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Call a function on the loop's thread, between two steps; safe from any thread.

        An exception of the function is set on the returned future, and also ends the loop. Once the
        loop has ended, the future gets an EngineDeadError.
        """
        future: Future[T] = Future()
        self._calls.append((future, function))
        self._wake.set()
        if self._has_ended:
            self._refuse_calls()
        return future

    async def ask(self, function: Callable[[], T]) -> T:
        """Call a function on the loop's thread, between two steps, and return its result.

        A BatonError of the function is raised here and leaves the loop running. Any other exception
        is raised here, too, but also ends the loop.
        """

        def answer() -> tuple[T | None, BatonError | None]:
            try:
                return function(), None
            except BatonError as error:
                return None, error

        result, error = await asyncio.wrap_future(self.call(answer))
        if error is not None:
            raise error
        return cast("T", result)

    @property
    def rounds(self) -> Rounds:
        """Return the number of completed steps, and whether a step is running.

        Signs of progress within steps (`note_progress`) count, too. Safe from any thread.
        """
        return Rounds(self._num_rounds + self._progress.num_signs, self._in_round)

    def stop(self) -> None:
        """Stop the thread after the running step, and wait until it has ended."""
        self._stopping = True
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        self._progress.count_this_thread()
        try:
            while not self._stopping:
                self._wake.clear()
                self._in_round = True
                self._do_calls()
                busy = self._step()
                self._num_rounds += 1
                if not busy:
                    self._in_round = False
                    tick = time.monotonic() + self._tick_s()
                    while not self._wake.is_set() and time.monotonic() < tick:
                        if not self._do_idle_work():
                            self._wake.wait(tick - time.monotonic())
        except BaseException as error:  # a panic in Rust is no `Exception`
            death = error if isinstance(error, Exception) else EngineDeadError(repr(error))
            self._on_death(death)  # before the dump, which may fail or hang
            self._end()
            logger.critical("the engine cannot continue", exc_info=error)
            self._after_death(death)
        self._end()

    def _end(self) -> None:
        self._has_ended = True
        self._refuse_calls()

    def _do_calls(self) -> None:
        while self._calls:
            future, function = self._calls.popleft()
            if not future.set_running_or_notify_cancel():  # the caller has cancelled it
                continue
            try:
                future.set_result(function())
            except BaseException as error:  # a panic in Rust is no `Exception`
                future.set_exception(error)
                raise

    def _refuse_calls(self) -> None:
        """Fail the calls that are still queued when the loop ends; safe from any thread."""
        with contextlib.suppress(IndexError):  # another thread took the last call
            while self._calls:
                future, _ = self._calls.popleft()
                if future.set_running_or_notify_cancel():
                    future.set_exception(EngineDeadError("the engine has stopped"))

    def _do_idle_work(self) -> bool:
        """Call ``when_idle``; after an exception, disable it and let the engine go on."""
        try:
            return self._when_idle()
        except Exception:
            logger.exception("work of an idle engine has failed and is given up")
            self._when_idle = lambda: False
            return False
