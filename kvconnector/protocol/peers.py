"""Peers: whom an end of the connector knows, and how each of them is. One state machine per peer.

    GREETING -> CONNECTED <-> SUSPECT        silent for 4 beats, or it cannot be reached; and back
        `----------`-------------`-> LEAVING -> gone

Nobody is connected, for the first time or again, before a self-test has passed (`self_test.py`).
A sender says Hello until then, and Beat from then on; a receiver answers both. A sender's lease to
write into a peer's memory is as old as the beat that was answered, by its own clock: a process
that stood still finds its lease run out, whatever has come into its queues meanwhile.

All of this runs on the I/O thread. Knows no request: who has something in flight says so.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

from baton.api.errors import TransferError
from kvconnector.base import TransferEvent, TransferEventKind
from kvconnector.peer_info import PeerInfo
from kvconnector.protocol import messages
from kvconnector.protocol.messages import Beat, Hello, Message
from kvconnector.protocol.seals import Channels
from kvconnector.transports.base import KVTransport
from kvconnector.transports.paths import judge_path

logger = logging.getLogger(__name__)

BEAT_INTERVAL_S = 0.25
# After so long without a sign a peer is suspect. It is the lease, too: a sender's is counted from
# when it sent a beat, a receiver's patience from when one came. So the sender gives up first.
LEASE_S = 4 * BEAT_INTERVAL_S
HELLO_INTERVAL_S = 0.05
HELLO_TIMEOUT_S = 10.0  # then a new peer is reported, and greeted less often
MAX_BACK_OFF_S = 1.0  # between two attempts to meet or reach a peer again


class PeerState(Enum):
    """How a peer is."""

    GREETING = "GREETING"  # learnt, not heard of yet
    CONNECTED = "CONNECTED"
    SUSPECT = "SUSPECT"  # reported as failed; it may come back
    LEAVING = "LEAVING"  # its router has lost it; forgotten when nothing is in flight to it


@dataclass(slots=True)
class Peer:
    """One peer.

    Attributes:
        path: name of the path that bytes take.
        alive_at: a moment of our clock at which it was alive.
        speak_at: when the next Hello or Beat is due.
        back_off_s: between attempts to meet or reach it again; doubled each time.
        is_broken: the transport's connection failed; it must be made anew.
        test: number of the next self-test with it.
        is_testing: one is running, and we say Hello when it is over.
        is_tested: the last one has passed.
        bandwidth_bytes_per_s: as that one measured it.
        problem: what was reported of it last.
        unreached: why it could not be reached when that was tried last.
    """

    info: PeerInfo
    path: str
    report_at: float
    state: PeerState = PeerState.GREETING
    alive_at: float = -math.inf
    speak_at: float = -math.inf
    reconnect_at: float = -math.inf
    back_off_s: float = HELLO_INTERVAL_S
    is_broken: bool = False
    test: int = 0
    is_testing: bool = False
    is_tested: bool = False
    bandwidth_bytes_per_s: float = 0.0
    problem: str = ""
    unreached: str = ""

    @property
    def engine_id(self) -> str:
        return self.info.engine_id


class Peers:
    """All peers of one end.

    Args:
        transport: that reaches them.
        emit: takes events about them.
        clock: seconds that never go back, also while this process stands still.
        greets: whether this end says Hello and Beat; the other one answers.
        is_busy: whether something posted to a peer is in flight; its connection must stay then.
        on_lost: called when a peer becomes suspect, with the reason.

    Attributes:
        own_id: engine id of this end.
        channels: with the keys shared with each of them.
    """

    def __init__(
        self,
        transport: KVTransport,
        emit: Callable[[TransferEvent], None],
        clock: Callable[[], float],
        *,
        greets: bool,
        is_busy: Callable[[str], bool],
        on_lost: Callable[[str, str], None],
    ) -> None:
        self._transport = transport
        self.own_id = transport.peer_info.engine_id
        self.channels = Channels(self.own_id)
        self._emit = emit
        self._clock = clock
        self._greets = greets
        self._is_busy = is_busy
        self._on_lost = on_lost
        self._peers: dict[str, Peer] = {}
        self._test_numbers = itertools.count(1)

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
        """Learn a peer, or greet a known one anew; PEER_FAILED if that cannot be.

        One process start has one `PeerInfo`: another one in a known peer's name changes nothing.
        """
        if info.engine_id in self._peers and self._peers[info.engine_id].info != info:
            logger.warning("%s is known, and otherwise than now presented", info.engine_id)
            return
        try:
            self.channels.learn(info, self._peers)
            path = self._transport.connect(info)
        except TransferError as error:
            self._report(info.engine_id, str(error))
            return
        peer = Peer(info, path, self._clock() + HELLO_TIMEOUT_S, test=next(self._test_numbers))
        known = self._peers.get(info.engine_id)
        if known is not None:
            peer.alive_at, peer.is_broken = known.alive_at, known.is_broken
            peer.is_testing = known.is_testing
            if not self._greets:  # the other end asks for a test if it wants one
                peer.is_tested, peer.path = known.is_tested, known.path
                peer.bandwidth_bytes_per_s = known.bandwidth_bytes_per_s
        self._peers[info.engine_id] = peer

    def leave(self, engine_id: str) -> None:
        """Its router has lost it, which does not mean that it is dead: `remove` it when quiet."""
        peer = self._peers.get(engine_id)
        if peer is not None:
            peer.state = PeerState.LEAVING

    def remove(self, engine_id: str) -> None:
        """Forget a peer."""
        self._peers.pop(engine_id, None)
        self._transport.disconnect(engine_id)

    # ------------------------------------------------------------------ signs of life

    def note_alive(self, engine_id: str, at_s: float) -> None:
        """A peer was alive at a moment of our clock; what is older than known changes nothing."""
        peer = self._peers[engine_id]
        if at_s <= self._clock():  # it comes from the network
            peer.alive_at = max(peer.alive_at, at_s)

    def renew(self, engine_id: str, sent_at_s: float) -> None:
        """A peer has answered what we sent at ``sent_at_s``: the lease counts from there."""
        self.note_alive(engine_id, sent_at_s)
        if self._is_fresh(self._peers[engine_id]):
            self.confirm(engine_id)

    def confirm(self, engine_id: str) -> None:
        """A peer has answered, or asked; if it was tested, it is connected, perhaps again."""
        peer = self._peers[engine_id]
        if not peer.is_tested or peer.state not in (PeerState.GREETING, PeerState.SUSPECT):
            return
        peer.state = PeerState.CONNECTED
        peer.back_off_s = HELLO_INTERVAL_S
        peer.problem = ""
        self._emit(
            TransferEvent(
                kind=TransferEventKind.PEER_CONNECTED,
                engine_id=engine_id,
                transport=peer.path,
                bandwidth_bytes_per_s=peer.bandwidth_bytes_per_s,
            )
        )

    def begin_test(self, engine_id: str, test: int) -> bool:
        """Whether a peer's answer to our Hello is what the next self-test with it waits for."""
        peer = self._peers[engine_id]
        waits = peer.state in (PeerState.GREETING, PeerState.SUSPECT) and self._is_fresh(peer)
        if not waits or peer.is_testing or peer.is_tested or peer.test != test:
            return False
        peer.is_testing = True
        peer.test = next(self._test_numbers)
        return True

    def judge_path(self, engine_id: str, bandwidth_bytes_per_s: float) -> None:
        """A self-test has measured the path to a peer, which may tell which it is."""
        peer, own_host = self._peers[engine_id], self._transport.peer_info.host
        peer.path = judge_path(
            peer.path,
            on_this_host=peer.info.host == own_host != "",
            bandwidth_bytes_per_s=bandwidth_bytes_per_s,
        )

    def pass_test(self, engine_id: str, path: str, bandwidth_bytes_per_s: float) -> None:
        """What was written has arrived: the peer is connected."""
        peer = self._peers[engine_id]
        peer.is_tested = True
        peer.path, peer.bandwidth_bytes_per_s = path, bandwidth_bytes_per_s
        self.confirm(engine_id)

    def end_test(self, engine_id: str) -> None:
        """It is over, and nothing that it has posted is in flight."""
        if engine_id in self._peers:
            self._peers[engine_id].is_testing = False

    def fail_test(self, engine_id: str, problem: str) -> None:
        """It has not, and why; said once. The peer is tested again when it answers again."""
        peer = self._peers.get(engine_id)
        if peer is None:
            return
        peer.is_tested = False
        if peer.state is not PeerState.LEAVING and peer.problem != problem:
            logger.warning("%s: %s", engine_id, problem)
            self._lose(peer, problem)

    def may_start(self, engine_id: str) -> bool:
        """Whether a new transfer to a peer makes sense."""
        peer = self._peers.get(engine_id)
        return peer is not None and peer.state in (PeerState.GREETING, PeerState.CONNECTED)

    def may_write(self, engine_id: str) -> bool:
        """Whether the lease of a peer's memory holds. If it has run out, the peer is suspect."""
        peer = self._peers.get(engine_id)
        if peer is None or not peer.is_tested:
            return False
        if self._is_fresh(peer):
            return True
        self._lose_if_silent(peer)
        return False

    def tick(self) -> None:
        """Suspect who is silent; say Hello and Beat when it is time."""
        for peer in self:
            self._lose_if_silent(peer)
            if self._greets:
                self._speak(peer)

    @property
    def is_meeting(self) -> bool:
        """Whether a new peer may answer any moment."""
        now = self._clock()
        return any(p.state is PeerState.GREETING and now < p.report_at for p in self)

    def _speak(self, peer: Peer) -> None:
        now = self._clock()
        if now < peer.speak_at or peer.state is PeerState.LEAVING or peer.is_testing:
            return
        if peer.state is PeerState.CONNECTED:
            peer.speak_at = now + BEAT_INTERVAL_S
            self.send(peer.engine_id, Beat(engine_id=self.own_id, sent_at_s=now))
            return
        if peer.state is PeerState.SUSPECT:
            peer.speak_at = now + self._next_back_off(peer)
        else:
            peer.speak_at = now + HELLO_INTERVAL_S
            if now >= peer.report_at:
                what = "no self-test" if self._is_fresh(peer) else "no answer"
                why = f": {peer.unreached}" if peer.unreached else ""
                self._lose(peer, f"{what} in {HELLO_TIMEOUT_S:.0f} s{why}")
        self._notify(peer, Hello(engine_id=self.own_id, sent_at_s=now, test=peer.test))

    def is_fresh(self, engine_id: str) -> bool:
        """Whether a known peer was alive a moment ago."""
        return self._is_fresh(self._peers[engine_id])

    def _is_fresh(self, peer: Peer) -> bool:
        return self._clock() - peer.alive_at < LEASE_S

    def _lose_if_silent(self, peer: Peer) -> None:
        if peer.state is PeerState.CONNECTED and not self._is_fresh(peer):
            silent_s = self._clock() - peer.alive_at
            self._lose(peer, f"no beat of {peer.engine_id} for {silent_s:.1f} s")

    def _lose(self, peer: Peer, reason: str) -> None:
        """Say once that a peer is not there."""
        peer.state = PeerState.SUSPECT
        peer.problem = reason
        if self._greets:  # the other end believes beats again until it is asked for a test
            peer.is_tested = False
        self._report(peer.engine_id, reason)
        self._on_lost(peer.engine_id, reason)

    # ------------------------------------------------------------------ messages

    def send(self, engine_id: str, message: Message) -> bool:
        """Send a message; False when the peer cannot be reached, which is said once."""
        peer = self._peers.get(engine_id)
        if peer is None:
            return False
        if self._notify(peer, message):
            return True
        if peer.state is PeerState.CONNECTED:
            self._lose(peer, f"{engine_id} cannot be reached")
        return False

    def _notify(self, peer: Peer, message: Message) -> bool:
        payload = self.channels[peer.engine_id].seal(messages.encode(message))
        for _ in range(2):  # a connection that failed stays failed; the peer may be well
            if peer.is_broken and not self._reconnect(peer):
                return False
            try:
                self._transport.notify(peer.engine_id, payload)
            except TransferError as error:
                logger.warning("cannot reach %s: %s", peer.engine_id, error)
                peer.is_broken = True
                peer.unreached = str(error)
            else:
                return True
        return False

    def _reconnect(self, peer: Peer) -> bool:
        """Connect anew, unless it was tried just now or something is in flight.

        Writes in flight use the connection: they end first, as this peer's transfers fail.
        """
        now = self._clock()
        if now < peer.reconnect_at or self._is_busy(peer.engine_id):
            return False
        peer.reconnect_at = now + self._next_back_off(peer)
        try:
            self._transport.disconnect(peer.engine_id)
            peer.path = self._transport.connect(peer.info)
        except TransferError as error:
            logger.warning("cannot connect to %s: %s", peer.engine_id, error)
            return False
        peer.is_broken = False
        return True

    def _next_back_off(self, peer: Peer) -> float:
        back_off_s = peer.back_off_s
        peer.back_off_s = min(2 * back_off_s, MAX_BACK_OFF_S)
        return back_off_s

    def _report(self, engine_id: str, reason: str) -> None:
        self._emit(
            TransferEvent(kind=TransferEventKind.PEER_FAILED, engine_id=engine_id, reason=reason)
        )
