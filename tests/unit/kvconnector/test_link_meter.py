"""The bandwidth of a link that changes after the self-test, on a scripted network."""

from __future__ import annotations

import itertools

import pytest
import torch
from msgspec.structs import replace

from baton.api.errors import BatonError
from kvconnector.base import BlockPush, KVReservation, TransferEvent, TransferEventKind
from kvconnector.ends import Receiver, Sender
from kvconnector.protocol.link_meter import DOUBLING_S, ENOUGH_S, LOOK_S, _Link
from kvconnector.protocol.peers import MIN_POSTED_BYTES, NUM_PIECES, QUEUE_S, ROUND_TRIPS
from kvconnector.transports.scratch import Scratch
from tests.fakes.handoff.kv_memories import memory_of
from tests.fakes.handoff.scripted_network import ScriptedNetwork, ScriptedTransport
from tests.fakes.time.virtual_clock import VirtualClock

ROUND_S = 0.01
NUM_BLOCKS = 4
MEMORY = (NUM_BLOCKS, 2, 4, 2**15)  # blocks of 1 MiB
PUSH_BYTES = NUM_BLOCKS * 2**20
TEST_S = 0.1  # time of each write of a self-test


def make_transport(engine_id: str, network: ScriptedNetwork) -> ScriptedTransport:
    """Return a transport whose self-tests write as many bytes as those of a node."""
    made = ScriptedTransport(engine_id, memory_of(torch.zeros(MEMORY)), network)
    made.scratch = Scratch(engine_id, made.kv_cache)
    made.peer_info = replace(made.peer_info, scratch_bytes=made.scratch.memory.nbytes)
    return made


class Link:
    """A prefill node "p" and a decode node "d"; a write takes as long as the test wants."""

    def __init__(self) -> None:
        self.clock, self.network = VirtualClock(), ScriptedNetwork(holds_tests=True)
        p, d = (make_transport(name, self.network) for name in "pd")
        self.sender = Sender(p, lambda: None, self._never, self.clock)
        self.receiver = Receiver(d, lambda: None, self._never, self.clock)
        self.events: list[TransferEvent] = []
        self._numbers = itertools.count()
        self.sender.connect(self.receiver.peer_info)
        self.receiver.connect(self.sender.peer_info)
        while not self.bandwidths:
            self.run(TEST_S)
            for write in self.network.test_writes:
                write.land()
            self.network.test_writes.clear()

    def _never(self, error: Exception) -> None:
        raise BatonError("no thread runs that could die") from error

    @property
    def bandwidths(self) -> list[float]:
        """The bandwidths that the sender has reported, in bytes per second."""
        kind = TransferEventKind.PEER_CONNECTED
        return [event.bandwidth_bytes_per_s for event in self.events if event.kind is kind]

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / ROUND_S)):
            self.sender.loop.round()
            self.receiver.loop.round()
            self.events += self.sender.poll()
            while self.network.messages:
                self.network.deliver(0)
            self.clock.advance(ROUND_S)

    def send(self, seconds: float, *, fails: bool = False, at_once: bool = True) -> None:
        """Send one request's KV, of which each write takes ``seconds``.

        Args:
            at_once: whether all writes that are in flight end together.
        """
        name = f"r{next(self._numbers)}"
        blocks = tuple(range(NUM_BLOCKS))
        self.sender.start(name, 1, "d", num_tokens=16, num_blocks=NUM_BLOCKS)
        grant = KVReservation(request_id=name, epoch=1, engine_id="p", block_ids=blocks)
        self.receiver.grant(grant)
        self.sender.push(BlockPush(request_id=name, epoch=1, first_block=0, block_ids=blocks))
        self.run(0.1)
        num_bytes = 0
        while self.network.writes:
            self.run(seconds)
            ended = list(self.network.writes) if at_once else self.network.writes[:1]
            num_bytes += sum(len(one.local_block_ids) for one in ended) * 2**20
            for _ in ended:
                self.network.fail(0, landed=False) if fails else self.network.land(0)
            self.run(2 * ROUND_S)
        assert fails or num_bytes == PUSH_BYTES
        self.sender.abort(name, 1, "the test has seen enough")
        self.run(0.2)


