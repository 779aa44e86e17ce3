"""Unit tests of injected faults: each happens as often as its spec says."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

from baton.api.errors import ConfigError, TransferError
from kvconnector.base import HandoffRecord
from kvconnector.protocol.messages import (
    Commit,
    Digests,
    Grant,
    Hello,
    HelloAck,
    Message,
    SelfTest,
    SelfTestResult,
    Watermark,
)
from kvconnector.protocol.seals import peek
from kvconnector.transports import faults
from kvconnector.transports.faults import MAX_SWAP_S, FaultSpec, FaultyTransport, KillPoint
from kvconnector.transports.in_memory import InMemoryTransport
from tests.fakes.handoff.kv_memories import memory_of
from tests.fakes.handoff.unsealed import unsealed
from tests.fakes.time.virtual_clock import VirtualClock


class Ends:
    """A faulty end "f" and a plain one "x", which have met."""

    def __init__(self, text: str) -> None:
        spec = FaultSpec.parse(text)
        assert spec is not None
        self.clock = VirtualClock()
        self.num_deaths = 0
        self.cache = torch.rand(4, 2, 3, 8)
        self.plain = InMemoryTransport("x", memory_of(torch.zeros(4, 2, 3, 8)))
        below = InMemoryTransport("f", memory_of(self.cache))
        self.faulty = FaultyTransport(below, memory_of(self.cache), spec, self.clock, self._die)
        self.faulty.connect(self.plain.peer_info)
        self.plain.connect(self.faulty.peer_info)

    def _die(self) -> None:
        self.num_deaths += 1

    def say(self, num_tokens: int) -> None:
        self.faulty.notify("x", unsealed(mark(num_tokens)))

    def heard(self) -> list[int]:
        """Return the watermarks that "x" has received since the last call."""
        self.faulty.take_notifications()  # as the I/O thread does in each round
        messages = [peek(payload) for _, payload in self.plain.take_notifications()]
        assert all(isinstance(message, Watermark) for message in messages)
        return [m.num_tokens for m in messages if isinstance(m, Watermark)]


@pytest.fixture(autouse=True)
def close_all() -> Iterator[None]:
    yield
    InMemoryTransport._ends.clear()


def mark(num_tokens: int) -> Message:
    return Watermark(engine_id="f", request_id="a", epoch=1, num_tokens=num_tokens)


def commit(request_id: str) -> bytes:
    return unsealed(
        Commit(
            engine_id="x",
            request_id=request_id,
            epoch=1,
            record=HandoffRecord(token_id=1, num_tokens=1),
            num_bytes=1,
            num_blocks=1,
            transport="",
            exposed_transfer_s=0.0,
        )
    )


def test_altered_messages_differ_in_one_bit() -> None:
    ends = Ends("alter=0.5")
    sent = unsealed(mark(7))
    for _ in range(200):
        ends.plain.notify("f", sent)
    came = [payload for _, payload in ends.faulty.take_notifications()]
    num_bits = [
        (int.from_bytes(sent) ^ int.from_bytes(payload)).bit_count()
        for payload in came
        if len(payload) == len(sent)
    ]
    assert len(num_bits) == 200
    assert set(num_bits) == {0, 1}
    assert 60 < sum(num_bits) < 140


def test_a_whole_spec_is_read() -> None:
    text = "drop=0.01, delay=1ms-0.02s,duplicate=1,reorder=0,corrupt=0.5,fail_post=0.25,"
    assert FaultSpec.parse(text + "kill=Commit:send:2,poison=bad,seed=3") == FaultSpec(
        drop=0.01,
        duplicate=1,
        delay_s=(0.001, 0.02),
        corrupt=0.5,
        fail_post=0.25,
        kill=KillPoint("Commit", "send", 2),
        poison="bad",
        seed=3,
    )
    assert FaultSpec.parse(" ") is None


@pytest.mark.parametrize(
    "text",
    [
        "drop",
        "drop=",
        "drop=2",
        "drop=nan",
        "drop=0.1,drop=0.2",
        "loss=0.1",
        "drop=0.1,,seed=1",
        "delay=5",
        "delay=20ms-1ms",
        "delay=1ms-",
        "kill=Commit",
        "kill=Commit:send:0",
        "kill=Commit:sent:1",
        "kill=Commit:send:1:1",
        "kill=Write:recv:1",
        "kill=Nothing:send:1",
        "poison=",
        "seed=-1",
    ],
)
def test_a_spec_that_is_wrong_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^inject_faults: .* must be |^inject_faults: must be "):
        FaultSpec.parse(text)


def test_faults_are_announced(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        Ends("drop=0.5")
    assert "FAULTS ARE INJECTED" in caplog.text


def test_as_many_messages_are_dropped_as_asked_for_and_the_same_ones_per_seed() -> None:
    runs = []
    for seed in (1, 1, 2):
        ends = Ends(f"drop=0.3,seed={seed}")
        for number in range(1000):
            ends.say(number)
        runs.append(ends.heard())
    assert runs[0] == runs[1] != runs[2]
    assert 640 < len(runs[0]) < 760
    assert runs[0] == sorted(runs[0])


def test_a_doubled_message_comes_twice() -> None:
    ends = Ends("duplicate=1")
    ends.say(5)
    assert ends.heard() == [5, 5]


def test_a_delayed_message_comes_when_its_time_has_come_and_overtakes_others() -> None:
    ends = Ends("delay=10ms-50ms,seed=1")
    for number in range(20):
        ends.say(number)
    ends.clock.advance(0.009)
    assert ends.heard() == []
    ends.clock.advance(0.042)
    heard = ends.heard()
    assert sorted(heard) == list(range(20)) != heard


def test_a_message_that_waits_for_the_next_one_comes_behind_it_or_alone_in_the_end() -> None:
    ends = Ends("reorder=0.5,seed=3")
    for number in range(40):
        ends.say(number)
    ends.clock.advance(MAX_SWAP_S)
    heard = ends.heard()
    assert sorted(heard) == list(range(40)) != heard
    alone = Ends("reorder=1")
    alone.say(1)
    assert alone.heard() == []
    alone.clock.advance(MAX_SWAP_S)
    assert alone.heard() == [1]


def test_a_write_that_is_not_posted_moves_nothing() -> None:
    ends = Ends("fail_post=1")
    with pytest.raises(TransferError, match="injected"):
        ends.faulty.write("x", [0], [1])
    assert not ends.plain._bytes.any()
    ends = Ends("drop=1")
    assert ends.faulty.write("x", [0], [1]).is_done()
    assert torch.equal(ends.plain._bytes[1], ends.cache[0].flatten().view(torch.uint8))


def test_a_corrupted_transfer_has_one_wrong_bit_in_a_granted_block_when_it_is_committed() -> None:
    ends = Ends("corrupt=0.5")
    num_spoilt = 0
    for number in range(200):
        grant = Grant(engine_id="f", request_id=f"r{number}", epoch=1, block_ids=[1, 3])
        before = ends.cache.view(torch.uint8).clone()
        ends.faulty.notify("x", unsealed(grant))
        ends.faulty.take_notifications()
        assert torch.equal(ends.cache.view(torch.uint8), before)
        ends.plain.notify("f", commit(f"r{number}"))
        ends.plain.notify("f", commit(f"r{number}"))  # what comes again is left alone
        ends.plain.notify("f", commit("not granted"))
        ends.faulty.take_notifications()
        changed = ends.cache.view(torch.uint8) ^ before
        assert sum(int(byte).bit_count() for byte in changed[changed != 0]) in (0, 1)
        assert not changed[[0, 2]].any()
        num_spoilt += bool(changed.any())
    assert 70 < num_spoilt < 130


def test_transfers_that_end_without_a_commit_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: the key of each transfer with digests was kept until its Commit came."""
    monkeypatch.setattr(faults, "MAX_REMEMBERED_GRANTS", 3)
    ends = Ends("corrupt=0.5")
    for number in range(10):
        for name, is_granted in ((f"granted{number}", True), (f"unknown{number}", False)):
            if is_granted:
                grant = Grant(engine_id="f", request_id=name, epoch=1, block_ids=[1])
                ends.faulty.notify("x", unsealed(grant))
            told = Digests(engine_id="x", request_id=name, epoch=1, indices=[0], digests=bytes(16))
            ends.plain.notify("f", unsealed(told))
        ends.faulty.take_notifications()
    assert ends.faulty._digested == {(f"granted{number}", 1) for number in (7, 8, 9)}


