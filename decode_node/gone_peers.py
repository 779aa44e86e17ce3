"""GonePeers: prefill nodes that the router has lost, until nothing of theirs can arrive any more.

    lost -> known to be dead -> drained          their quarantine ends; then they are forgotten
      `----> all of theirs is quiet ------->

Knows processes and peers; no request and no block.
"""

from __future__ import annotations

from collections.abc import Container

from kvconnector.ends import Receiver
from kvconnector.peer_info import PeerInfo
from kvconnector.peer_process import PeerProcess


class GonePeers:
    """All of them; they stay connected until they are forgotten, as they may be alive.

    Args:
        receiver: watches, drains and disconnects them.
    """

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._processes: dict[str, PeerProcess] = {}  # of all that were met and not forgotten
        self._peers: dict[str, PeerInfo] = {}
        self._draining: set[str] = set()

    def meet(self, peer: PeerInfo) -> None:
        """A peer came, or came back: watch its process while it is certain which one that is."""
        if peer.engine_id not in self._processes:
            self._processes[peer.engine_id] = self._receiver.watch(peer)
        self._forget_loss(peer.engine_id)

    def add(self, peer: PeerInfo) -> None:
        self._peers[peer.engine_id] = peer

    def add_if_dead(self, peer: PeerInfo) -> bool:
        """Of a peer that no router says is gone."""
        if not self._is_dead(peer.engine_id):
            return False
        self.add(peer)
        return True

    def _forget_loss(self, engine_id: str) -> None:
        self._peers.pop(engine_id, None)
        self._draining.discard(engine_id)

    def tick(self, may_write: Container[str]) -> None:
        """Have the dead drained, forget who is quiet.

        Args:
            may_write: engine ids of those that blocks are held for.
        """
        for engine_id in list(self._peers):
            if engine_id not in may_write:
                self._forget_loss(engine_id)
                self._processes.pop(engine_id).close()
                self._receiver.disconnect(engine_id)
            elif engine_id not in self._draining and self._is_dead(engine_id):
                self._draining.add(engine_id)
                self._receiver.drain(engine_id)

    def is_drained(self, engine_id: str) -> bool:
        """Whether the end of a drain is of a peer that is still gone."""
        return engine_id in self._draining

    def _is_dead(self, engine_id: str) -> bool:
        """Whether a peer's process certainly has ended. Of another machine we cannot say."""
        return self._processes[engine_id].has_ended()
