"""Probe: tests, before the first KV is sent, whether written bytes reach a peer, and how fast.

    prefill node                     decode node
    Hello (test 7)          ->       clears a slot of its scratch memory, if one is free
                            <-       HelloAck (test 7, slot 2)
    write once; then repeatedly, within limits of time and bytes, to measure bandwidth
    SelfTest (7, digest)    ->       compares; repeated until answered
                            <-       SelfTestResult (7, problem)

Each round of the I/O loop writes only a little of a probe, so that KV for other peers is not
delayed. Posted writes cannot be cancelled, so an abandoned probe lasts until its writes have ended.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

from baton.telemetry.rates import format_rate
from kvconnector.peer_info import NUM_SLOTS, PeerInfo
from kvconnector.protocol.actions import (
    LendSlot,
    ProbePosted,
    ReadSlot,
    SlotRead,
    Turn,
    WriteEnded,
    WriteProbe,
)
from kvconnector.protocol.messages import HelloAck, SelfTest, SelfTestResult
from kvconnector.protocol.peers import Peers, PeerState

logger = logging.getLogger(__name__)

TIMEOUT_S = 3.0
OFFER_S = 2 * TIMEOUT_S  # seconds after which a slot is free again, even if its peer is silent
FORGOTTEN = "the peer has forgotten the self-test"
REPEAT_S = 0.05  # seconds between repeats of an unanswered SelfTest
# Limits on a bandwidth measurement: the number of writes, and the seconds spent posting them. The
# measured bandwidth of a slow path is right. If the I/O thread cannot post fast enough to fill the
# path, the measured bandwidth is a lower bound.
MAX_TIMED_WRITES = 32
TIMED_S = 0.02
MAX_POSTED = 16
# On a slow link, fewer writes are in flight, so that the probe keeps other messages waiting for at
# most this many seconds.
FILLED_S = 0.75
# If the first write takes longer than this many seconds, a second write could end after the
# receiver has offered the slot to another sender. The first write then gives the bandwidth.
MAX_FIRST_S = 2.6
MARGIN_S = 0.5  # seconds before `OFFER_S` after which a probe is abandoned
ROUND_S = 0.001  # maximum seconds of posting per round; posting may copy bytes; other peers wait


@dataclass(slots=True)
class _Probe:
    """A probe that the sender has begun, with the peer's slot that it writes to.

    Attributes:
        num_reconnects: how often the connection to the peer had been replaced before the probe.
        num_in_flight: number of posted writes that are not complete.
        timed_from: when the first write was complete. The bandwidth is measured from then on,
            because the first write also sets up the connection, and either process may be busy
            meanwhile. On very slow links, the first write itself is measured.
        max_in_flight: number of writes that may be in flight at once.
        num_posted: number of posted writes, including the first.
        bandwidth_bytes_per_s: measured bandwidth; 0 until all writes are complete.
        say_at: time of the next SelfTest message.
        is_over: whether the probe was answered or abandoned; its writes may still be in flight.
    """

    number: int
    slot: int
    began_at: float
    num_reconnects: int
    num_in_flight: int = 0
    timed_from: float | None = None
    max_in_flight: int = MAX_POSTED
    num_posted: int = 0
    bandwidth_bytes_per_s: float = 0.0
    duration_s: float = 0.0
    say_at: float = -math.inf
    is_over: bool = False

    @property
    def give_up_at(self) -> float:
        """Return when the probe is abandoned; after a slow first write, this is later."""
        is_slow = self.timed_from is not None and self.timed_from > self.began_at + FILLED_S
        return self.began_at + (OFFER_S - MARGIN_S if is_slow else TIMEOUT_S)


class Probes:
    """The sender's probes; each peer has at most one at a time.

    Args:
        turn: current time and pending actions of the state machine.
        own: this node's peer info.
        peers: table of peers, which records the outcome.
        digest: digest of the pattern that probes write.
    """

    def __init__(self, turn: Turn, own: PeerInfo, peers: Peers, digest: bytes) -> None:
        self._turn = turn
        self._own = own
        self._peers = peers
        self._digest = digest
        self._probes: dict[str, _Probe] = {}

    def __len__(self) -> int:
        return len(self._probes)

    def has_writes(self, engine_id: str) -> bool:
        """Return whether probe writes to a peer are in flight."""
        probe = self._probes.get(engine_id)
        return probe is not None and probe.num_in_flight > 0

    @property
    def is_writing(self) -> bool:
        """Return whether any probe write is in flight."""
        return any(probe.num_in_flight for probe in self._probes.values())

    def start_on_ack(self, ack: HelloAck) -> None:
        """Start a probe if a peer answered this end's Hello with a free slot."""
        peer_id, slot = ack.engine_id, ack.slot
        if slot is not None and slot < NUM_SLOTS and self._peers.try_begin_probe(peer_id, ack.test):
            num_reconnects = self._peers[peer_id].num_reconnects
            self._probes[peer_id] = _Probe(ack.test, slot, self._turn.now, num_reconnects)

    def on_result(self, result: SelfTestResult) -> None:
        """Handle the peer's result of a probe that this end began."""
        peer_id = result.engine_id
        probe = self._probes.get(peer_id)
        if probe is None or probe.is_over or probe.number != result.test:
            return
        if result.problem:
            self._fail(peer_id, probe, result.problem)
        # KV is sent only over connections on which a self-test's bytes were sent (ADR 0140).
        elif self._peers[peer_id].num_reconnects != probe.num_reconnects:
            self._fail(peer_id, probe, "the connection was replaced during the self-test")
        # Without a valid lease, the result does not count, and SelfTest is repeated.
        elif self._peers.is_fresh(peer_id):
            probe.is_over = True
            path = self._peers[peer_id].path
            log_passed(peer_id, path, probe.bandwidth_bytes_per_s, probe.duration_s)
            self._peers.pass_probe(peer_id, path, probe.bandwidth_bytes_per_s)

    def take_posted(self, result: ProbePosted) -> None:
        """Count the writes of a probe that the I/O loop has posted."""
        peer_id = result.action.engine_id
        probe = self._probes[peer_id]
        probe.num_in_flight += result.num_writes
        probe.num_posted += result.num_writes
        if result.problem:
            self._fail(peer_id, probe, f"the self-test's write failed: {result.problem}")

    def take_ended(self, result: WriteEnded) -> None:
        """Note that a write of a probe has ended."""
        probe = self._probes[result.engine_id]
        probe.num_in_flight -= 1
        if result.problem:
            self._fail(result.engine_id, probe, f"the self-test's write failed: {result.problem}")

    def tick(self) -> None:
        """Post writes, repeat questions to peers, and abandon probes that take too long."""
        for peer_id, probe in list(self._probes.items()):
            if not probe.is_over:
                self._continue_probe(peer_id, probe)
            if probe.is_over and not probe.num_in_flight:
                del self._probes[peer_id]
                self._peers.end_probe(peer_id)

    def _continue_probe(self, peer_id: str, probe: _Probe) -> None:
        if peer_id not in self._peers or self._peers[peer_id].state is PeerState.LEAVING:
            self._fail(peer_id, probe, "the peer is gone")
        elif self._turn.now >= probe.give_up_at:
            part = "answer to" if probe.bandwidth_bytes_per_s else "end of the writes of"
            seconds = probe.give_up_at - probe.began_at
            self._fail(peer_id, probe, f"no {part} the self-test in {seconds:.3g} s")
        elif probe.bandwidth_bytes_per_s:
            self._ask_peer(peer_id, probe)
        else:
            self._write(peer_id, probe)

    def _write(self, peer_id: str, probe: _Probe) -> None:
        """Post a probe's next writes, or compute the bandwidth once all writes are complete."""
        now = self._turn.now
        if probe.num_posted == 0:
            self._turn.add_action(WriteProbe(peer_id, probe.slot))
            return
        if probe.timed_from is None:
            if probe.num_in_flight:
                return
            probe.timed_from = now
            first_s = now - probe.began_at
            if first_s > MAX_FIRST_S:
                self._note_bandwidth(peer_id, probe, 1, first_s)
                return
            probe.max_in_flight = max(1, min(MAX_POSTED, int(FILLED_S / max(first_s, 1e-6))))
        num_timed, left_s = probe.num_posted - 1, probe.timed_from + TIMED_S - now
        room = min(MAX_TIMED_WRITES - num_timed, probe.max_in_flight - probe.num_in_flight)
        if num_timed == 0 or (room > 0 and left_s > 0):
            self._turn.add_action(WriteProbe(peer_id, probe.slot, room, min(left_s, ROUND_S)))
        elif not probe.num_in_flight:
            self._note_bandwidth(peer_id, probe, num_timed, now - probe.timed_from)

    def _note_bandwidth(self, peer_id: str, probe: _Probe, num_writes: int, seconds: float) -> None:
        """Compute the bandwidth from the time that some writes took."""
        num_ranks = len(self._peers[peer_id].info.ranks)  # each write fills one slot per rank
        num_bytes = num_writes * num_ranks * (self._own.scratch_bytes // (1 + NUM_SLOTS))
        probe.bandwidth_bytes_per_s = num_bytes / max(seconds, 1e-6)
        probe.duration_s = self._turn.now - probe.began_at
        self._peers.judge_path(peer_id, probe.bandwidth_bytes_per_s)

    def _ask_peer(self, peer_id: str, probe: _Probe) -> None:
        """Ask the peer to check its slot; repeat the question at intervals, as it may be lost."""
        now = self._turn.now
        if now < probe.say_at:
            return
        probe.say_at = now + REPEAT_S
        message = SelfTest(
            engine_id=self._own.engine_id,
            test=probe.number,
            digest=self._digest,
            transport=self._peers[peer_id].path,
            bandwidth_bytes_per_s=probe.bandwidth_bytes_per_s,
            duration_s=probe.duration_s,
            sent_at_s=now,
        )
        self._peers.send(peer_id, message)

    def _fail(self, peer_id: str, probe: _Probe, problem: str) -> None:
        if not probe.is_over:
            probe.is_over = True
            self._peers.fail_probe(peer_id, problem)


@dataclass(slots=True)
class _Offer:
    """The last probe for which this end offered a slot to a peer.

    Attributes:
        slot: the slot that the peer may write to; None: the slot is no longer the peer's.
        seen: the message that says that the peer has written; None: not received yet.
        problem: fault of the bytes; empty: the bytes are right; None: they are not checked yet.
    """

    number: int
    slot: int | None
    made_at: float
    seen: SelfTest | None = None
    problem: str | None = None


class ProbeSlots:
    """The receiver's end of probes: offers slots to peers, and checks the bytes in the slots.

    Args:
        turn: current time and pending actions of the state machine.
        own: this node's peer info.
        peers: table of peers, which records the outcome.
    """

    def __init__(self, turn: Turn, own: PeerInfo, peers: Peers) -> None:
        self._turn = turn
        self._own = own
        self._peers = peers
        self._offers: dict[str, _Offer] = {}

    @property
    def is_lent(self) -> bool:
        """Return whether any peer may write to a slot now."""
        return any(offer.slot is not None for offer in self._offers.values())

    def offer(self, engine_id: str, number: int) -> int | None:
        """Return a slot for a peer's probe; None if no slot is free, or the probe is old."""
        known = self._offers.get(engine_id)
        if known is not None and number <= known.number:
            return known.slot if number == known.number else None
        if known is not None:
            # The old slot is free: a peer starts a new test only after its old writes have ended
            known.slot = None
        taken = {offer.slot for offer in self._offers.values()}
        slot = next((slot for slot in range(NUM_SLOTS) if slot not in taken), None)
        if slot is not None:
            self._turn.add_action(LendSlot(slot, engine_id))
            self._offers[engine_id] = _Offer(number, slot, self._turn.now)
        return slot

    def read_slot(self, message: SelfTest) -> None:
        """Read the peer's slot if it was offered for this probe; send a known result again.

        If this end has forgotten the peer during the probe, the peer must begin a new probe.
        """
        offer = self._offers.get(message.engine_id)
        if offer is None:
            forgotten = _Offer(message.test, None, self._turn.now, problem=FORGOTTEN)
            self._answer(forgotten, message)
            return
        if offer.number != message.test:
            return
        if offer.slot is not None:
            offer.seen = message
            self._turn.add_action(ReadSlot(offer.slot, message.engine_id))
            offer.slot = None
        elif offer.problem is not None:
            self._answer(offer, message)

    def check_slot(self, result: SlotRead) -> None:
        """Set a peer whose bytes are right to CONNECTED, and send the result to the peer."""
        offer = self._offers.get(result.action.engine_id)
        if offer is None or offer.seen is None:
            return
        message, peer_id = offer.seen, result.action.engine_id
        if result.digest != message.digest:
            offer.problem = f"the self-test's bytes over {message.transport} arrived wrong"
            self._peers.fail_probe(peer_id, offer.problem)
        else:
            offer.problem = ""
            rate = message.bandwidth_bytes_per_s
            if not 0 <= rate < math.inf:  # the bandwidth comes from the network and is not trusted
                rate = 0.0
            log_passed(peer_id, message.transport, rate, message.duration_s)
            self._peers.pass_probe(peer_id, message.transport, rate)
        self._answer(offer, message)

    def _answer(self, offer: _Offer, message: SelfTest) -> None:
        result = SelfTestResult(
            engine_id=self._own.engine_id,
            test=message.test,
            problem=offer.problem or "",
            sent_at_s=message.sent_at_s,
        )
        self._peers.send(message.engine_id, result)

    def tick(self) -> None:
        """Take back slots that were offered too long ago."""
        for engine_id, offer in list(self._offers.items()):
            if offer.slot is not None and self._turn.now >= offer.made_at + OFFER_S:
                del self._offers[engine_id]

    def forget(self, engine_id: str) -> None:
        """Forget a peer and its slot.

        Late writes of this peer can disturb another peer's probe, but cannot damage KV.
        """
        self._offers.pop(engine_id, None)


def log_passed(engine_id: str, path: str, bandwidth_bytes_per_s: float, duration_s: float) -> None:
    logger.info(
        "self-test with %s passed: %s, %s, in %.0f ms",
        engine_id,
        path,
        format_rate(bandwidth_bytes_per_s),
        duration_s * 1e3,
    )
