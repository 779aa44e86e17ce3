"""Peers: the table of one end's peers, with the state of each peer.

    GREETING -> CONNECTED <-> SUSPECT        silent for 1 to 3 s, or unreachable; may return
        `----------`-------------`-> LEAVING -> gone

A peer becomes CONNECTED only after a probe has passed (`probe.py`). A sender sends Hello before the
probe, and Beat afterwards; a receiver answers both. An answer renews the sender's lease to write to
the peer's memory; the lease starts when the sender sent the answered beat. So a sender that was
stopped for a while finds its lease expired, even if answers have arrived meanwhile.

Refuses to know: requests. The owner's function ``is_busy`` returns whether writes to a peer are in
flight.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

from baton.processes.ticks import SOON, next_tick
from kvconnector.base import TransferEvent, TransferEventKind
from kvconnector.peer_info import PeerInfo
from kvconnector.protocol.actions import Connect, ConnectEnded, Disconnect, Send, SendEnded, Turn
from kvconnector.protocol.messages import Beat, Hello, Message, Start
from kvconnector.transports.paths import CMA_PATH, judge_path

logger = logging.getLogger(__name__)

BEAT_INTERVAL_S = 0.25
# A sender beats half as often to a peer without transfers that answered its last beat in time. Each
# wake of a resting process takes about 0.3 ms, because its data is in no cache.
REST_INTERVAL_S = 2 * BEAT_INTERVAL_S
AFTER_TICK_S = 0.02  # beats at rest are sent so many seconds after a shared tick
MAX_ALIGNED = 16  # beats to more peers are spread, so that one round does not last long
# Seconds of silence after which a peer becomes suspect, and seconds for which a lease is valid. A
# sender counts them from sending a beat, a receiver from the beat's arrival, so the sender's lease
# ends first.
LEASE_S = 4 * BEAT_INTERVAL_S
# Seconds of silence after which a peer without transfers becomes suspect
REST_LEASE_S = LEASE_S + BEAT_INTERVAL_S
# If a peer may be writing KV, a receiver suspects the peer only after this many seconds of silence:
# messages wait behind KV, for long if the link's rate has just fallen. The sender notices a lost
# receiver sooner.
RECEIVING_LEASE_S = 3 * LEASE_S
HELLO_INTERVAL_S = 0.05
HELLO_TIMEOUT_S = 10.0  # seconds after which a silent new peer is reported, and greeted less often
MAX_BACK_OFF_S = 1.0  # longest pause between two attempts to greet or reach a peer
# The KV in flight to a peer keeps the link busy for `ROUND_TRIPS` round trips plus this many
# seconds. The number is small, because a message waits behind this KV.
QUEUE_S = 0.002
ROUND_TRIPS = 2  # two, because `round_trip_s` is the shortest one, and most take longer
USUAL_ROUND_TRIP_S = 0.001  # until a round trip is measured, or where the transport measures none
MAX_ROUND_TRIP_S = 0.1
NUM_PIECES = 4  # number of pieces that bytes in flight are cut into, so that the link has no pauses
MIN_POSTED_BYTES = 2**16  # lower bound of `limit_bytes` for a slow link


class PeerState(Enum):
    """The states of a peer, as one end sees the peer."""

    GREETING = "GREETING"  # known, but no probe has passed yet
    CONNECTED = "CONNECTED"
    SUSPECT = "SUSPECT"  # reported as failed; may become CONNECTED again
    LEAVING = "LEAVING"  # the router has lost the peer; forgotten once no write to it is in flight


@dataclass(slots=True)
class Peer:
    """A peer, with the state of its connection and of its last probe.

    Attributes:
        path: name of the data path to the peer.
        alive_at: the latest time, on this node's clock, at which the peer was certainly alive.
        reached_at: when a write to the peer last ended, which shows that the peer reads. Messages
            may wait behind KV meanwhile. Only answers renew the lease.
        speak_at: time at which this end sends the next Hello or Beat.
        spoke_at: time at which this end sent its last Beat.
        is_late: whether the Beat before the last one was unanswered when the last one was sent.
        back_off_s: seconds until the next attempt to reconnect; doubles with each attempt.
        is_broken: whether the transport's connection to the peer has failed and must be replaced.
        num_reconnects: how often the connection was replaced.
        probe: number of the peer's next probe.
        is_probing: whether a probe runs; no Hello is sent until the probe ends.
        is_probed: whether the last probe passed.
        bandwidth_bytes_per_s: bandwidth that the last probe, or the last writes of KV, measured.
        round_trip_s: shortest recent round trip of the path, as the transport measures it.
        problem: the last problem with the peer that was reported.
        unreached: why the last attempt to reach the peer failed.
    """

    info: PeerInfo
    path: str
    report_at: float
    state: PeerState = PeerState.GREETING
    alive_at: float = -math.inf
    reached_at: float = -math.inf
    speak_at: float = -math.inf
    spoke_at: float = -math.inf
    is_late: bool = False
    reconnect_at: float = -math.inf
    back_off_s: float = HELLO_INTERVAL_S
    is_broken: bool = False
    num_reconnects: int = 0
    probe: int = 0
    is_probing: bool = False
    is_probed: bool = False
    bandwidth_bytes_per_s: float = 0.0
    round_trip_s: float = USUAL_ROUND_TRIP_S
    problem: str = ""
    unreached: str = ""

    @property
    def engine_id(self) -> str:
        return self.info.engine_id

    @property
    def is_expected(self) -> bool:
        """Return whether the peer can become CONNECTED, for the first time or again."""
        return self.state in (PeerState.GREETING, PeerState.SUSPECT)


class Peers:
    """The table of all peers of one end.

    Args:
        turn: current time and pending actions of the state machine.
        own: this node's peer info.
        greets: whether this end sends Hello and Beat (a sender); false: it answers them (a
            receiver).
        is_busy: returns whether writes to a peer are in flight; until they end, the peer's
            connection is kept.
        is_receiving: returns whether a peer may be writing to this node.
        is_used: returns whether a transfer to a peer is open; the peer then gets more beats.
        on_lost: called with the reason when a peer becomes suspect.

    Attributes:
        greets: whether this end sends Hello and Beat.
    """

    def __init__(
        self,
        turn: Turn,
        own: PeerInfo,
        *,
        greets: bool,
        is_busy: Callable[[str], bool] = lambda engine_id: False,
        is_receiving: Callable[[str], bool] = lambda engine_id: False,
        is_used: Callable[[str], bool] = lambda engine_id: False,
        on_lost: Callable[[str, str], None] = lambda engine_id, reason: None,
    ) -> None:
        self._turn = turn
        self._own = own
        self.greets = greets
        self._is_busy = is_busy
        self._is_receiving = is_receiving
        self._is_used = is_used
        self._on_lost = on_lost
        self._peers: dict[str, Peer] = {}
        self._probe_numbers = itertools.count(1)

    def __contains__(self, engine_id: object) -> bool:
        return engine_id in self._peers

    def __getitem__(self, engine_id: str) -> Peer:
        return self._peers[engine_id]

    def __len__(self) -> int:
        return len(self._peers)

    def __iter__(self) -> Iterator[Peer]:
        return iter(list(self._peers.values()))

    # ------------------------------------------------------------------ coming and going

    def meet(self, info: PeerInfo) -> None:
        """Connect to a peer, or greet a known peer again; report PEER_FAILED if connecting fails.

        An engine id has only one `PeerInfo`. A different `PeerInfo` with a known engine id is
        ignored.
        """
        if info.engine_id in self._peers and self._peers[info.engine_id].info != info:
            logger.warning("ignored a changed peer info of %s", info.engine_id)
            return
        self._turn.add_action(Connect(info))

    def take_connected(self, result: ConnectEnded) -> None:
        """Greet a connected peer, or send the action's message ``then``; report a failure."""
        info, then = result.action.peer, result.action.then
        known = self._peers.get(info.engine_id)
        if then is None and result.problem:
            self._report(info.engine_id, result.problem)
        elif then is None:
            self._peers[info.engine_id] = self._new_peer(info, result.path, known)
        elif known is not None and result.problem:  # connecting is tried again later
            logger.warning("cannot connect to %s: %s", info.engine_id, result.problem)
            self._lose_unreached(known)
        elif known is not None:
            known.is_broken, known.path = False, result.path
            known.num_reconnects += 1
            self._turn.add_action(then)

    def _new_peer(self, info: PeerInfo, path: str, known: Peer | None) -> Peer:
        report_at = self._turn.now + HELLO_TIMEOUT_S
        peer = Peer(info, path, report_at, probe=next(self._probe_numbers))
        if known is not None:
            peer.alive_at, peer.is_broken = known.alive_at, known.is_broken
            peer.is_probing, peer.num_reconnects = known.is_probing, known.num_reconnects
            # A receiver keeps the last probe's result: the sender decides whether to probe again
            if not self.greets:
                peer.is_probed, peer.path = known.is_probed, known.path
                peer.bandwidth_bytes_per_s = known.bandwidth_bytes_per_s
        return peer

    def leave(self, engine_id: str) -> None:
        """Set a peer's state to LEAVING, because the router has lost the peer.

        The owner calls `remove` once no write to the peer is in flight.
        """
        peer = self._peers.get(engine_id)
        if peer is not None:
            peer.state = PeerState.LEAVING

    def remove(self, engine_id: str) -> None:
        """Forget a peer, and disconnect from it."""
        self._peers.pop(engine_id, None)
        self._turn.add_action(Disconnect(engine_id))

    # ------------------------------------------------------------------ signs of life

    def note_alive(self, engine_id: str, at_s: float) -> None:
        """Note that a peer was alive at the time ``at_s`` on this node's clock."""
        peer = self._peers[engine_id]
        # The time comes from the network: do not trust a time in the future.
        if at_s <= self._turn.now:
            peer.alive_at = max(peer.alive_at, at_s)

    def renew(self, engine_id: str, sent_at_s: float) -> None:
        """Renew the lease to write to a peer that has answered a message sent at ``sent_at_s``."""
        self.note_alive(engine_id, sent_at_s)
        if self._is_fresh(self._peers[engine_id]):
            self.confirm(engine_id)

    def note_reached(self, engine_id: str) -> None:
        """Note that a write has reached a peer's memory."""
        if engine_id in self._peers:
            self._peers[engine_id].reached_at = self._turn.now

    def note_round_trip(self, engine_id: str, seconds: float) -> None:
        """Note the shortest recent round trip of the path to a peer; 0: unknown."""
        if seconds and engine_id in self._peers:
            self._peers[engine_id].round_trip_s = min(seconds, MAX_ROUND_TRIP_S)

    def confirm(self, engine_id: str) -> None:
        """Set a probed peer, which has just sent a message, to CONNECTED; report PEER_CONNECTED."""
        peer = self._peers[engine_id]
        if not peer.is_probed or not peer.is_expected:
            return
        peer.state = PeerState.CONNECTED
        peer.back_off_s = HELLO_INTERVAL_S
        peer.problem = ""
        self._turn.add_action(
            TransferEvent(
                kind=TransferEventKind.PEER_CONNECTED,
                engine_id=engine_id,
                transport=peer.path,
                bandwidth_bytes_per_s=peer.bandwidth_bytes_per_s,
            )
        )

    def try_begin_probe(self, engine_id: str, number: int) -> bool:
        """Mark a peer as being probed if it has answered the current Hello.

        Return whether a probe must start now.
        """
        peer = self._peers[engine_id]
        waits = peer.is_expected and self._is_fresh(peer)
        if not waits or peer.is_probing or peer.is_probed or peer.probe != number:
            return False
        peer.is_probing = True
        peer.probe = next(self._probe_numbers)
        return True

    def judge_path(self, engine_id: str, bandwidth_bytes_per_s: float) -> None:
        """Correct the path's name if a probe's bandwidth shows that the bytes took another path."""
        peer, own_host = self._peers[engine_id], self._own.host
        peer.path = judge_path(
            peer.path,
            on_this_host=peer.info.host == own_host != "",
            bandwidth_bytes_per_s=bandwidth_bytes_per_s,
        )

    def pass_probe(self, engine_id: str, path: str, bandwidth_bytes_per_s: float) -> None:
        """Record a probe that has passed, and set its peer to CONNECTED."""
        peer = self._peers[engine_id]
        peer.is_probed = True
        peer.path, peer.bandwidth_bytes_per_s = path, bandwidth_bytes_per_s
        self.confirm(engine_id)

    def end_probe(self, engine_id: str) -> None:
        """Note that a probe is over and none of its writes is in flight."""
        if engine_id in self._peers:
            self._peers[engine_id].is_probing = False

    def fail_probe(self, engine_id: str, problem: str) -> None:
        """Report why a probe failed, once per reason; the peer's next answer starts a new probe."""
        peer = self._peers.get(engine_id)
        if peer is None:
            return
        peer.is_probed = False
        if peer.state is not PeerState.LEAVING and peer.problem != problem:
            logger.warning("%s: %s", engine_id, problem)
            self._lose(peer, problem)

    def may_start(self, engine_id: str) -> bool:
        """Return whether a transfer to a peer may start."""
        peer = self._peers.get(engine_id)
        return peer is not None and peer.state in (PeerState.GREETING, PeerState.CONNECTED)

    def may_write(self, engine_id: str) -> bool:
        """Return whether the lease on a peer's memory is valid; set a silent peer to SUSPECT."""
        peer = self._peers.get(engine_id)
        if peer is None or not peer.is_probed:
            return False
        if self._is_fresh(peer):
            return True
        self._lose_if_silent(peer)
        return False

    def limit_bytes(self, engine_id: str, most_bytes: int) -> int:
        """Return how many bytes may be in flight to a peer at once, at most ``most_bytes``.

        With this limit, the link is always busy, and a message waits little longer than `QUEUE_S`.
        """
        peer = self._peers.get(engine_id)
        if peer is None or not peer.bandwidth_bytes_per_s or peer.path == CMA_PATH:
            return most_bytes
        seconds = ROUND_TRIPS * peer.round_trip_s + QUEUE_S
        return min(most_bytes, max(MIN_POSTED_BYTES, int(seconds * peer.bandwidth_bytes_per_s)))

    def piece_bytes(self, engine_id: str, most_bytes: int) -> int:
        """Return how many bytes one write to a peer may have, at most ``most_bytes``."""
        return min(most_bytes, self.limit_bytes(engine_id, NUM_PIECES * most_bytes) // NUM_PIECES)

    def rest_s(self) -> float:
        """Return the seconds until a beat is due, or a connected peer has been silent too long."""
        connected = [peer for peer in self if peer.state is PeerState.CONNECTED]
        leases = [peer.alive_at + self._most_silent_s(peer) for peer in connected]
        beats = [peer.speak_at for peer in self] if self.greets else []
        return max(0.0, min(leases + beats, default=math.inf) - self._turn.now)

    def tick(self) -> None:
        """Set silent peers to SUSPECT; send Hello and Beat when they are due."""
        for peer in self:
            self._lose_if_silent(peer)
            if self.greets:
                self._speak(peer)

    @property
    def is_meeting(self) -> bool:
        """Return whether a new peer may answer soon, so that the loop polls more often."""
        now = self._turn.now
        return any(p.state is PeerState.GREETING and now < p.report_at for p in self)

    @property
    def has_late_answers(self) -> bool:
        """Return whether a peer's answer to a beat is late, so that it must be read at once."""
        return any(peer.is_late for peer in self)

    def _speak(self, peer: Peer) -> None:
        now = self._turn.now
        if now < peer.speak_at or peer.state is PeerState.LEAVING or peer.is_probing:
            return
        if peer.state is PeerState.CONNECTED:
            peer.is_late, peer.spoke_at = peer.alive_at < peer.spoke_at, now
            peer.speak_at = now + self._pause_s(peer)
            self.send(peer.engine_id, Beat(engine_id=self._own.engine_id, sent_at_s=now))
            return
        if peer.state is PeerState.SUSPECT:
            peer.speak_at = now + self._next_back_off(peer)
        else:
            peer.speak_at = now + HELLO_INTERVAL_S
            if now >= peer.report_at:
                what = "no probe" if self._is_fresh(peer) else "no answer"
                why = f": {peer.unreached}" if peer.unreached else ""
                self._lose(peer, f"{what} in {HELLO_TIMEOUT_S:.0f} s{why}")
        hello = Hello(engine_id=self._own.engine_id, sent_at_s=now, test=peer.probe)
        self.send(peer.engine_id, hello)

    def _pause_s(self, peer: Peer) -> float:
        """Return the seconds from a beat to the next beat."""
        if peer.is_late or self._is_used(peer.engine_id):
            return BEAT_INTERVAL_S
        if len(self._peers) > MAX_ALIGNED:
            return REST_INTERVAL_S
        # Other threads of this process wake at the tick itself and would compete for the GIL
        now = self._turn.now - AFTER_TICK_S
        return next_tick(now, REST_INTERVAL_S, SOON) - now

    def is_fresh(self, engine_id: str) -> bool:
        """Return whether the lease of a peer in the table is valid."""
        return self._is_fresh(self._peers[engine_id])

    def _is_fresh(self, peer: Peer) -> bool:
        return self._turn.now - peer.alive_at < LEASE_S

    def _lose_if_silent(self, peer: Peer) -> None:
        if peer.state is not PeerState.CONNECTED or self._is_fresh(peer):
            return
        silent_s = self._turn.now - max(peer.alive_at, peer.reached_at)
        if silent_s >= self._most_silent_s(peer):
            self._lose(peer, f"no beat from {peer.engine_id} for {silent_s:.1f} s")

    def _most_silent_s(self, peer: Peer) -> float:
        """Return the seconds of silence after which a connected peer becomes suspect."""
        if self._is_receiving(peer.engine_id):
            return RECEIVING_LEASE_S
        return LEASE_S if self._is_used(peer.engine_id) else REST_LEASE_S

    def _lose(self, peer: Peer, reason: str) -> None:
        """Set a peer to SUSPECT, and report PEER_FAILED once."""
        peer.state = PeerState.SUSPECT
        peer.problem = reason
        if self.greets:  # greet the peer again, because a new probe must pass
            peer.is_probed = False
        self._report(peer.engine_id, reason)
        self._on_lost(peer.engine_id, reason)

    # ------------------------------------------------------------------ messages

    def send(self, engine_id: str, message: Message, *, wants_result: bool = False) -> bool:
        """Send a message; return False if the peer is unknown or cannot be reached.

        Args:
            wants_result: whether `SendEnded` follows also if the message was sent; after a failure,
                it always follows.

        A Beat is sent after each Start, to measure the round trip while both ends' loops are awake.
        """
        peer = self._peers.get(engine_id)
        if peer is None:
            return False
        if isinstance(message, Start):
            peer.speak_at = min(peer.speak_at, self._turn.now)
        action = Send(engine_id, message, wants_result)
        if peer.is_broken:
            return self._send_anew(peer, action)
        self._turn.add_action(action)
        return True

    def send_again(self, result: SendEnded) -> bool:
        """Send a message that failed again over a new connection; return False if impossible.

        The old connection is not used again: it stays broken even if the peer works again.
        """
        action = result.action
        logger.warning("cannot reach %s: %s", action.engine_id, result.problem)
        peer = self._peers.get(action.engine_id)
        if peer is None:
            return False
        peer.is_broken = True
        peer.unreached = result.problem
        return self._send_anew(peer, action)

    def _lose_unreached(self, peer: Peer) -> None:
        if peer.state is PeerState.CONNECTED:
            self._lose(peer, f"{peer.engine_id} cannot be reached")

    def _send_anew(self, peer: Peer, action: Send) -> bool:
        """Reconnect and send, unless the back-off pause is not over or writes are in flight.

        Writes in flight need the old connection; they end soon, because the peer's transfers fail.
        """
        now = self._turn.now
        if now < peer.reconnect_at or self._is_busy(peer.engine_id):
            self._lose_unreached(peer)
            return False
        peer.reconnect_at = now + self._next_back_off(peer)
        if self.greets and peer.state is PeerState.CONNECTED:
            # KV is sent only over connections on which a self-test has passed. A write that waits
            # for a connection could arrive when the peer has long freed the blocks (ADR 0140).
            self._lose(peer, f"the connection to {peer.engine_id} must be replaced")
        self._turn.add_action(Connect(peer.info, then=action))
        return True

    def _next_back_off(self, peer: Peer) -> float:
        back_off_s = peer.back_off_s
        peer.back_off_s = min(2 * back_off_s, MAX_BACK_OFF_S)
        return back_off_s

    def _report(self, engine_id: str, reason: str) -> None:
        self._turn.add_action(
            TransferEvent(kind=TransferEventKind.PEER_FAILED, engine_id=engine_id, reason=reason)
        )
