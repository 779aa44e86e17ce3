"""VirtualTimeLoop: an event loop whose time advances only when nothing is left to do.

Instead of waiting for a timer, the loop moves its clock to the timer's time. The loop runs real
asyncio code, but no sockets: everything must be in one process. The machine's load has no effect.
"""

from __future__ import annotations

import asyncio
import selectors


class _Jumps(selectors.SelectSelector):
    """A selector without files; adds timeouts to ``now``, without waiting."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("all tasks wait, but none for a timer")
        self.now += max(timeout, 0.0)
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop on virtual time; raises RuntimeError if nothing can happen any more."""

    def __init__(self) -> None:
        self._jumps = _Jumps()
        super().__init__(self._jumps)

    def time(self) -> float:
        return self._jumps.now
