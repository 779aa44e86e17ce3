"""FileThread: a thread that does one piece of work after another."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

_TICK_S = 1.0


class FileThread:
    """A thread with a queue of work.

    Args:
        name: name of the thread.
        on_idle: called about once per second between pieces of work.

    Errors of `on_idle` and of pieces of work are logged, and do not end the thread.
    """

    def __init__(self, name: str, on_idle: Callable[[], None] = lambda: None) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._on_idle = on_idle
        self._idle_at = 0.0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        """Return the number of queued pieces of work that the thread has not begun."""
        return self._work.qsize()

    def submit(self, work: Callable[[], None]) -> None:
        """Queue a piece of work; its errors are only logged."""
        self._work.put(work)

    def close(self, timeout_s: float) -> None:
        """End the thread once all queued work is done, but wait no longer than ``timeout_s``."""
        self._work.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            now = time.monotonic()
            if now - self._idle_at >= _TICK_S:
                self._idle_at = now
                self._call(self._on_idle)
            try:
                work = self._work.get(timeout=_TICK_S)
            except queue.Empty:
                continue
            if work is None:
                return
            self._call(work)

    def _call(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception:
            logger.exception("the thread %s caught an error and goes on", self._thread.name)
