"""VirtualTimeLoop: an event loop on which time passes only when nothing is left to do.

Waits for a timer by setting its clock to it. What runs on it is real asyncio; it knows no sockets,
so all that is to talk must be in one process. Results do not depend on how busy the machine is.
"""

from __future__ import annotations

import asyncio
import selectors


class _Jumps(selectors.SelectSelector):
    """Waits for no file; ``now`` moves on by what it was to wait."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("all tasks wait, and for no timer")
        self.now += max(timeout, 0.0)
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """See `asyncio.SelectorEventLoop`; raises RuntimeError when nothing can ever happen again."""

    def __init__(self) -> None:
        self._jumps = _Jumps()
        super().__init__(self._jumps)

    def time(self) -> float:
        return self._jumps.now
