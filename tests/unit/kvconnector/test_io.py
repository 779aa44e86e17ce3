"""Unit tests of IoLoop: where wishes and events are handled, and how the thread ends."""

from __future__ import annotations

import logging
import threading

import msgspec
import pytest
import torch

from baton.api.errors import TransferError
from kvconnector.io import IoLoop
from kvconnector.protocol.actions import (
    Action,
    ConnectEnded,
    Drain,
    Forbid,
    Forbidden,
    Input,
    LendSlot,
    Meet,
    ReadSlot,
    SlotRead,
    Turn,
)
from kvconnector.protocol.messages import Hello, encode
from kvconnector.protocol.peers import Peers
from kvconnector.protocol.seals import Channel, Channels, Refusal
from kvconnector.transports.in_memory import InMemoryTransport
from tests.fakes.handoff.kv_memories import memory_of
from tests.fakes.handoff.unsealed import unsealed
from tests.fakes.time.waiting import wait_until


class Machine:
    """Learns peers, and notes what it is told and on which thread.

    Args:
        error: raised in each round.
    """

    is_expecting = False
    is_moving = False

    def __init__(self, transport: InMemoryTransport, error: Exception | None) -> None:
        self._turn = Turn()
        self.peers = Peers(self._turn, transport.peer_info, greets=False)
        self.told: list[tuple[int, Input]] = []
        self._error = error

    def handle_input(self, item: Input, now: float) -> list[Action]:
        self._turn.now = now
        self.told.append((threading.get_ident(), item))
        if isinstance(item, Meet):
            self.peers.meet(item.peer)
        elif isinstance(item, ConnectEnded):
            self.peers.take_connected(item)
        return self._turn.pop_actions()

    def tick(self, now: float) -> list[Action]:
        if self._error is not None:
            raise self._error
        return []

    def heard(self, kind: type) -> list[Input]:
        return [item for _, item in self.told if isinstance(item, kind)]


class _Says(Turn):
    """A machine that asks for these actions once."""

    def __init__(self, actions: list[Action]) -> None:
        super().__init__()
        for action in actions:
            self.add_action(action)


class Scene:
    """A loop over memory, and all that it called.

    Args:
        error: raised by the state machine; None: no error.
    """

    def __init__(self, name: str, error: Exception | None = None) -> None:
        self.deaths: list[Exception] = []
        self.transport = InMemoryTransport(name, memory_of(torch.zeros(2, 4, 8)))
        self.machine = Machine(self.transport, error)
        self.channels = Channels(name)
        self.loop = IoLoop(
            self.transport,
            self.machine,
            self.channels,
            on_event=lambda: None,
            on_death=self.deaths.append,
        )
        self.loop.start()

    def meet(self, peer: InMemoryTransport) -> Channel:
        """Introduce a peer; return its channel to this end."""
        name = peer.peer_info.engine_id
        channels = Channels(name)
        info = msgspec.structs.replace(peer.peer_info, public_key=channels.public_key)
        self.loop.submit(Meet(info))
        wait_until(lambda: name in self.machine.peers)
        peer.connect(self.transport.peer_info)
        own = self.transport.peer_info
        channels.learn(msgspec.structs.replace(own, public_key=self.channels.public_key))
        return channels[own.engine_id]


def test_wishes_are_told_in_order_on_the_loops_own_thread() -> None:
    scene = Scene("order")
    for number in range(50):
        scene.loop.submit(Drain(str(number)))
    wait_until(lambda: len(scene.machine.heard(Drain)) == 50)
    scene.loop.close()
    assert scene.machine.heard(Drain) == [Drain(str(number)) for number in range(50)]
    threads = {thread for thread, _ in scene.machine.told}
    assert len(threads) == 1
    assert threads.isdisjoint({threading.get_ident()})


def test_damaged_messages_and_those_of_strangers_are_dropped_and_the_next_is_heard(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scene, peer = Scene("hears"), InMemoryTransport("speaks", memory_of(torch.zeros(2, 4, 8)))
    channel = scene.meet(peer)
    hello = Hello(engine_id="speaks")
    with caplog.at_level(logging.WARNING):
        for payload in (b"", b"\xff\x00junk", encode(hello), unsealed(hello)):
            peer.notify("hears", payload)
        for body in (b"", b"\xff\x00junk", encode(Hello(engine_id="stranger"))):
            peer.notify("hears", channel.seal(body))
        stranger = InMemoryTransport("stranger", memory_of(torch.zeros(2, 4, 8)))
        stranger.connect(scene.transport.peer_info)
        stranger.notify("hears", channel.seal(encode(hello)))
        peer.notify("hears", channel.seal(encode(hello)))
        wait_until(lambda: scene.machine.heard(Hello))
    scene.loop.close()
    assert scene.machine.heard(Hello) == [hello]
    refused = dict.fromkeys((reason.value for reason in Refusal), 0)
    refused |= {"forged": 4 + 1, "malformed": 2, "stranger": 1}
    assert scene.loop.metrics().refused_messages == refused
    assert caplog.text.count("dropped 1 messages") == 1  # the others are told later, together
    assert scene.deaths == []


def test_a_rank_that_does_not_answer_does_not_end_the_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*args: object) -> bytes:
        raise TransferError("the transport of rank 1 does not answer")

    scene = Scene("late")
    for name in ("lend", "digest_of"):
        monkeypatch.setattr(scene.transport.scratch, name, fail)
    monkeypatch.setattr(scene.transport, "forbid", fail)
    read = ReadSlot(0, "p")
    asked: list[Action] = [LendSlot(0, "p"), Forbid("p", ("a", 1), wants_result=True), read]
    monkeypatch.setattr(scene.machine, "_turn", _Says(asked))
    scene.loop.submit(Drain("p"))
    wait_until(lambda: scene.machine.heard(SlotRead))
    scene.loop.close()
    assert scene.machine.heard(SlotRead) == [SlotRead(read, b"")]
    assert not scene.machine.heard(Forbidden)
    assert scene.deaths == []


def test_an_unexpected_error_ends_the_thread_closes_the_transport_and_is_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    error = RuntimeError("out of luck")

    with caplog.at_level(logging.CRITICAL):
        scene = Scene("dies", error)
        wait_until(lambda: scene.deaths)
        scene.loop.close()
    assert scene.deaths == [error]
    assert "dies" not in InMemoryTransport._ends
    assert "cannot continue" in caplog.text


def test_closing_closes_the_transport() -> None:
    scene = Scene("closes")
    assert "closes" in InMemoryTransport._ends
    scene.loop.close()
    assert "closes" not in InMemoryTransport._ends
    assert scene.deaths == []


def test_a_thread_whose_writes_must_wait_rests_between_rounds() -> None:
    """Regression: the thread took a whole core while a peer with granted blocks was silent."""
    scene = Scene("waits")
    scene.loop.close()
    scene.machine.is_expecting = scene.machine.is_moving = True
    scene.loop.round()
    assert scene.loop._pause_s() > 0


def test_a_thread_is_at_rest_only_if_no_message_but_answers_to_beats_can_come() -> None:
    scene = Scene("rests")
    scene.loop.close()
    assert scene.loop._is_at_rest()
    scene.machine.is_expecting = True
    assert not scene.loop._is_at_rest()
    scene.machine.is_expecting = False
    scene.loop.expect(True)
    assert not scene.loop._is_at_rest()
