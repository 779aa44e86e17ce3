"""Unit tests of Endpoint: whose calls run where, and how its thread ends."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import msgspec
import pytest
import torch

from kvconnector.endpoint import Endpoint
from kvconnector.protocol.messages import Hello, Message, encode
from kvconnector.protocol.seals import Channel, Channels
from kvconnector.transports.in_memory import InMemoryTransport
from tests.fakes.unsealed import unsealed
from tests.fakes.waiting import wait_until


class Scene:
    """An Endpoint over memory, and all that it called.

    Args:
        progress: what it does in each round.
    """

    def __init__(self, name: str, progress: Callable[[], bool] = lambda: False) -> None:
        self.messages: list[Message] = []
        self.deaths: list[Exception] = []
        self.transport = InMemoryTransport(name, torch.zeros(2, 4, 8))
        self.endpoint = Endpoint(
            self.transport,
            on_message=self.messages.append,
            progress=progress,
            on_event=lambda: None,
            on_death=self.deaths.append,
        )
        self.endpoint.start()

    def meet(self, peer: InMemoryTransport) -> Channel:
        """Learn a peer; returns what it speaks with."""
        name = peer.peer_info.engine_id
        channels = Channels(name)
        info = msgspec.structs.replace(peer.peer_info, public_key=channels.public_key)
        self.endpoint.submit(lambda: self.endpoint.add_peer(info))
        wait_until(lambda: name in self.endpoint.peers)
        peer.connect(self.transport.peer_info)
        channels.learn(self.endpoint.peer_info)
        return channels[self.transport.peer_info.engine_id]


def test_calls_are_made_in_order_on_the_endpoints_own_thread() -> None:
    scene = Scene("order")
    made: list[tuple[int, int]] = []
    for number in range(50):
        scene.endpoint.submit(
            lambda number=number: made.append((number, threading.get_ident()))  # type: ignore[misc]  # a default that keeps the value
        )
    wait_until(lambda: len(made) == 50)
    scene.endpoint.close()
    assert [number for number, _ in made] == list(range(50))
    assert {thread for _, thread in made}.isdisjoint({threading.get_ident()})
    assert len({thread for _, thread in made}) == 1


def test_damaged_messages_and_those_of_strangers_are_dropped_and_the_next_is_heard(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scene, peer = Scene("hears"), InMemoryTransport("speaks", torch.zeros(2, 4, 8))
    channel = scene.meet(peer)
    hello = Hello(engine_id="speaks")
    with caplog.at_level(logging.WARNING):
        for payload in (b"", b"\xff\x00junk", encode(hello), unsealed(hello)):
            peer.notify("hears", payload)
        for body in (b"", b"\xff\x00junk", encode(Hello(engine_id="stranger"))):
            peer.notify("hears", channel.seal(body))
        stranger = InMemoryTransport("stranger", torch.zeros(2, 4, 8))
        stranger.connect(scene.transport.peer_info)
        stranger.notify("hears", channel.seal(encode(hello)))
        peer.notify("hears", channel.seal(encode(hello)))
        wait_until(lambda: scene.messages)
    scene.endpoint.close()
    assert scene.messages == [hello]
    refused = {"forged": 4 + 1, "malformed": 2, "stranger": 1}
    assert scene.endpoint.metrics().refused_messages == refused
    assert caplog.text.count("dropped 1 messages") == 1  # the others are told later, together
    assert scene.deaths == []


def test_an_unexpected_error_ends_the_thread_closes_the_transport_and_is_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    error = RuntimeError("out of luck")

    def progress() -> bool:
        raise error

    with caplog.at_level(logging.CRITICAL):
        scene = Scene("dies", progress)
        wait_until(lambda: scene.deaths)
        scene.endpoint.close()
    assert scene.deaths == [error]
    assert "dies" not in InMemoryTransport._ends
    assert "cannot continue" in caplog.text


def test_closing_closes_the_transport() -> None:
    scene = Scene("closes")
    assert "closes" in InMemoryTransport._ends
    scene.endpoint.close()
    assert "closes" not in InMemoryTransport._ends
    assert scene.deaths == []
