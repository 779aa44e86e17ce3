"""Drains: dead peers whose last bytes may still lie in one of our sockets.

On TCP, the transport reads bytes from a socket on our own thread, and writes them into our memory.
A dead process posts nothing more, but bytes in its send buffer and in our receive buffer are still
read and written; removing the peer does not stop that (docs/log.md). The transport does not tell
when a socket is empty. Each successful read continues until it finds nothing. Between two reads,
the kernel delivers further bytes at once, or when a timer of some 200 ms fires. So a few reads over
a longer time leave nothing. Time alone would prove nothing, as a stopped thread reads nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

MIN_READS = 10
MIN_S = 0.5


@dataclass(frozen=True, slots=True)
class _Drain:
    since: float
    num_reads: int


class Drains:
    """The dead peers of one receiver."""

    def __init__(self) -> None:
        self._drains: dict[str, _Drain] = {}

    def add_dead_peer(self, engine_id: str, now: float, num_reads: int) -> None:
        """Add a dead peer, whose death was noticed after ``num_reads`` reads of the transport."""
        self._drains.setdefault(engine_id, _Drain(now, num_reads))

    def take_done(self, now: float, num_reads: int) -> list[str]:
        """Remove and return the peers from which nothing can arrive any more."""
        done = [
            engine_id
            for engine_id, drain in self._drains.items()
            if num_reads - drain.num_reads >= MIN_READS and now - drain.since >= MIN_S
        ]
        for engine_id in done:
            del self._drains[engine_id]
        return done
