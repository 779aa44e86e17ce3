"""Tests of sender and receiver over TLS: unreachable peers, and cancelled transfers."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator

import msgspec
import pytest
import torch

from baton.testing.transports import BLOCK_SHAPE, UNTOUCHED
from kvconnector.base import KVReservation
from kvconnector.ends import Receiver, Sender
from kvconnector.transports.sockets.transport import TlsTransport
from tests.fakes.handoff.kv_link import NUM_D_BLOCKS, NUM_P_BLOCKS, Kind, Link
from tests.fakes.handoff.kv_link import numbers as link_numbers
from tests.fakes.handoff.kv_memories import memory_of
from tests.fakes.handoff.tls_ends import where_of, with_where
from tests.fakes.time.waiting import wait_until

pytestmark = pytest.mark.medium

SPEED = 5.0  # of the clock: nobody waits ten seconds for a report


@pytest.fixture
def link() -> Iterator[Link]:
    source = torch.rand(NUM_P_BLOCKS, *BLOCK_SHAPE)
    target = torch.full((NUM_D_BLOCKS, *BLOCK_SHAPE), UNTOUCHED)
    deaths: list[Exception] = []

    def clock() -> float:
        return time.monotonic() * SPEED

    number = next(link_numbers)
    receiver = Receiver(
        TlsTransport(f"d{number}-tls", memory_of(target), clock=clock),
        lambda: None,
        deaths.append,
        clock=clock,
    )
    sender = Sender(
        TlsTransport(f"p{number}-tls", memory_of(source), clock=clock),
        lambda: None,
        deaths.append,
        clock=clock,
    )
    sender.loop.start()
    receiver.loop.start()
    yield Link(sender, receiver, source, target)
    sender.close()
    receiver.close()
    assert deaths == []


def test_why_a_peer_is_not_reached_is_in_what_its_router_hears(link: Link) -> None:
    """`baton admin nodes` shows it."""
    wrong = msgspec.structs.replace(
        where_of(link.receiver.peer_info), identity=where_of(link.sender.peer_info).identity
    )
    link.receiver.connect(link.sender.peer_info)
    link.sender.connect(with_where(link.receiver.peer_info, wrong))
    failed = link.wait("p", Kind.PEER_FAILED)
    assert failed.reason.startswith("no answer in 10 s: ")
    assert "certificate is refused: self-signed certificate" in failed.reason
    assert not link.events("d", Kind.PEER_CONNECTED)


def test_a_cancelled_transfer_is_over_at_the_receiver_though_the_sender_says_nothing(
    link: Link,
) -> None:
    """Over NIXL its blocks would stay in quarantine until Quiet, or until the process is dead."""
    link.receiver.expect(True)
    link.receiver.connect(link.sender.peer_info)
    link.sender.connect(link.receiver.peer_info)
    link.wait("p", Kind.PEER_CONNECTED)
    link.start("a", 8)
    link.wait("d", Kind.STARTED)
    link.grant("a", (1, 2))
    link.push("a", 0, (1,), 4)
    link.wait("d", Kind.WATERMARK)
    link.sender.close()  # it hangs, say, on another machine
    link.receiver.cancel("a", 0, link.p)
    ended = link.wait("d", Kind.FAILED, "a")
    assert (ended.engine_id, ended.epoch, ended.reason) == (link.p, 0, "")
    link.receiver.cancel("a", 0, link.p)  # once is enough
    assert len(link.events("d", Kind.FAILED, "a")) == 1


def test_what_lands_after_a_cancel_lands_nowhere(link: Link) -> None:
    link.receiver.expect(True)
    link.receiver.connect(link.sender.peer_info)
    link.sender.connect(link.receiver.peer_info)
    link.wait("p", Kind.PEER_CONNECTED)
    for round_number in range(20):
        name = f"r{round_number}"
        link.start(name, 8)
        link.wait("d", Kind.STARTED, name)
        link.grant(name, (1, 2))
        link.push(name, 0, (0, 1), 8, token_id=1)
        link.receiver.cancel(name, 0, link.p)
        link.wait("d", Kind.FAILED, name)
        link.target[1:3] = UNTOUCHED  # they are free: whoever has them now has written this
        wait_until(functools.partial(ended, link, name), "the sender's end")
        assert (link.target[1:3] == UNTOUCHED).all()


def ended(link: Link, request_id: str) -> bool:
    link.poll()
    kinds = (Kind.FAILED, Kind.COMMITTED)
    return any(link.events("p", kind, request_id) for kind in kinds)


def make_pair(num_blocks: int) -> Link:
    """Return a pair whose nodes have many small blocks."""
    number = next(link_numbers)
    deaths: list[Exception] = []
    source, target = torch.zeros(8, 1, 1, 1, 1, 1), torch.zeros(num_blocks, 1, 1, 1, 1, 1)
    link = Link(
        Sender(TlsTransport(f"p{number}-many", memory_of(source)), lambda: None, deaths.append),
        Receiver(TlsTransport(f"d{number}-many", memory_of(target)), lambda: None, deaths.append),
        source,
        target,
    )
    link.sender.loop.start()
    link.receiver.loop.start()
    link.receiver.expect(True)
    link.receiver.connect(link.sender.peer_info)
    link.sender.connect(link.receiver.peer_info)
    link.wait("p", Kind.PEER_CONNECTED)
    return link


def test_several_of_the_largest_grants_at_once_arrive_over_one_connection(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Regression: the second one broke the connection, and the first one was lost with it."""
    num_grants, num_blocks = 3, 2**20
    link = make_pair(num_grants * num_blocks)
    names = [f"g{number}" for number in range(num_grants)]
    for name in names:
        link.sender.start(name, 0, link.d, num_tokens=num_blocks, num_blocks=num_blocks)
        link.wait("d", Kind.STARTED, name)
    # The last ids are the longest ones
    ids = range(num_grants * num_blocks)
    transport = link.receiver.loop._transport
    assert isinstance(transport, TlsTransport)
    connection = transport._outgoing[link.p].connections()[0]
    for number, name in enumerate(names):
        part = ids[number * num_blocks : (number + 1) * num_blocks]
        link.receiver.grant(
            KVReservation(request_id=name, epoch=0, engine_id=link.p, block_ids=tuple(part))
        )
    transfers = link.sender.machine.transfers
    wait_until(lambda: all(transfers[name, 0].granted is not None for name in names), "all grants")
    assert transport._outgoing[link.p].connections() == [connection]
    assert not link.events("p", Kind.PEER_FAILED) + link.events("d", Kind.PEER_FAILED)
    assert "cannot reach" not in caplog.text
    link.sender.close()
    link.receiver.close()
