"""Tests of self-tests on a scripted network: a pair is connected only if its bytes arrive."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable
from unittest import mock

import pytest
import torch

from baton.api.errors import TransferError
from baton.telemetry.rates import format_rate
from kvconnector.base import TransferEvent, TransferEventKind
from kvconnector.ends import Receiver, Sender
from kvconnector.peer_info import NUM_SLOTS, PeerInfo
from kvconnector.protocol.messages import HelloAck, Message, SelfTest, SelfTestResult, encode
from kvconnector.protocol.peers import LEASE_S, MAX_BACK_OFF_S
from kvconnector.protocol.probe import MAX_POSTED, MAX_TIMED_WRITES, OFFER_S, TIMEOUT_S
from kvconnector.protocol.seals import peek
from kvconnector.transports.base import KVTransport, PendingWrite
from kvconnector.transports.faults import FaultSpec, FaultyTransport
from kvconnector.transports.paths import CUDA_IPC_PATH, UNKNOWN_GPU_PATH
from tests.fakes.handoff.kv_memories import memory_of
from tests.fakes.handoff.scripted_network import ScriptedNetwork, ScriptedTransport
from tests.fakes.time.virtual_clock import VirtualClock

CONNECTED, FAILED = TransferEventKind.PEER_CONNECTED, TransferEventKind.PEER_FAILED
ROUND_S = 0.01
UNTOUCHED = 7.0


class Scene:
    """Decode node "d" and any number of prefill nodes, whose I/O threads are turned by hand.

    Args:
        p_faults, d_faults: faults of each end, in the text form of `FaultSpec`.
    """

    def __init__(self, p_faults: str = "", d_faults: str = "") -> None:
        self.clock = VirtualClock()
        self.network = ScriptedNetwork()
        self.p_faults = p_faults
        self.target = torch.full((4, 2, 4, 8), UNTOUCHED)
        self.senders: dict[str, Sender] = {}
        self.events: dict[str, list[TransferEvent]] = {}
        self.dead: set[str] = set()
        self.transports = {"d": self._transport("d", self.target, d_faults)}
        self.receiver = Receiver(self.transports["d"], lambda: None, self._never, self.clock)
        self.events["d"] = []

    def _transport(self, engine_id: str, kv_cache: torch.Tensor, faults: str) -> KVTransport:
        transport = ScriptedTransport(engine_id, memory_of(kv_cache), self.network)
        spec = FaultSpec.parse(faults)
        if spec is None:
            return transport
        return FaultyTransport(transport, memory_of(kv_cache), spec, self.clock)

    def _never(self, error: Exception) -> None:
        raise AssertionError("no thread runs that could die") from error

    def add(self, engine_id: str) -> Sender:
        transport = self._transport(engine_id, torch.zeros(4, 2, 4, 8), self.p_faults)
        self.transports[engine_id] = transport
        sender = Sender(transport, lambda: None, self._never, self.clock)
        self.senders[engine_id] = sender
        self.events[engine_id] = []
        sender.connect(self.receiver.peer_info)
        self.receiver.connect(sender.peer_info)
        return sender

    def run(self, seconds: float, *, lose: Callable[[Message], bool] = lambda _: False) -> None:
        for _ in range(round(seconds / ROUND_S)):
            for engine_id, sender in self.senders.items():
                if engine_id not in self.dead:
                    sender.loop.round()
                    self.events[engine_id] += sender.poll()
            self.receiver.loop.round()
            self.events["d"] += self.receiver.poll()
            for message in list(self.network.messages):
                if lose(peek(message.payload)):
                    self.network.messages.remove(message)
            while self.network.messages:
                self.network.deliver(0)
            self.clock.advance(ROUND_S)

    def land_all(self) -> None:
        for write in self.network.test_writes:
            write.land()
        self.network.test_writes.clear()

    def kinds(self, engine_id: str) -> list[TransferEventKind]:
        assert (self.target == UNTOUCHED).all()  # whatever is tested, no KV is written
        return [event.kind for event in self.events[engine_id]]


def test_both_sides_are_connected_when_the_bytes_are_there_and_hear_how_fast_it_was(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    scene = Scene()
    scene.add("p")
    scene.run(1, lose=lambda message: isinstance(message, SelfTest))
    assert scene.kinds("p") == scene.kinds("d") == []
    scene.run(0.2)
    for end in "pd":
        assert scene.kinds(end) == [CONNECTED]
        assert scene.events[end][0].transport == "scripted"
        assert scene.events[end][0].bandwidth_bytes_per_s > 0
    for peer in "pd":
        assert caplog.text.count(f"self-test with {peer} passed: scripted, ") == 1
    # An answer that is lost is given again.
    scene = Scene()
    scene.add("p")
    scene.run(1, lose=lambda message: isinstance(message, SelfTestResult))
    assert scene.kinds("p") == []
    scene.run(0.2)
    assert scene.kinds("p") == scene.kinds("d") == [CONNECTED]


def test_both_ends_hear_of_the_path_that_the_bandwidth_proves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connect = ScriptedTransport.connect

    def connect_gpu(self: ScriptedTransport, peer: PeerInfo) -> str:
        connect(self, peer)
        return UNKNOWN_GPU_PATH

    monkeypatch.setattr(ScriptedTransport, "connect", connect_gpu)
    for lowest, expected in ((0.0, CUDA_IPC_PATH), (math.inf, UNKNOWN_GPU_PATH)):
        monkeypatch.setattr("kvconnector.transports.paths.PCIE_BYTES_PER_S", lowest)
        scene = Scene()
        scene.add("p")
        scene.run(0.5)
        assert [scene.events[end][0].transport for end in "pd"] == [expected] * 2


def test_the_first_write_goes_alone_and_the_others_a_few_at_a_time() -> None:
    scene = Scene()
    scene.network.holds_tests = True
    scene.add("p")
    posted = []
    for _ in range(20):
        scene.run(4 * ROUND_S)
        posted.append(len(scene.network.test_writes))
        scene.land_all()
        if scene.kinds("p"):
            break
    assert posted[:2] == [1, MAX_POSTED]  # 20 ms are over then
    assert sum(posted) < 1 + MAX_TIMED_WRITES
    assert scene.kinds("p") == scene.kinds("d") == [CONNECTED]
    [event] = scene.events["p"]
    slot_bytes = scene.transports["p"].scratch.memory.shape[1]
    assert event.bandwidth_bytes_per_s == pytest.approx(MAX_POSTED * slot_bytes / 0.05, rel=0.3)


@pytest.mark.parametrize(("first_s", "timed_s"), [(1.0, 0.05), (2.8, 2.8)])
def test_a_slow_first_write_gives_the_bandwidth_only_if_no_second_write_can_end_in_time(
    first_s: float, timed_s: float
) -> None:
    scene = Scene()
    scene.network.holds_tests = True
    scene.add("p")
    scene.run(first_s)
    scene.land_all()
    for _ in range(3):
        scene.run(0.05)
        scene.land_all()
    assert scene.kinds("p") == scene.kinds("d") == [CONNECTED]
    slot_bytes = scene.transports["p"].scratch.memory.shape[1]
    [event] = scene.events["p"]
    assert event.bandwidth_bytes_per_s == pytest.approx(slot_bytes / timed_s, rel=0.3)


def test_where_posting_copies_the_others_have_their_turn_in_between() -> None:
    scene = Scene()
    scene.add("p")
    transport = scene.transports["p"]
    post = transport.write_scratch
    times: list[float] = []  # of posts, by a clock that else moves between rounds only

    def copy(engine_id: str, slot: int) -> PendingWrite:
        scene.clock.advance(0.0006)
        times.append(scene.clock())
        return post(engine_id, slot)

    with mock.patch.object(transport, "write_scratch", copy):
        scene.run(0.3)
    assert scene.kinds("p") == [CONNECTED]
    gaps = [late - early for early, late in itertools.pairwise(times)]
    assert len(times) == 5
    assert all(max(pair) > ROUND_S for pair in itertools.pairwise(gaps))  # two in a round at most


def test_a_connection_that_replaces_a_tested_one_is_tested_itself() -> None:
    scene = Scene()
    scene.add("p")
    transport, calls = scene.transports["p"], list[str]()
    notify, connect, post = transport.notify, transport.connect, transport.write_scratch

    def notify_once_broken(engine_id: str, payload: bytes) -> None:
        if isinstance(peek(payload), SelfTest) and "break" not in calls:
            calls.append("break")
            raise TransferError("the connection is broken")
        notify(engine_id, payload)

    def note_connect(peer: PeerInfo) -> str:
        calls.append("connect")
        return connect(peer)

    def note_write(engine_id: str, slot: int) -> PendingWrite:
        calls.append("write")
        return post(engine_id, slot)

    with (
        mock.patch.object(transport, "notify", notify_once_broken),
        mock.patch.object(transport, "connect", note_connect),
        mock.patch.object(transport, "write_scratch", note_write),
    ):
        scene.run(2.0)
    assert scene.kinds("p")[-1] is CONNECTED
    assert [name for name, _ in itertools.groupby(calls)] == [
        *("connect", "write", "break", "connect", "write"),
    ]


@pytest.mark.parametrize("faults", ["corrupt_test=1", "corrupt_test=0.9,seed=1"])
def test_a_pair_whose_bytes_arrive_wrong_is_reported_once_and_tested_again(
    faults: str, caplog: pytest.LogCaptureFixture
) -> None:
    scene = Scene(d_faults=faults)
    scene.add("p")
    scene.run(4)
    for end in "pd":
        assert scene.events[end][0].kind is FAILED
        assert "scripted arrived wrong" in scene.events[end][0].reason
        assert caplog.text.count(f"{end}: the self-test's bytes") == 1
    if faults == "corrupt_test=1":
        assert scene.kinds("p") == scene.kinds("d") == [FAILED]
        assert not scene.senders["p"].machine.peers.may_start("d")
    else:
        scene.run(60)
        assert scene.kinds("p") == scene.kinds("d") == [FAILED, CONNECTED]


@pytest.mark.parametrize("side", "pd")
def test_a_test_that_nobody_answers_is_reported_and_done_again(side: str) -> None:
    scene = Scene(**{f"{side}_faults": "drop_test=1"})
    scene.add("p")
    scene.run(TIMEOUT_S + 0.5)
    assert scene.kinds("p") == [FAILED]
    assert "no answer to the self-test" in scene.events["p"][0].reason
    scene.run(3 * TIMEOUT_S)
    assert scene.kinds("p") == [FAILED]
    faulty = scene.transports[side]
    assert isinstance(faulty, FaultyTransport)
    faulty._spec = FaultSpec()
    scene.run(TIMEOUT_S + MAX_BACK_OFF_S + 0.5)
    assert scene.kinds("p") == [FAILED, CONNECTED]
    assert scene.kinds("d")[-1] is CONNECTED


def test_a_write_that_never_lands_fails_the_test_and_the_next_waits_for_it() -> None:
    scene = Scene()
    scene.network.holds_tests = True
    sender = scene.add("p")
    scene.run(TIMEOUT_S + 1)
    assert scene.kinds("p") == [FAILED]
    assert "no end of the writes" in scene.events["p"][0].reason
    scene.run(5)
    assert len(scene.network.test_writes) == 1
    assert sender.machine.is_moving
    scene.network.holds_tests = False
    scene.land_all()
    scene.run(MAX_BACK_OFF_S + 0.5)
    assert scene.kinds("p") == [FAILED, CONNECTED]
    assert scene.kinds("d") == [CONNECTED]


def test_a_write_that_fails_says_why() -> None:
    scene = Scene()
    scene.network.holds_tests = True
    scene.add("p")
    scene.run(0.1)
    scene.network.test_writes.pop().failed = True
    scene.network.holds_tests = False
    scene.run(0.02)
    assert scene.events["p"][0].reason == "the self-test's write failed: the write failed"
    scene.run(1)
    assert scene.kinds("p") == [FAILED, CONNECTED]


def test_bytes_of_an_earlier_test_prove_nothing() -> None:
    scene = Scene()
    scene.add("p")
    scene.run(0.2)
    scene.run(LEASE_S + 0.3, lose=lambda _: True)
    scene.network.holds_tests = True
    for _ in range(150):
        scene.run(ROUND_S)
        for write in scene.network.test_writes:
            write.done = True  # it says so
        scene.network.test_writes.clear()
    assert scene.kinds("p") == scene.kinds("d") == [CONNECTED, FAILED, FAILED]
    assert "arrived wrong" in scene.events["p"][-1].reason


def test_a_pair_that_was_apart_is_tested_and_measured_again() -> None:
    scene = Scene()
    scene.add("p")
    scene.run(0.2)
    scene.run(LEASE_S + 0.3, lose=lambda _: True)
    assert scene.kinds("p") == scene.kinds("d") == [CONNECTED, FAILED]
    scene.run(2 * MAX_BACK_OFF_S, lose=lambda message: isinstance(message, SelfTest))
    assert scene.kinds("p") == scene.kinds("d") == [CONNECTED, FAILED]
    scene.run(1)
    assert scene.kinds("p") == scene.kinds("d") == [CONNECTED, FAILED, CONNECTED]
    assert scene.events["p"][-1].bandwidth_bytes_per_s > 0
    assert scene.events["d"][-1].bandwidth_bytes_per_s > 0


def test_an_end_that_was_introduced_anew_alone_is_connected_again() -> None:
    scene = Scene()
    sender = scene.add("p")
    scene.run(0.2)
    sender.connect(scene.receiver.peer_info)
    scene.run(0.5)
    scene.receiver.connect(sender.peer_info)
    scene.run(0.5)
    assert scene.kinds("p") == scene.kinds("d") == [CONNECTED, CONNECTED]
    # One that has forgotten the other answers no beat, so that it is greeted and tested.
    scene.receiver.disconnect("p")
    scene.receiver.connect(sender.peer_info)
    scene.run(LEASE_S + MAX_BACK_OFF_S)
    assert scene.kinds("p") == [CONNECTED, CONNECTED, FAILED, CONNECTED]
    assert scene.kinds("d") == [CONNECTED, CONNECTED, CONNECTED]


def test_a_test_that_the_other_end_has_forgotten_is_begun_again_at_once() -> None:
    """The router loses and introduces a node again while its test runs."""
    scene = Scene()
    scene.network.holds_tests = True
    sender = scene.add("p")
    scene.run(4 * ROUND_S)
    scene.receiver.disconnect("p")
    scene.run(4 * ROUND_S)
    scene.receiver.connect(sender.peer_info)
    for _ in range(10):
        scene.run(0.1)
        scene.land_all()
    assert scene.kinds("p")[-1] == scene.kinds("d")[-1] == CONNECTED


def test_more_peers_than_slots_take_turns() -> None:
    scene = Scene()
    names = [f"p{number}" for number in range(3 * NUM_SLOTS)]
    for name in names:
        scene.add(name)
    scene.run(2)
    assert all(scene.kinds(name) == [CONNECTED] for name in names)
    assert {event.engine_id for event in scene.events["d"]} == set(names)


def test_slots_of_peers_that_died_come_back_and_their_late_writes_spoil_a_test_at_most() -> None:
    scene = Scene()
    scene.network.holds_tests = True
    for number in range(NUM_SLOTS):
        scene.add(f"dead{number}")
    scene.run(0.2)
    scene.dead |= scene.senders.keys()
    late = list(scene.network.test_writes)
    assert len(late) == NUM_SLOTS
    scene.network.test_writes.clear()
    scene.add("p")
    scene.run(2)
    assert scene.network.test_writes == []
    scene.run(OFFER_S)
    scene.run(2 * MAX_BACK_OFF_S)
    assert scene.network.test_writes
    for _ in range(100):
        scene.land_all()
        for write in late:
            write.land()
        scene.run(ROUND_S)
        if FAILED in scene.kinds("d"):
            break
    assert "arrived wrong" in scene.events["d"][0].reason
    scene.network.holds_tests = False
    scene.run(3)
    assert scene.kinds("p")[-1] is CONNECTED
    assert scene.kinds("d") == [FAILED, CONNECTED]


def test_one_that_leaves_in_the_middle_of_a_test_is_forgotten_when_nothing_is_in_flight() -> None:
    scene = Scene()
    scene.network.holds_tests = True
    sender = scene.add("p")
    scene.run(0.1)
    sender.disconnect("d")
    scene.run(0.1)
    assert "d" in sender.machine.peers
    scene.land_all()
    scene.run(0.1)
    assert "d" not in sender.machine.peers
    assert scene.kinds("p") == []
    scene.network.holds_tests = False
    sender.connect(scene.receiver.peer_info)
    scene.run(0.3)
    assert scene.kinds("p") == [CONNECTED]


@pytest.mark.parametrize("rate", [math.nan, math.inf, -1.0])
def test_what_a_peer_claims_is_not_believed(rate: float) -> None:
    scene = Scene()
    scene.add("p")
    scene.run(1, lose=lambda message: isinstance(message, SelfTest))
    told = SelfTest(
        engine_id="p",
        test=1,
        digest=scene.transports["p"].scratch.digest,
        transport="",
        bandwidth_bytes_per_s=rate,
        duration_s=rate,
    )
    channel = scene.senders["p"].loop.channels["d"]
    scene.network.ends["d"].inbox.append(("p", channel.seal(encode(told))))
    scene.run(0.05, lose=lambda message: isinstance(message, SelfTest))
    assert scene.kinds("d") == [CONNECTED]
    assert scene.events["d"][0].bandwidth_bytes_per_s == 0


def test_a_slot_that_there_is_not_is_not_written_to() -> None:
    scene = Scene()
    sender = scene.add("p")
    sender.loop.round()  # says Hello, the first test
    now = scene.clock()
    ack = HelloAck(engine_id="d", sent_at_s=now, test=1, slot=NUM_SLOTS)
    scene.receiver.loop.round()  # learns the peer
    scene.network.messages = [m for m in scene.network.messages if m.target == "d"]
    channel = scene.receiver.loop.channels["p"]
    scene.network.ends["p"].inbox.append(("d", channel.seal(encode(ack))))
    sender.loop.round()
    assert not sender.machine.peers["d"].is_probing
    scene.run(0.2)
    assert scene.kinds("p") == [CONNECTED]


@pytest.mark.parametrize(
    ("rate", "text"),
    [(0.0, "0 B/s"), (999.6, "1 kB/s"), (12.5e6, "12.5 MB/s"), (4.12e9, "4.1 GB/s")],
)
def test_rates_are_written_as_people_read_them(rate: float, text: str) -> None:
    assert format_rate(rate) == text
