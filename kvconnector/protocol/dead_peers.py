"""DeadPeers: decides when no more bytes of a dead peer can arrive in this node's memory."""

from __future__ import annotations

from dataclasses import dataclass

# After this many read rounds and seconds, no more bytes of a dead peer can arrive.
DRAIN_READS, DRAIN_S = 10, 0.5


@dataclass(frozen=True, slots=True)
class _DeadPeer:
    since: float
    num_read_rounds: int


class DeadPeers:
    """One receiver's dead peers whose last bytes may still be in this node's sockets.

    On TCP, a thread of this node reads bytes from a socket and writes them to this node's memory. A
    dead process posts nothing more, but bytes in its send buffer and in this node's receive buffer
    are still read and written, even after the peer is removed (docs/log.md).

    The transport does not tell when a socket is empty. Each successful read continues until the
    socket is empty. Between reads, the kernel delivers further bytes at once, or when a timer of
    about 200 ms fires. So several reads over more than 200 ms find all bytes. Time alone would
    prove nothing, because a stopped thread reads nothing.
    """

    def __init__(self) -> None:
        self._dead_peers: dict[str, _DeadPeer] = {}

    def add_dead_peer(self, engine_id: str, now: float, num_read_rounds: int) -> None:
        """Add a peer whose death was noticed at ``now``, after ``num_read_rounds`` read rounds."""
        self._dead_peers.setdefault(engine_id, _DeadPeer(now, num_read_rounds))

    def take_drained(self, now: float, num_read_rounds: int) -> list[str]:
        """Remove and return the peers whose last bytes have certainly been read."""
        done = [
            engine_id
            for engine_id, dead in self._dead_peers.items()
            if num_read_rounds - dead.num_read_rounds >= DRAIN_READS and now - dead.since >= DRAIN_S
        ]
        for engine_id in done:
            del self._dead_peers[engine_id]
        return done
