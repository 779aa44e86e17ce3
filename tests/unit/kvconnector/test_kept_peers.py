"""Baton keeps NIXL's released peers, as NIXL closes no connection, and replaces failed ones."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from baton.api.errors import TransferError
from baton.testing.transports import BLOCK_SHAPE
from kvconnector.transports.base import SILENT_S, PendingWrite
from kvconnector.transports.nixl import agent
from kvconnector.transports.nixl.fences import (
    CLOSE_AFTER_S,
    FINAL_READS,
    ConnectionFences,
    WorkerSockets,
)
from kvconnector.transports.nixl.transport import NixlTransport
from tests.fakes.handoff.kv_link import numbers
from tests.fakes.handoff.kv_memories import memory_of
from tests.fakes.time.virtual_clock import VirtualClock

pytestmark = pytest.mark.nixl


@pytest.fixture
def pair() -> Iterator[tuple[NixlTransport, NixlTransport]]:
    p, d = make_transport("p"), make_transport("d")
    yield p, d
    p.close()
    d.close()


def make_transport(role: str) -> NixlTransport:
    name = f"{role}{next(numbers)}-kept"
    return NixlTransport(name, memory_of(torch.zeros(4, *BLOCK_SHAPE)))


def test_each_agent_of_a_process_finds_the_descriptor_of_its_sockets(
    pair: tuple[NixlTransport, NixlTransport],
) -> None:
    """Regression: only the first did, so a node with several ends polled for the others."""
    found = [transport.descriptor for transport in pair]
    assert None not in found
    assert len(set(found)) == 2


def test_a_silent_peer_does_not_cost_an_agent_its_connection_with_itself(
    pair: tuple[NixlTransport, NixlTransport],
) -> None:
    """Regression: the connection counted as the peer's, so blocks were free after 8 s, not 3 s."""
    _, d = pair
    clock, own = VirtualClock(0.0), d._agent
    own._fences = ConnectionFences(WorkerSockets(own._sockets, clock))
    d.take_notifications()
    before = set(own._sockets())
    assert before, "UCX connects each worker with itself"
    assert not own.is_cut_off("p", b"metadata of a peer on another host")
    for _ in range(3):
        clock.advance(SILENT_S)
        own.is_cut_off("p", b"metadata of a peer on another host")
        for _ in range(FINAL_READS):
            d.take_notifications()
    assert clock() < CLOSE_AFTER_S + SILENT_S
    assert own.is_cut_off("p", b"metadata of a peer on another host")
    assert set(own._sockets()) == before


def test_nothing_is_written_to_a_peer_that_is_kept(
    pair: tuple[NixlTransport, NixlTransport],
) -> None:
    p, d = pair
    p.connect(d.peer_info)
    finish(p.write(engine_id(d), [0], [0]), d)
    p.disconnect(engine_id(d))
    assert p.num_connections == 1
    for forbidden in (
        lambda: p.write(engine_id(d), [0], [0]),
        lambda: p.write_scratch(engine_id(d), 0),
        lambda: p.notify(engine_id(d), b"late"),
    ):
        with pytest.raises(TransferError, match="is not connected"):
            forbidden()


def test_a_write_that_was_posted_before_a_peer_was_released_ends_as_what_it_is(
    pair: tuple[NixlTransport, NixlTransport],
) -> None:
    p, d = pair
    p._kv_cache[1] = 7.0
    p.connect(d.peer_info)
    finish(p.write(engine_id(d), [0], [0]), d)  # the connection works
    write = p.write(engine_id(d), [1], [2])
    p.disconnect(engine_id(d))
    finish(write, d)
    assert (d._kv_cache[2] == 7.0).all()


def test_only_so_many_released_peers_are_kept_the_oldest_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(agent, "MAX_RELEASED", 2)
    p, others = make_transport("p"), [make_transport("d") for _ in range(4)]
    for other in others:
        p.connect(other.peer_info)
    assert p.num_connections == 4
    for other in others:
        p.disconnect(engine_id(other))
    assert list(p._agent._peers) == [engine_id(other) for other in others[2:]]
    p.connect(others[2].peer_info)
    p.connect(others[0].peer_info)
    assert p.num_connections == 3
    for transport in (p, *others):
        transport.close()


