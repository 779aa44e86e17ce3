"""EngineLoop: the one thread that owns an engine and steps it; other threads only wake it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from baton.api.errors import EngineDeadError
from baton.telemetry.round_watch import Rounds

logger = logging.getLogger(__name__)

TICK_S = 0.25  # seconds; an idle engine checks its deadlines this often


class EngineLoop:
    """Calls ``step`` while there is work, and sleeps otherwise.

    Args:
        step: runs one step; returns whether there is more to do at once.
        on_death: called once, on the loop's thread, with the exception of ``step``. The engine is
            not stepped again, and the process must end.
        name: name of the thread.
        when_idle: does a little work that can wait; returns whether more is left. An exception ends
            this work for good.
        after_death: called after ``on_death``, with the same exception; may hang.
    """

    def __init__(
        self,
        step: Callable[[], bool],
        on_death: Callable[[Exception], None],
        *,
        name: str,
        when_idle: Callable[[], bool] = lambda: False,
        after_death: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        self._step, self._when_idle = step, when_idle
        self._on_death, self._after_death = on_death, after_death
        self._wake = threading.Event()
        self._stopping = False
        self._num_rounds = 0
        self._in_round = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Wake the loop, as there is new work; safe from any thread."""
        self._wake.set()

    @property
    def rounds(self) -> Rounds:
        """Return the number of completed steps, and whether a step is running; from any thread."""
        return Rounds(self._num_rounds, self._in_round)

    def stop(self) -> None:
        """Stop the thread after the running step, and wait for it."""
        self._stopping = True
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._wake.clear()
                self._in_round = True
                busy = self._step()
                self._num_rounds += 1
                if not busy:
                    self._in_round = False
                    tick = time.monotonic() + TICK_S
                    while not self._wake.is_set() and time.monotonic() < tick:
                        if not self._do_idle_work():
                            self._wake.wait(tick - time.monotonic())
        except BaseException as error:  # also Rust panics, which are no `Exception`
            death = error if isinstance(error, Exception) else EngineDeadError(repr(error))
            self._on_death(death)  # first, because dumping may fail without memory or disk
            logger.critical("the engine cannot continue", exc_info=error)
            self._after_death(death)

    def _do_idle_work(self) -> bool:
        """Do a little idle work; an exception ends this work, not the engine."""
        try:
            return self._when_idle()
        except Exception:
            logger.exception("work of an idle engine has failed and is given up")
            self._when_idle = lambda: False
            return False