def test_a_link_that_got_slower_is_reported_and_its_bandwidth_recovers_slowly() -> None:
    link = Link()
    tested = link.bandwidths[0]
    link.sender.machine.peers["d"].bandwidth_bytes_per_s = 0.0  # all of a push in one write
    while len(link.bandwidths) == 1:
        link.send(ENOUGH_S)
    measured = link.bandwidths[1]
    assert measured < tested
    # a write takes ENOUGH_S, a round to be seen, and what `send` waits before
    assert measured == pytest.approx(PUSH_BYTES / ENOUGH_S, rel=0.3)
    assert link.sender.machine.peers["d"].bandwidth_bytes_per_s == measured
    link.run(2.1 * DOUBLING_S)
    assert (
        link.bandwidths[2:]
        == [min(2 * measured, tested), min(4 * measured, tested)][
            : 1 if 2 * measured >= tested else 2
        ]
    )
    link.run(20 * DOUBLING_S)
    assert link.bandwidths[-1] == tested


def test_small_fast_writes_raise_a_low_bandwidth() -> None:
    # So few bytes may be in flight to a slow link, so a fast link with a low bandwidth has no
    # longer spans.
    link = _Link(tested=1e5, reported=1e5, counted_at=0.0)
    measured: list[float | None] = []
    for number in range(256):
        link.begin_write(("r", 1), MIN_POSTED_BYTES, number)
        measured.append(link.end_write(("r", 1), number + 2**-10, ""))
    assert measured == [None] * 255 + [MIN_POSTED_BYTES * 2**10]


def test_a_low_bandwidth_doubles_while_only_small_writes_are_sent() -> None:
    link = _Link(tested=1e9, reported=1e8, counted_at=0.0)
    for number in range(int(DOUBLING_S) + 1):
        link.begin_write(("r", 1), 2**10, number)
        assert link.end_write(("r", 1), number + 0.01, "") is None
    assert link.doubled(DOUBLING_S + 1.0) == 2e8


def test_a_link_that_is_always_busy_is_measured() -> None:
    link = _Link(tested=1e9, reported=1e9, counted_at=0.0)
    measured: list[float | None] = []
    key, now, num_bytes = ("r", 1), 0.0, 2**18
    for _ in range(2):
        link.begin_write(key, num_bytes, now)
    for _ in range(500):  # one write ends each 10 ms, and the next is posted at once
        now += 0.01
        assert link.end_write(key, now, "") is None
        link.begin_write(key, num_bytes, now)
        measured.append(link.end_busy_span(now))
    found = [one for one in measured if one is not None]
    assert len(found) >= 3
    assert found == pytest.approx([num_bytes / 0.01] * len(found), rel=0.05)


def test_links_are_looked_at_less_often_than_io_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[float] = []
    monkeypatch.setattr(_Link, "end_busy_span", lambda link, now: looks.append(now))
    link = Link()
    looks.clear()
    for _ in range(1000):
        link.sender.loop.round()
        link.clock.advance(LOOK_S / 100)
    assert 9 <= len(looks) <= 11


def test_writes_that_end_together_after_a_busy_span_do_not_make_the_link_look_fast() -> None:
    link = _Link(tested=1e6, reported=1e6, counted_at=0.0)
    for _ in range(10):
        link.begin_write(("r", 1), 2**23, 0.0)
    for _ in range(8):
        link.end_write(("r", 1), 8.0, "")
    found = [link.end_busy_span(8.0)]
    found += [link.end_write(("r", 1), 8.001, "") for _ in range(2)]
    assert found == [2**23, None, None]


def test_bandwidths_that_change_with_each_write_are_measured_at_intervals() -> None:
    link = _Link(tested=2e10, reported=2e10, counted_at=0.0)
    found = []
    for number in range(1, 1 + 4 * 64):  # 4 s
        seconds = 2**-7 if number % 2 else 2**-10
        link.begin_write(("r", 1), 2**24, number / 64 - seconds)
        found.append(link.end_write(("r", 1), number / 64, ""))
    measured = [one for one in found if one is not None]
    assert len(measured) == 4
    assert max(measured) < 1.1 * min(measured)


def test_a_bandwidth_that_has_grown_is_measured_at_once() -> None:
    link = _Link(tested=1e8, reported=1e8, counted_at=0.0)
    link.begin_write(("r", 1), 2**24, 0.0)
    assert link.end_write(("r", 1), 2**-6, "") == 2**30


