"""Unit tests of Endpoint: whose calls run where, and how its thread ends."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import pytest
import torch

from kvconnector.endpoint import Endpoint
from kvconnector.in_memory import InMemoryTransport
from kvconnector.messages import Hello, Message, encode
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
    scene.endpoint.submit(lambda: scene.endpoint.add_peer(peer.peer_info))
    wait_until(lambda: scene.endpoint.peers)
    peer.connect(scene.transport.peer_info)
    with caplog.at_level(logging.WARNING):
        for payload in (b"", b"\xff\x00junk", encode(Hello(engine_id="stranger"))):
            peer.notify("hears", payload)
        peer.notify("hears", encode(Hello(engine_id="speaks")))
        wait_until(lambda: scene.messages)
    scene.endpoint.close()
    assert scene.messages == [Hello(engine_id="speaks")]
    assert caplog.text.count("dropped a message") == 2
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
