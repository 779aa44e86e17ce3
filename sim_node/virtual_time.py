"""VirtualTimeLoop: an event loop whose time advances only when nothing is left to do.

Instead of waiting for a timer, the loop sets its clock to the timer's time, so the load of the
machine has no effect. The loop runs real asyncio code, but no sockets: everything must be in one
process.
"""

from __future__ import annotations

import asyncio
import selectors


class _Jumps(selectors.SelectSelector):
    """A selector without files, which adds each timeout to ``now`` instead of waiting."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("all tasks wait, but none for a timer")
        self.now += max(timeout, 0.0)
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop with virtual time; raises RuntimeError if nothing can happen any more."""

    def __init__(self) -> None:
        self._jumps = _Jumps()
        super().__init__(self._jumps)

    def time(self) -> float:
        return self._jumps.now
