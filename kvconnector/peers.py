"""Peers: whom an end of the connector knows, and how each of them is. One state machine per peer.

    GREETING -> CONNECTED        it has answered (to a sender) or asked (a receiver)
        ^----------'             it cannot be reached; greeted again, less often
    any      -> LEAVING -> gone  its router has lost it; forgotten when nothing is in flight to it

All of this runs on the I/O thread. Knows no request: who has something in flight says so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

from baton.errors import TransferError
from kvconnector import messages
from kvconnector.base import KVTransport, TransferEvent, TransferEventKind
from kvconnector.messages import Hello, Message
from kvconnector.peer_info import PeerInfo

logger = logging.getLogger(__name__)

HELLO_INTERVAL_S = 0.05
HELLO_TIMEOUT_S = 10.0  # then it is reported, and greeted less often
SLOW_HELLO_INTERVAL_S = 1.0


class PeerState(Enum):
    """How a peer is."""

    GREETING = "GREETING"
    CONNECTED = "CONNECTED"
    LEAVING = "LEAVING"


@dataclass(slots=True)
class Peer:
    """One peer.

    Attributes:
        path: name of the path that bytes take.
        is_reported: that it does not answer was said already.
    """

    info: PeerInfo
    path: str
    report_at: float
    state: PeerState = PeerState.GREETING
    next_hello_at: float = 0.0
    is_reported: bool = False


class Peers:
    """All peers of one end.

    Args:
        transport: that reaches them.
        emit: takes events about them.
        clock: seconds that never go back.
        greets: whether this end says Hello; the other one waits for it.
    """

    def __init__(
        self,
        transport: KVTransport,
        emit: Callable[[TransferEvent], None],
        clock: Callable[[], float],
        *,
        greets: bool,
    ) -> None:
        self._transport = transport
        self._engine_id = transport.peer_info.engine_id
        self._emit = emit
        self._clock = clock
        self._greets = greets
        self._peers: dict[str, Peer] = {}

    def __contains__(self, engine_id: str) -> bool:
        return engine_id in self._peers

    def __getitem__(self, engine_id: str) -> Peer:
        return self._peers[engine_id]

    def __len__(self) -> int:
        return len(self._peers)

    def __iter__(self) -> Iterator[Peer]:
        return iter(list(self._peers.values()))

    # ------------------------------------------------------------------ coming and going

    def add(self, info: PeerInfo) -> None:
        """Learn a peer, or greet a known one anew; PEER_FAILED if the transport cannot."""
        try:
            path = self._transport.connect(info)
        except TransferError as error:
            self._report(info.engine_id, str(error))
            return
        self._peers[info.engine_id] = Peer(info, path, self._clock() + HELLO_TIMEOUT_S)

    def leave(self, engine_id: str) -> None:
        """Its router has lost it, which does not mean that it is dead: `remove` it when quiet."""
        peer = self._peers.get(engine_id)
        if peer is not None:
            peer.state = PeerState.LEAVING

    def remove(self, engine_id: str) -> None:
        """Forget a peer."""
        self._peers.pop(engine_id, None)
        self._transport.disconnect(engine_id)

    def confirm(self, engine_id: str) -> None:
        """A peer has answered, or asked."""
        peer = self._peers[engine_id]
        if peer.state is not PeerState.GREETING:
            return
        peer.state = PeerState.CONNECTED
        self._emit(
            TransferEvent(
                kind=TransferEventKind.PEER_CONNECTED, engine_id=engine_id, transport=peer.path
            )
        )

    # ------------------------------------------------------------------ messages

    def send(self, engine_id: str, message: Message) -> bool:
        """Send a message; False when the peer cannot be reached, which is said once."""
        peer = self._peers.get(engine_id)
        if peer is None:
            return False
        if self._notify(peer, message):
            return True
        if peer.state is PeerState.CONNECTED:
            peer.state, peer.is_reported = PeerState.GREETING, True
            self._report(engine_id, "it cannot be reached")
        return False

    def greet(self) -> None:
        """Say Hello to those who have not answered yet, when it is time."""
        if not self._greets:
            return
        now = self._clock()
        for engine_id, peer in self._peers.items():
            if peer.state is not PeerState.GREETING or now < peer.next_hello_at:
                continue
            interval_s = SLOW_HELLO_INTERVAL_S if peer.is_reported else HELLO_INTERVAL_S
            peer.next_hello_at = now + interval_s
            self._notify(peer, Hello(engine_id=self._engine_id))
            if now > peer.report_at and not peer.is_reported:
                peer.is_reported = True
                self._report(engine_id, f"no answer in {HELLO_TIMEOUT_S:.0f} s")

    @property
    def is_meeting(self) -> bool:
        """Whether a peer was greeted lately that may answer any moment."""
        return any(p.state is PeerState.GREETING and not p.is_reported for p in self)

    def _notify(self, peer: Peer, message: Message) -> bool:
        payload = messages.encode(message)
        engine_id = peer.info.engine_id
        try:
            self._transport.notify(engine_id, payload)
        except TransferError:
            # A connection that failed stays failed; the peer may be well.
            try:
                self._transport.disconnect(engine_id)
                peer.path = self._transport.connect(peer.info)
                self._transport.notify(engine_id, payload)
            except TransferError as error:
                logger.warning("cannot reach %s: %s", engine_id, error)
                return False
        return True

    def _report(self, engine_id: str, reason: str) -> None:
        self._emit(
            TransferEvent(kind=TransferEventKind.PEER_FAILED, engine_id=engine_id, reason=reason)
        )