def test_the_ends_of_self_tests_are_lost_on_request_and_no_other_message() -> None:
    ends = Ends("drop_test=1")
    ends.faulty.notify("x", unsealed(SelfTestResult(engine_id="f", test=1)))
    ends.say(5)
    assert ends.heard() == [5]


@pytest.mark.medium
def test_of_what_a_self_test_wrote_one_bit_in_its_own_slot_is_wrong_when_it_is_looked_at() -> None:
    ends = Ends("corrupt_test=0.5")
    told = SelfTest(
        engine_id="x",
        test=1,
        digest=b"",
        transport="",
        bandwidth_bytes_per_s=1.0,
        duration_s=1.0,
    )
    slots = ends.faulty.scratch.memory[1:]
    num_spoilt = 0
    for _ in range(100):
        ends.plain.notify("f", unsealed(told))  # not offered a slot
        ends.faulty.take_notifications()
        ends.faulty.notify("x", unsealed(HelloAck(engine_id="f", test=1, slot=2)))
        assert not slots.any()
        ends.plain.notify("f", unsealed(told))
        ends.faulty.take_notifications()
        bits = [int(byte).bit_count() for byte in slots[2][slots[2] != 0]]
        assert bits in ([], [1])
        num_spoilt += len(bits)
        slots[2].zero_()
    assert 30 < num_spoilt < 70


@pytest.mark.parametrize(
    ("text", "at"), [("Watermark:send:3", 2), ("Hello:recv:2", 1), ("Write:send:1", 0)]
)
def test_the_process_ends_just_before_what_was_named(text: str, at: int) -> None:
    ends = Ends(f"kill={text}")
    deaths = []
    for number in range(4):
        if text.startswith("Watermark"):
            ends.say(number)
        elif text.startswith("Write"):
            ends.faulty.write("x", [0], [0])
        else:
            ends.plain.notify("f", unsealed(Hello(engine_id="x")))
            ends.faulty.take_notifications()
        deaths.append(ends.num_deaths)
    assert deaths == [int(number >= at) for number in range(4)]


def test_junk_from_the_network_is_handed_on() -> None:
    ends = Ends("kill=Hello:recv:1")
    ends.plain.notify("f", b"junk")
    assert ends.faulty.take_notifications() == [("x", b"junk")]