def test_a_peer_whose_connection_failed_is_learnt_anew(
    pair: tuple[NixlTransport, NixlTransport],
) -> None:
    p, d = pair
    p.connect(d.peer_info)
    p._agent._failed.add(engine_id(d))
    p.disconnect(engine_id(d))
    assert p.num_connections == 0
    p.connect(d.peer_info)
    finish(p.write(engine_id(d), [0], [0]), d)


def test_a_kept_connection_that_brings_no_answer_is_replaced(
    pair: tuple[NixlTransport, NixlTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = pair
    for _ in range(2):
        p.connect(d.peer_info)
        p.notify(engine_id(d), b"hello")
        assert hear(d, p) == [(engine_id(p), b"hello")]
        p.disconnect(engine_id(d))
    p.connect(d.peer_info)
    monkeypatch.setattr(agent, "ANSWER_TIMEOUT_S", 0.0)
    with pytest.raises(TransferError, match="does not answer over the connection that was kept"):
        p.notify(engine_id(d), b"hello?")
    p.disconnect(engine_id(d))
    assert p.num_connections == 0
    p.connect(d.peer_info)  # over a new connection, which may stay silent for now
    p.notify(engine_id(d), b"hello!")
    assert hear(d, p) == [(engine_id(p), b"hello!")]


def connected_again(
    pair: tuple[NixlTransport, NixlTransport],
) -> tuple[NixlTransport, NixlTransport]:
    """Connect both ends; then connect the first end again, over the connection that it kept."""
    p, d = pair
    d.connect(p.peer_info)
    p.connect(d.peer_info)
    p.disconnect(engine_id(d))
    p.connect(d.peer_info)
    return p, d


def test_a_kept_connection_that_brings_an_answer_stays(
    pair: tuple[NixlTransport, NixlTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = connected_again(pair)
    p.notify(engine_id(d), b"hello")
    assert hear(d, p)
    d.notify(engine_id(p), b"well?")
    assert hear(p, d)
    monkeypatch.setattr(agent, "ANSWER_TIMEOUT_S", 0.0)
    p.notify(engine_id(d), b"well")
    assert hear(d, p) == [(engine_id(p), b"well")]


def test_a_kept_connection_to_a_peer_that_is_heard_late_is_replaced(
    pair: tuple[NixlTransport, NixlTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = connected_again(pair)
    monkeypatch.setattr(agent, "ANSWER_TIMEOUT_S", 1e-9)
    d.notify(engine_id(p), b"hello")
    assert hear(p, d)
    monkeypatch.setattr(agent, "ANSWER_TIMEOUT_S", 1000.0)
    with pytest.raises(TransferError, match="does not answer"):
        p.notify(engine_id(d), b"hello")


def test_other_metadata_in_the_name_of_a_kept_peer_replaces_it(
    pair: tuple[NixlTransport, NixlTransport],
) -> None:
    p, d = pair
    p.connect(d.peer_info)
    p.disconnect(engine_id(d))
    forged = msgspec.structs.replace(
        d.peer_info,
        ranks=(msgspec.structs.replace(d.peer_info.ranks[0], agent_metadata=b"another's"),),
    )
    with pytest.raises(TransferError, match="is damaged, or belongs to another agent"):
        p.connect(forged)


def test_descriptors_are_as_many_after_twenty_meetings_as_after_one(
    pair: tuple[NixlTransport, NixlTransport],
) -> None:
    p, d = pair
    counts = []
    for _ in range(20):
        p.connect(d.peer_info)
        d.connect(p.peer_info)
        finish(p.write(engine_id(d), [0], [0]), d)
        p.notify(engine_id(d), b"hello")
        assert hear(d, p)
        d.notify(engine_id(p), b"hello")
        assert hear(p, d)
        counts.append(len(list(Path("/proc/self/fd").iterdir())))
        p.disconnect(engine_id(d))
        d.disconnect(engine_id(p))
    assert counts == [counts[0]] * 20


def engine_id(transport: NixlTransport) -> str:
    return transport.peer_info.engine_id


def finish(write: PendingWrite, reader: NixlTransport) -> None:
    give_up_at = time.monotonic() + 10
    while not write.is_done():
        reader.take_notifications()
        assert time.monotonic() < give_up_at


def hear(transport: NixlTransport, sender: NixlTransport) -> list[tuple[str, bytes]]:
    """Wait for messages; the sender reads, too, as it sends nothing otherwise."""
    give_up_at = time.monotonic() + 10
    while not (taken := transport.take_notifications()):
        assert sender.take_notifications() == []
        assert time.monotonic() < give_up_at
    return taken
