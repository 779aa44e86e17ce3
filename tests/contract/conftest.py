"""A connected pair of every registered KV connector, on real I/O threads as in the nodes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from baton.testing.transports import BLOCK_SHAPE, UNTOUCHED
from kvconnector import KV_CONNECTORS
from kvconnector.ends import Receiver, Sender
from tests.fakes.handoff.kv_link import CONNECTORS, NUM_D_BLOCKS, NUM_P_BLOCKS, Kind, Link, numbers
from tests.fakes.handoff.kv_memories import memory_of


@pytest.fixture(params=CONNECTORS)
def link(request: pytest.FixtureRequest) -> Iterator[Link]:
    make_transport = KV_CONNECTORS.load(request.param)
    number = next(numbers)
    source = torch.rand(NUM_P_BLOCKS, *BLOCK_SHAPE)
    target = torch.full((NUM_D_BLOCKS, *BLOCK_SHAPE), UNTOUCHED)
    deaths: list[Exception] = []
    receiver = Receiver(
        make_transport(f"d{number}-contract", memory_of(target)), lambda: None, deaths.append
    )
    sender = Sender(
        make_transport(f"p{number}-contract", memory_of(source)), lambda: None, deaths.append
    )
    sender.loop.start()
    receiver.loop.start()
    made = Link(sender, receiver, source, target)
    receiver.expect(True)
    receiver.connect(sender.peer_info)
    sender.connect(receiver.peer_info)
    made.wait("p", Kind.PEER_CONNECTED)
    made.wait("d", Kind.PEER_CONNECTED)
    yield made
    sender.close()
    receiver.close()
    assert deaths == []  # no I/O thread met what it did not expect
