"""Drains: dead peers whose last bytes may still lie in a socket of ours.

On TCP the transport writes into our memory what our own thread reads from a socket. A process that
is dead posts nothing more, but up to its send buffer and our receive buffer of what it had posted
is read, and written, afterwards; removing the peer changes nothing in that (docs/log.md). The
transport does not say when a socket is empty. Each successful read goes on until it finds nothing,
and what the kernel still hands over between two reads it does at once, or when a timer of some
200 ms has fired: so a few reads over a longer time leave nothing. Time alone would be worthless: a
thread that stood still has read nothing.
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
    """All such peers of one receiver."""

    def __init__(self) -> None:
        self._drains: dict[str, _Drain] = {}

    def add_dead_peer(self, engine_id: str, now: float, num_reads: int) -> None:
        """Note a dead peer, whose death was noticed after ``num_reads`` reads of the transport."""
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
