"""Unit tests of Peers: which peers are suspected or writable, and how a link comes back."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from kvconnector.base import TransferEvent, TransferEventKind
from kvconnector.protocol.actions import Connect, ConnectEnded, Send, SendEnded, Turn
from kvconnector.protocol.messages import Beat, Hello, Message, Start
from kvconnector.protocol.peers import (
    BEAT_INTERVAL_S,
    HELLO_INTERVAL_S,
    HELLO_TIMEOUT_S,
    LEASE_S,
    MAX_ROUND_TRIP_S,
    RECEIVING_LEASE_S,
    REST_INTERVAL_S,
    REST_LEASE_S,
    USUAL_ROUND_TRIP_S,
    Peers,
    PeerState,
)
from tests.fakes.handoff.peer_infos import peer_info

CONNECTED, FAILED = TransferEventKind.PEER_CONNECTED, TransferEventKind.PEER_FAILED


@dataclass
class Scene:
    """The peers of a sender "p", which has learnt the decode node "d"; no transport, no clock.

    Attributes:
        is_broken: messages fail from then on, until it is connected anew.
        is_busy: something is in flight.
        is_used: a transfer to the peer is open.
    """

    turn: Turn = field(default_factory=Turn)
    events: list[TransferEvent] = field(default_factory=list)
    said: list[Message] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    is_busy: bool = False
    is_used: bool = True
    is_broken: bool = False
    num_connects: int = 0

    def __post_init__(self) -> None:
        self.peers = Peers(
            self.turn,
            peer_info("p"),
            greets=True,
            is_busy=lambda engine_id: self.is_busy,
            is_used=lambda engine_id: self.is_used,
            on_lost=lambda engine_id, reason: self.lost.append(reason),
        )
        self.peers.meet(peer_info("d"))
        self.carry_out()

    def carry_out(self) -> None:
        """Do what the peers ask for, and tell what came of it."""
        while actions := self.turn.pop_actions():
            for action in actions:
                match action:
                    case Connect():
                        self.num_connects += 1
                        self.is_broken = False
                        self.peers.take_connected(ConnectEnded(action, "scripted"))
                    case Send() if self.is_broken:
                        self.peers.send_again(SendEnded(action, "the connection is broken"))
                    case Send():
                        self.said.append(action.message)
                    case TransferEvent():
                        self.events.append(action)

    def advance(self, seconds: float) -> None:
        self.turn.now += seconds

    def tick(self) -> list[Message]:
        """Tick, and return the messages sent since the last call."""
        self.peers.tick()
        self.carry_out()
        said, self.said = self.said, []
        return said

    def answer(self, said: list[Message]) -> None:
        for message in said:
            assert isinstance(message, Hello | Beat)
            self.peers.renew("d", message.sent_at_s)
            if isinstance(message, Hello) and self.peers.try_begin_probe("d", message.test):
                self.peers.pass_probe("d", "scripted", 5e9)
                self.peers.end_probe("d")
        self.carry_out()

    def connect(self) -> None:
        self.answer(self.tick())
        assert self.peers["d"].state is PeerState.CONNECTED

    def kinds(self) -> list[TransferEventKind]:
        return [event.kind for event in self.events]


def test_a_new_peer_may_be_written_to_only_when_its_test_has_passed() -> None:
    scene = Scene()
    assert not scene.peers.may_write("d")
    [hello] = scene.tick()
    assert isinstance(hello, Hello)
    scene.peers.renew("d", hello.sent_at_s)
    assert not scene.peers.try_begin_probe("d", hello.test + 1)
    assert scene.peers.try_begin_probe("d", hello.test)
    assert not scene.peers.try_begin_probe("d", hello.test)
    assert not scene.peers.may_write("d")
    assert scene.events == []
    scene.peers.pass_probe("d", "scripted", 5e9)
    scene.carry_out()
    assert scene.peers.may_write("d")
    assert scene.kinds() == [CONNECTED]
    assert scene.events[0].bandwidth_bytes_per_s == 5e9


def test_one_that_fails_its_test_again_and_again_is_reported_once_and_greeted_with_back_off() -> (
    None
):
    scene = Scene()
    hellos = []
    for _ in range(1000):
        for message in scene.tick():
            assert isinstance(message, Hello)
            scene.peers.renew("d", message.sent_at_s)
            assert scene.peers.try_begin_probe("d", message.test)
            scene.peers.fail_probe("d", "damaged")
            scene.peers.end_probe("d")
            hellos.append(message.test)
        scene.advance(0.01)
    assert hellos == sorted(set(hellos))
    assert 10 <= len(hellos) <= 16
    assert scene.lost == [event.reason for event in scene.events] == ["damaged"]
    scene.advance(1)
    scene.connect()
    assert scene.kinds() == [FAILED, CONNECTED]


def test_the_round_trip_of_the_path_counts_up_to_a_limit() -> None:
    scene = Scene()
    scene.connect()
    found = []
    for trip_s in (0.0, 0.0003, 0.02, 0.0, 7.0):  # 0: the transport does not know
        scene.peers.note_round_trip("d", trip_s)
        scene.peers.note_round_trip("stranger", 0.04)
        found.append(scene.peers["d"].round_trip_s)
    assert found == [USUAL_ROUND_TRIP_S, 0.0003, 0.02, 0.02, MAX_ROUND_TRIP_S]


def test_a_beat_follows_a_start() -> None:
    scene = Scene()
    scene.connect()
    scene.answer(scene.tick())
    assert scene.tick() == []
    scene.peers.send("d", Start(engine_id="p", request_id="r", epoch=0, num_tokens=1))
    assert [type(message) for message in scene.tick()] == [Start, Beat]


@pytest.mark.parametrize(
    ("is_used", "interval_s"), [(True, BEAT_INTERVAL_S), (False, REST_INTERVAL_S)]
)
def test_beats_keep_a_link_and_a_link_that_nobody_uses_has_half_as_many(
    is_used: bool, interval_s: float
) -> None:
    scene = Scene(is_used=is_used)
    scene.connect()
    said = []
    for _ in range(1000):
        scene.advance(0.01)
        beats = scene.tick()
        scene.answer(beats)
        said += beats
    assert len(said) == pytest.approx(10 / interval_s, abs=2)
    assert scene.kinds() == [CONNECTED]


def test_beats_of_unused_links_of_one_machine_are_sent_together() -> None:
    sent_at = []
    for start_s in (0.1, 0.17, 0.44):
        scene = Scene(is_used=False)
        scene.advance(start_s)
        scene.connect()
        for _ in range(300):
            scene.advance(0.01)
            scene.answer(beats := scene.tick())
            sent_at += [round(scene.turn.now, 2) for _ in beats if scene.turn.now > 1]
    assert len(set(sent_at)) < len(sent_at) / 2


@pytest.mark.parametrize("pause_s", [0.7, 1.2])
@pytest.mark.parametrize("starts_s", [0.01, 0.2, 0.3, 0.45])
def test_a_peer_of_an_unused_link_may_stand_still_for_three_quarters_of_a_second(
    starts_s: float, pause_s: float
) -> None:
    """A sender reads answers only when it sends the next beat, until an answer is late."""
    scene = Scene(is_used=False)
    scene.connect()
    unread: list[Message] = []
    at_peer: list[Message] = []
    stops_at = scene.turn.now + 5 + starts_s
    for _ in range(1000):
        scene.advance(0.01)
        if scene.peers.has_late_answers or scene.turn.now >= scene.peers["d"].speak_at:
            scene.answer(unread)
            unread = []
        at_peer += scene.tick()
        if not stops_at <= scene.turn.now < stops_at + pause_s:
            unread += [one for one in at_peer if isinstance(one, Beat)]
            at_peer = []
        if FAILED in scene.kinds():
            break
    assert (FAILED in scene.kinds()) == (pause_s > 1)
    if pause_s > 1:
        assert scene.turn.now - stops_at <= REST_LEASE_S + 0.02


def test_a_late_answer_and_a_new_transfer_end_the_rest_of_a_link() -> None:
    scene = Scene(is_used=False)
    scene.connect()
    scene.answer(scene.tick())
    beats: list[Message] = []
    for is_late in (False, True):
        scene.advance(REST_INTERVAL_S + 0.03)
        beats += scene.tick()
        assert scene.peers.has_late_answers is is_late
    scene.answer(beats)
    scene.advance(BEAT_INTERVAL_S + 0.01)
    scene.answer(scene.tick())
    assert not scene.peers.has_late_answers
    scene.is_used = True
    scene.peers.send("d", Start(engine_id="p", request_id="r", epoch=0, num_tokens=1))
    scene.answer([one for one in scene.tick() if isinstance(one, Beat)])
    scene.advance(BEAT_INTERVAL_S)
    assert [type(message) for message in scene.tick()] == [Beat]


def test_three_lost_beats_change_nothing_and_the_fourth_makes_a_peer_suspect_once() -> None:
    scene = Scene()
    scene.connect()
    for number in range(1, 5):
        scene.advance(BEAT_INTERVAL_S)
        assert scene.peers.may_write("d") == (number < 4)
        scene.tick()
    assert scene.kinds() == [CONNECTED, FAILED]
    assert scene.lost == [scene.events[-1].reason] == ["no beat from d for 1.0 s"]
    assert not scene.peers.may_start("d")


def test_a_suspect_is_greeted_with_back_off_and_is_connected_again_when_it_answers() -> None:
    scene = Scene()
    scene.connect()
    scene.advance(LEASE_S)
    hellos = []
    for _ in range(1000):
        hellos += scene.tick()
        scene.advance(0.01)
    assert all(isinstance(message, Hello) for message in hellos)
    assert 10 <= len(hellos) <= 16  # a few quick ones, then one a second
    scene.answer(hellos[:-1])  # old answers say nothing of now
    assert scene.peers["d"].state is PeerState.SUSPECT
    scene.advance(1.0)
    scene.connect()
    assert scene.kinds() == [CONNECTED, FAILED, CONNECTED]
    assert scene.peers.may_write("d")


def test_answers_that_waited_while_this_process_stood_still_renew_no_lease() -> None:
    scene = Scene()
    scene.connect()
    scene.advance(BEAT_INTERVAL_S)
    waiting = scene.tick()
    scene.advance(5)
    scene.answer(waiting)  # read only now
    assert not scene.peers.may_write("d")
    assert scene.lost == ["no beat from d for 5.0 s"]


@pytest.mark.parametrize("stamp", [float("nan"), float("inf"), 1e18])
def test_a_stamp_that_was_never_ours_renews_nothing(stamp: float) -> None:
    scene = Scene()
    scene.peers.renew("d", stamp)
    assert not scene.peers.may_write("d")
    assert scene.events == []


def test_a_peer_that_never_answers_is_reported_once() -> None:
    scene = Scene()
    for _ in range(200):
        scene.advance(0.1)
        scene.tick()
    assert [event.reason for event in scene.events] == [f"no answer in {HELLO_TIMEOUT_S:.0f} s"]


def test_a_peer_that_takes_writes_is_not_lost_while_messages_wait_behind_kv() -> None:
    scene = Scene()
    scene.connect()
    for _ in range(30):
        scene.advance(LEASE_S / 2)
        scene.peers.note_reached("d")
        scene.tick()
    assert not scene.peers.may_write("d")  # only answers renew the lease
    assert scene.lost == []
    scene.advance(LEASE_S)
    scene.tick()
    assert scene.lost == [f"no beat from d for {LEASE_S:.1f} s"]


def test_a_receiver_waits_longer_for_a_peer_that_may_be_writing() -> None:
    turn, granted = Turn(), {"p"}
    peers = Peers(turn, peer_info("d"), greets=False, is_receiving=granted.__contains__)
    for name in ("p", "q"):
        connect = Connect(peer_info(name))
        peers.take_connected(ConnectEnded(connect, "scripted"))
        peers.note_alive(name, 0.0)
        peers.pass_probe(name, "scripted", 1e9)
    for turn.now, suspects in ((REST_LEASE_S, ["q"]), (RECEIVING_LEASE_S, ["q", "p"])):
        turn.now -= 0.01
        peers.tick()
        assert [p.engine_id for p in peers if p.state is PeerState.SUSPECT] == suspects[:-1]
        turn.now += 0.02
        peers.tick()
        states = {p.engine_id for p in peers if p.state is PeerState.SUSPECT}
        assert states == set(suspects)


def test_a_broken_connection_is_made_anew_at_once_when_nothing_is_in_flight() -> None:
    scene = Scene()
    scene.connect()
    scene.is_broken = True
    assert scene.peers.send("d", Hello(engine_id="p"))
    scene.carry_out()
    assert scene.said == [Hello(engine_id="p")]
    assert scene.num_connects == 2


def test_kv_waits_for_a_self_test_over_the_connection_that_replaces_a_broken_one() -> None:
    """A write that waited for the new connection could arrive after the peer freed the blocks."""
    scene = Scene()
    scene.connect()
    scene.is_broken = True
    assert scene.peers.send("d", Beat(engine_id="p", sent_at_s=scene.turn.now))
    scene.carry_out()
    assert not scene.peers.may_write("d")
    assert scene.kinds() == [CONNECTED, FAILED]
    assert scene.lost == ["the connection to d must be replaced"]
    scene.advance(HELLO_INTERVAL_S)
    scene.connect()
    assert scene.peers.may_write("d")


def test_a_broken_connection_stays_until_what_is_in_flight_has_ended() -> None:
    scene = Scene()
    scene.connect()
    scene.is_broken = scene.is_busy = True
    assert scene.peers.send("d", Hello(engine_id="p"))  # it turns out only then
    scene.carry_out()
    assert not scene.peers.send("d", Hello(engine_id="p"))
    assert scene.lost == ["d cannot be reached"]
    for _ in range(30):
        scene.advance(0.1)
        assert scene.tick() == []
    assert scene.num_connects == 1
    scene.is_busy = False
    scene.advance(1)
    scene.connect()
    assert scene.num_connects == 2
    assert scene.kinds() == [CONNECTED, FAILED, CONNECTED]


def test_one_that_leaves_hears_no_more_beats_and_is_not_suspected() -> None:
    scene = Scene()
    scene.connect()
    scene.peers.leave("d")
    scene.advance(60)
    assert scene.tick() == []
    assert scene.kinds() == [CONNECTED]
    scene.peers.remove("d")
    assert "d" not in scene.peers
