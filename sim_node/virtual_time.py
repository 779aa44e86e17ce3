"""VirtualTimeLoop: an event loop whose time advances only when nothing is left to do.

Instead of waiting for a timer, the loop moves its clock to it. Real asyncio code runs on it, but no
sockets, so everything must be in one process. Results do not depend on how busy the machine is.
"""

from __future__ import annotations

import asyncio
import selectors


class _Jumps(selectors.SelectSelector):
    """A selector without files; ``now`` advances by each timeout."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("all tasks wait, but none for a timer")
        self.now += max(timeout, 0.0)
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop on virtual time; raises RuntimeError if nothing can ever happen again."""

    def __init__(self) -> None:
        self._jumps = _Jumps()
        super().__init__(self._jumps)

    def time(self) -> float:
        return self._jumps.now
