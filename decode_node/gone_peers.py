"""GonePeers: prefill nodes that the router has lost, until nothing of theirs can arrive any more.

    lost -> known to be dead -> drained          their quarantine ends; then they are forgotten
      `----> all of theirs is quiet ------->

Knows processes and peers; no request and no block.
"""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path

from kvconnector.base import KVReceiver
from kvconnector.peer_info import PeerInfo, host_identity


class GonePeers:
    """All of them; they stay connected until they are forgotten, as they may be alive.

    Args:
        receiver: drains and disconnects them.
    """

    def __init__(self, receiver: KVReceiver) -> None:
        self._receiver = receiver
        self._peers: dict[str, PeerInfo] = {}
        self._draining: set[str] = set()

    def add(self, peer: PeerInfo) -> None:
        self._peers[peer.engine_id] = peer

    def add_if_dead(self, peer: PeerInfo) -> bool:
        """Of a peer that no router says is gone."""
        if not is_dead(peer):
            return False
        self.add(peer)
        return True

    def remove(self, engine_id: str) -> None:
        """It is back; harmless when it was not gone."""
        self._peers.pop(engine_id, None)
        self._draining.discard(engine_id)

    def tick(self, may_write: Container[str]) -> None:
        """Have the dead drained, forget who is quiet.

        Args:
            may_write: engine ids of those that blocks are held for.
        """
        for engine_id, peer in list(self._peers.items()):
            if engine_id not in may_write:
                self.remove(engine_id)
                self._receiver.disconnect(engine_id)
            elif engine_id not in self._draining and is_dead(peer):
                self._draining.add(engine_id)
                self._receiver.drain(engine_id)

    def is_drained(self, engine_id: str) -> bool:
        """Whether the end of a drain is of a peer that is still gone."""
        return engine_id in self._draining


def is_dead(peer: PeerInfo) -> bool:
    """Whether all of a peer's process has certainly ended. Of another machine we cannot say."""
    if not peer.host or peer.host != host_identity() or peer.pid == 0:
        return False
    try:
        # The first thread may be a zombie while another one still copies.
        threads = list(Path(f"/proc/{peer.pid}/task").iterdir())
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return all(_is_over(thread / "stat") for thread in threads)


def _is_over(stat: Path) -> bool:
    try:
        text = stat.read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:
        return False
    # "pid (name) state ...": a zombie writes nothing any more, it only waits to be noticed.
    return text.rpartition(")")[2].split()[0] in ("Z", "X")