@pytest.mark.parametrize("is_busy", [True, False])
def test_a_busy_sender_does_not_lower_its_limit(is_busy: bool) -> None:
    """Two writes are in flight at a time; a busy sender finds both at their ends."""
    link = Link()
    peer = link.sender.machine.peers["d"]
    before = 2**21 / (ROUND_TRIPS * peer.round_trip_s + QUEUE_S)
    peer.bandwidth_bytes_per_s = before
    while len(link.bandwidths) == 1:
        link.send(0.5, at_once=is_busy)
    assert link.bandwidths[1] < link.bandwidths[0]
    assert peer.bandwidth_bytes_per_s == (before if is_busy else link.bandwidths[1])


def test_a_push_gets_larger_pieces_once_its_link_is_known_to_be_faster() -> None:
    """Regression: a push was cut into pieces when it was queued, by the bandwidth of that time."""
    link = Link()
    peer = link.sender.machine.peers["d"]
    one_piece_s = ROUND_TRIPS * peer.round_trip_s + QUEUE_S
    peer.bandwidth_bytes_per_s = 2**19 / one_piece_s  # less than a block of 1 MiB in flight
    link.sender.start("r", 1, "d", num_tokens=16, num_blocks=NUM_BLOCKS)
    blocks = tuple(range(NUM_BLOCKS))
    link.receiver.grant(KVReservation(request_id="r", epoch=1, engine_id="p", block_ids=blocks))
    link.sender.push(BlockPush(request_id="r", epoch=1, first_block=0, block_ids=blocks))
    link.run(0.1)
    assert [write.local_block_ids for write in link.network.writes] == [[0]]
    peer.bandwidth_bytes_per_s = 2**21 * NUM_PIECES / one_piece_s  # pieces of two blocks
    link.run(0.1)
    assert [write.local_block_ids for write in link.network.writes] == [[0], [1, 2], [3]]


def test_tiny_slow_writes_of_a_busy_process_are_no_measurement() -> None:
    link = _Link(tested=1e9, reported=1e9, counted_at=0.0)
    for second in range(100):
        link.begin_write(("r", 1), 2**10, second)
        assert link.end_write(("r", 1), second + 0.1, "") is None


def test_a_transfer_that_outlives_a_connection_does_not_make_the_link_look_fast() -> None:
    before = _Link(tested=1e6, reported=1e6, counted_at=0.0)
    before.begin_write(("r", 1), 2**24, 0.0)
    link = _Link(1e6, 1e6, 1.0, before.without_bytes(), began_at=1.0)
    link.begin_write(("r", 1), 2**24, 1.0)
    assert link.end_write(("r", 1), 1.001, "") is None
    assert link.end_write(("r", 1), 3.0, "") == 2**23


def test_writes_of_an_earlier_connection_do_not_end_a_span() -> None:
    link = _Link(tested=1e9, reported=1e9, counted_at=0.0)
    link.begin_write(("new", 1), 2**24, 0.0)
    assert link.end_write(("old", 1), 0.001, "") is None
    assert link.end_write(("new", 1), 1.0, "") == 2**24


def test_a_failed_write_is_no_measurement() -> None:
    link = Link()
    for _ in range(4):
        link.send(ENOUGH_S, fails=True)
    assert len(link.bandwidths) == 1


@pytest.mark.parametrize(
    ("bandwidth", "round_trip_s", "expected"),
    [
        (0.0, 0.0, 2**25),  # unknown
        (1e11, 0.0, 2**25),
        (1e8, 0.0, int(QUEUE_S * 1e8)),
        (1e8, 0.02, int((ROUND_TRIPS * 0.02 + QUEUE_S) * 1e8)),
        (1e3, 0.1, MIN_POSTED_BYTES),
    ],
)
def test_bandwidth_and_round_trip_limit_the_bytes_in_flight(
    bandwidth: float, round_trip_s: float, expected: int
) -> None:
    peers = Link().sender.machine.peers
    peers["d"].bandwidth_bytes_per_s = bandwidth
    peers["d"].round_trip_s = round_trip_s
    assert peers.limit_bytes("d", 2**25) == expected
    assert peers.piece_bytes("d", 2**25) == expected // NUM_PIECES or expected == 2**25
    assert peers.limit_bytes("a stranger", 2**25) == 2**25
