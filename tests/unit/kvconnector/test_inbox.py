"""Unit tests of Inbox: refused messages are counted, and no peer delays another."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import pytest

from kvconnector.protocol import inbox as inbox_module
from kvconnector.protocol.inbox import MESSAGES_PER_TURN, WARN_INTERVAL_S, Inbox
from kvconnector.protocol.messages import Beat, Message, Quiet, encode
from kvconnector.protocol.seals import Channel, Channels, Refusal
from tests.fakes.handoff.peer_infos import peer_info
from tests.fakes.time.virtual_clock import VirtualClock


@dataclass
class Scene:
    """The inbox of "d", which knows "p" and "q"."""

    clock: VirtualClock = field(default_factory=VirtualClock)
    channels: dict[str, Channel] = field(default_factory=dict)

    def __post_init__(self) -> None:
        own = Channels("d")
        for name in "pq":
            theirs = Channels(name)
            theirs.learn(peer_info("d", public_key=own.public_key))
            own.learn(peer_info(name, public_key=theirs.public_key))
            self.channels[name] = theirs["d"]
        self.peers = {"p", "q"}
        self.inbox = Inbox(self.peers, own)

    def put(self, name: str, payload: bytes) -> None:
        self.inbox.put(name, payload, self.clock())

    def take(self) -> list[Message]:
        return self.inbox.pop_round(self.clock())

    def say(self, name: str, number: int) -> None:
        message = Beat(engine_id=name, sent_at_s=float(number))
        self.put(name, self.channels[name].seal(encode(message)))

    def heard(self) -> list[tuple[str, int]]:
        messages = self.take()
        return [(m.engine_id, int(m.sent_at_s)) for m in messages if isinstance(m, Beat)]


def test_messages_are_heard_in_the_order_of_their_peer() -> None:
    scene = Scene()
    for number in range(3):
        scene.say("p", number)
    assert scene.inbox
    assert scene.heard() == [("p", 0), ("p", 1), ("p", 2)]
    assert not scene.inbox
    assert scene.heard() == []


def test_a_peer_that_talks_much_does_not_take_anothers_turn() -> None:
    scene = Scene()
    for number in range(5 * MESSAGES_PER_TURN):
        scene.say("p", number)
    scene.say("q", 7)
    heard = scene.heard()
    assert heard[-1] == ("q", 7)
    assert len(heard) == MESSAGES_PER_TURN + 1
    while scene.inbox:
        heard += scene.heard()
    assert [number for name, number in heard if name == "p"] == list(range(5 * MESSAGES_PER_TURN))


def test_what_one_peer_fills_is_bounded_and_the_others_are_heard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(inbox_module, "MAX_KEPT_BYTES", 10_000)
    scene = Scene()
    for number in range(1000):
        scene.say("p", number)
    scene.say("q", 1)
    num_kept = 0
    while scene.inbox:
        num_kept += len(scene.heard())
    assert num_kept < 50
    assert scene.inbox.num_refused == {Refusal.FLOOD: 1001 - num_kept}
    scene.say("p", 3)
    assert scene.heard() == [("p", 3)]


def test_who_speaks_in_anothers_name_is_not_heard() -> None:
    scene = Scene()
    quiet = Quiet(engine_id="q", request_id="a", epoch=1, reason="")
    scene.put("p", scene.channels["p"].seal(encode(quiet)))  # p says what q should say
    scene.put("q", scene.channels["p"].seal(encode(quiet)))  # and calls itself q
    scene.put("x", scene.channels["p"].seal(encode(quiet)))
    assert scene.take() == []
    assert scene.inbox.num_refused == {Refusal.FORGED: 2, Refusal.STRANGER: 1}


def test_a_peer_that_left_and_does_not_know_it_is_no_forger() -> None:
    scene = Scene()
    scene.peers.remove("q")
    scene.say("q", 1)  # it stood still, and beats on
    scene.put("q", scene.channels["p"].seal(encode(Beat(engine_id="q", sent_at_s=1.0))))
    assert scene.heard() == []
    assert scene.inbox.num_refused == {Refusal.LEFT: 1, Refusal.FORGED: 1}
    scene.peers.add("q")  # it joins again
    scene.say("q", 2)
    assert scene.heard() == [("q", 2)]


def test_a_giant_message_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox_module, "MAX_MESSAGE_BYTES", 1000)
    scene = Scene()
    scene.put("p", scene.channels["p"].seal(bytes(1000)))
    assert not scene.inbox
    assert scene.inbox.num_refused == {Refusal.TOO_LONG: 1}


def test_refusals_are_told_now_and_then_and_not_each(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene()
    with caplog.at_level(logging.WARNING):
        for _ in range(1000):
            scene.put("p", b"junk")
        scene.clock.advance(WARN_INTERVAL_S)
        scene.put("p", b"junk")
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        "dropped 1 messages, the last of them in the name of 'p': forged",
        "dropped 1000 messages, the last of them in the name of 'p': forged",
    ]
