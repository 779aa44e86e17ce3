"""Self-test: whether bytes written to a peer arrive there, and how fast, before any KV is.

    P                                D
    Hello (test 7)          ->       clears a slot of its scratch memory, if one is free
                            <-       HelloAck (test 7, slot 2)
    write, once; then again and again while time and bytes last: the bandwidth
    SelfTest (7, digest)    ->       compares; repeated until it is answered
                            <-       SelfTestResult (7, problem)

All of it runs on the I/O threads, a little in each round, so that other peers' KV goes on. Posted
writes cannot be called back: a test that was given up is over when they have ended.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from baton.api.errors import TransferError
from baton.telemetry.rates import format_rate
from kvconnector.protocol.messages import HelloAck, SelfTest, SelfTestResult
from kvconnector.protocol.peers import Peers, PeerState
from kvconnector.transports.base import KVTransport, PendingWrite
from kvconnector.transports.scratch import NUM_SLOTS, Scratch

logger = logging.getLogger(__name__)

TIMEOUT_S = 3.0
OFFER_S = 2 * TIMEOUT_S  # then a slot is free again, whatever has become of its peer
REPEAT_S = 0.05  # of an unanswered SelfTest
# The bandwidth is that of so many writes, or of as many as are posted in so long: a good estimate
# of a slow path and a lower bound of a very fast one, which the I/O thread's rounds cannot fill.
MAX_TIMED_WRITES = 32
TIMED_S = 0.02
MAX_POSTED = 16
ROUND_S = 0.001  # of posting, where posting copies; then other peers have their turn


@dataclass(slots=True)
class _Test:
    """One self-test of the sender.

    Attributes:
        writes: posted and not known to be complete.
        timed_from: when the first write was complete, which sets up the connection.
        num_posted: writes, with the first.
        bandwidth_bytes_per_s: 0 until all writes are complete.
        is_over: answered or given up; it waits for its writes.
    """

    number: int
    slot: int
    began_at: float
    writes: deque[PendingWrite] = field(default_factory=deque)
    timed_from: float | None = None
    num_posted: int = 0
    bandwidth_bytes_per_s: float = 0.0
    duration_s: float = 0.0
    say_at: float = -math.inf
    is_over: bool = False


class SelfTests:
    """The sender's end: at most one test per peer at a time.

    Args:
        transport: that is tested.
        peers: hear of the outcome.
        clock: seconds that never go back.
    """

    def __init__(self, transport: KVTransport, peers: Peers, clock: Callable[[], float]) -> None:
        self._transport = transport
        self._peers = peers
        self._clock = clock
        self._tests: dict[str, _Test] = {}

    def __len__(self) -> int:
        return len(self._tests)

    def has_writes(self, engine_id: str) -> bool:
        """Whether something posted to a peer is in flight."""
        test = self._tests.get(engine_id)
        return test is not None and bool(test.writes)

    def begin(self, ack: HelloAck) -> None:
        """A peer has answered Hello; with a slot, if it is our turn."""
        peer_id, slot = ack.engine_id, ack.slot
        if slot is not None and slot < NUM_SLOTS and self._peers.begin_test(peer_id, ack.test):
            self._tests[peer_id] = _Test(ack.test, slot, self._clock())

    def end(self, result: SelfTestResult) -> None:
        """A peer says what it found."""
        peer_id = result.engine_id
        test = self._tests.get(peer_id)
        if test is None or test.is_over or test.number != result.test:
            return
        if result.problem:
            self._fail(peer_id, test, result.problem)
        elif self._peers.is_fresh(peer_id):  # else it is asked again: the answer was slow
            test.is_over = True
            path = self._peers[peer_id].path
            log_passed(peer_id, path, test.bandwidth_bytes_per_s, test.duration_s)
            self._peers.pass_test(peer_id, path, test.bandwidth_bytes_per_s)

    def progress(self) -> bool:
        """Go on with all tests; returns whether any write is in flight or to be posted."""
        for peer_id, test in list(self._tests.items()):
            self._settle(peer_id, test)
            if not test.is_over:
                self._go_on(peer_id, test)
            if test.is_over and not test.writes:
                del self._tests[peer_id]
                self._peers.end_test(peer_id)
        return any(test.writes for test in self._tests.values())

    def _settle(self, peer_id: str, test: _Test) -> None:
        """Take complete writes off."""
        while test.writes:
            try:
                if not test.writes[0].is_done():
                    return
            except TransferError as error:
                self._fail(peer_id, test, f"the self-test's write failed: {error}")
            test.writes.popleft()

    def _go_on(self, peer_id: str, test: _Test) -> None:
        now = self._clock()
        if peer_id not in self._peers or self._peers[peer_id].state is PeerState.LEAVING:
            self._fail(peer_id, test, "it is gone")
        elif now >= test.began_at + TIMEOUT_S:
            part = "answer to" if test.bandwidth_bytes_per_s else "end of the writes of"
            self._fail(peer_id, test, f"no {part} the self-test in {TIMEOUT_S:.0f} s")
        elif test.bandwidth_bytes_per_s:
            self._say(peer_id, test)
        else:
            try:
                self._write(peer_id, test)
            except (TransferError, ValueError) as error:
                self._fail(peer_id, test, f"the self-test's write failed: {error}")

    def _write(self, peer_id: str, test: _Test) -> None:
        """Post what there is room for, or note that all is complete."""
        now = self._clock()
        if test.num_posted == 0:
            self._post(peer_id, test)
            return
        if test.timed_from is None:
            if test.writes:
                return
            test.timed_from = now
        while self._may_post(test, test.timed_from, now):
            self._post(peer_id, test)
        if not test.writes:
            num_bytes = (test.num_posted - 1) * self._transport.scratch.layout.block_bytes
            test.bandwidth_bytes_per_s = num_bytes / max(now - test.timed_from, 1e-6)
            test.duration_s = now - test.began_at
            self._peers.judge_path(peer_id, test.bandwidth_bytes_per_s)

    def _may_post(self, test: _Test, timed_from: float, round_from: float) -> bool:
        now, num_timed = self._clock(), test.num_posted - 1
        if num_timed == 0:
            return True
        has_room = num_timed < MAX_TIMED_WRITES and len(test.writes) < MAX_POSTED
        return has_room and now - timed_from < TIMED_S and now - round_from < ROUND_S

    def _post(self, peer_id: str, test: _Test) -> None:
        test.writes.append(self._transport.write_scratch(peer_id, test.slot))
        test.num_posted += 1

    def _say(self, peer_id: str, test: _Test) -> None:
        """Tell the peer to look, again and again: messages can be lost."""
        now = self._clock()
        if now < test.say_at:
            return
        test.say_at = now + REPEAT_S
        message = SelfTest(
            engine_id=self._transport.peer_info.engine_id,
            test=test.number,
            digest=self._transport.scratch.digest,
            transport=self._peers[peer_id].path,
            bandwidth_bytes_per_s=test.bandwidth_bytes_per_s,
            duration_s=test.duration_s,
            sent_at_s=now,
        )
        self._peers.send(peer_id, message)

    def _fail(self, peer_id: str, test: _Test, problem: str) -> None:
        if not test.is_over:
            test.is_over = True
            self._peers.fail_test(peer_id, problem)


@dataclass(slots=True)
class _Offer:
    """The last self-test of one peer.

    Attributes:
        slot: that it may write to; None: it has been judged.
        problem: with what it found; None before.
    """

    test: int
    slot: int | None
    made_at: float
    problem: str | None = None


class TestSlots:
    """The receiver's end: which peer may write where, and whether it is right.

    Args:
        scratch: that they write to.
        peers: hear of the outcome.
        clock: seconds that never go back.
    """

    __test__ = False  # pytest: not a test

    def __init__(self, scratch: Scratch, peers: Peers, clock: Callable[[], float]) -> None:
        self._scratch = scratch
        self._peers = peers
        self._clock = clock
        self._offers: dict[str, _Offer] = {}

    def offer(self, engine_id: str, test: int) -> int | None:
        """The slot for a peer's self-test; None: none is free, or the test is not a new one."""
        known = self._offers.get(engine_id)
        if known is not None and test <= known.test:
            return known.slot if test == known.test else None
        if known is not None:
            known.slot = None  # its writes have ended, or it would not begin another
        taken = {offer.slot for offer in self._offers.values()}
        slot = next((slot for slot in range(NUM_SLOTS) if slot not in taken), None)
        if slot is not None:
            self._scratch.lend(slot, engine_id)
            self._offers[engine_id] = _Offer(test, slot, self._clock())
        return slot

    def judge(self, message: SelfTest) -> SelfTestResult | None:
        """Look at what a peer has written; None: that test is not the one it was offered."""
        peer_id = message.engine_id
        offer = self._offers.get(peer_id)
        if offer is None or offer.test != message.test:
            return None
        if offer.slot is not None:
            self._look(offer, offer.slot, message)
        if offer.problem is None:
            return None
        return SelfTestResult(
            engine_id=self._peers.own_id,
            test=message.test,
            problem=offer.problem,
            sent_at_s=message.sent_at_s,
        )

    def _look(self, offer: _Offer, slot: int, message: SelfTest) -> None:
        peer_id = message.engine_id
        offer.slot = None
        if self._scratch.digest_of(slot) != message.digest:
            offer.problem = f"what the self-test wrote by {message.transport} arrived wrong"
            self._peers.fail_test(peer_id, offer.problem)
            return
        offer.problem = ""
        rate = message.bandwidth_bytes_per_s
        if not 0 <= rate < math.inf:  # it comes from the network
            rate = 0.0
        log_passed(peer_id, message.transport, rate, message.duration_s)
        self._peers.pass_test(peer_id, message.transport, rate)

    def tick(self) -> bool:
        """Take back what was offered too long ago; returns whether a peer may be writing."""
        for engine_id, offer in list(self._offers.items()):
            if offer.slot is not None and self._clock() >= offer.made_at + OFFER_S:
                del self._offers[engine_id]
        return any(offer.slot is not None for offer in self._offers.values())

    def forget(self, engine_id: str) -> None:
        """A peer is gone; what it still writes spoils no more than another's test."""
        self._offers.pop(engine_id, None)


def log_passed(engine_id: str, path: str, bandwidth_bytes_per_s: float, duration_s: float) -> None:
    logger.info(
        "self-test with %s passed: %s, %s, in %.0f ms",
        engine_id,
        path,
        format_rate(bandwidth_bytes_per_s),
        duration_s * 1e3,
    )
