"""Unit tests of JoinGate and of joining over a link: a name belongs to its living process."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import pytest

from baton.link import wire
from baton.link.words import NodeRole, PeerUpdate
from baton.serving.rpc import RpcServer, open_channel
from baton.v1 import node_pb2, node_pb2_grpc
from router.api.grpc import link_service
from router.api.grpc.link_service import NodeLinkService
from router.fleet import join_gate
from router.fleet.join_gate import JOIN_BURST, JOINS_PER_S, JoinGate
from router.fleet.lost_nodes import MAX_SHOWN
from router.fleet.node import Node
from router.fleet.node_pool import NodePool
from tests.fakes.router.nodes import HandNode, join_pair, make_pool, make_registration
from tests.fakes.router.router_scene import asynchronous
from tests.fakes.time.virtual_clock import VirtualClock

P, D = NodeRole.PREFILL, NodeRole.DECODE


@contextlib.asynccontextmanager
async def served(pool: NodePool) -> AsyncIterator[Any]:
    """Gives a stub of the pool's links."""
    server = RpcServer(
        [node_pb2.DESCRIPTOR.services_by_name["NodeLink"]],
        lambda one: node_pb2_grpc.add_NodeLinkServicer_to_server(NodeLinkService(pool), one),  # type: ignore[no-untyped-call]  # generated
    )
    address = await server.start("127.0.0.1:0")
    async with open_channel(address) as channel, asyncio.timeout(20):
        yield node_pb2_grpc.NodeLinkStub(channel)  # type: ignore[no-untyped-call]  # generated
    await server.stop(0)


async def dial(stub: Any, name: str, *, incarnation: int = 0, key: bytes = b"") -> Any:
    """A link that was asked for, and the router's answer."""
    registration = make_registration(name, D, incarnation=incarnation)
    link = stub.Link()
    await link.write(wire.registration_to_proto(dataclasses.replace(registration, process_key=key)))
    return link, (await link.read()).registered


@asynchronous
async def test_who_comes_under_a_living_nodes_name_does_not_end_it_and_gets_in_behind_it() -> None:
    pool = make_pool()
    async with served(pool) as stub:
        first, answer = await dial(stub, "d0")
        assert answer.problem == ""
        _, answer = await dial(stub, "d0", incarnation=1)
        assert answer.may_retry
        assert answer.problem.startswith("node_name: a node d0 is alive here")
        assert [node.engine_id for node in pool.nodes] == ["d0-0"]
        first.cancel()  # its process ended
        while pool.nodes:  # noqa: ASYNC110  # what is waited for is in another object
            await asyncio.sleep(0.01)
        _, answer = await dial(stub, "d0", incarnation=1)
        assert answer.problem == ""


@asynchronous
async def test_an_engine_id_is_taken_over_by_its_own_process_only() -> None:
    pool = make_pool()
    async with served(pool) as stub:
        old, answer = await dial(stub, "d0", key=b"mine")
        assert answer.problem == ""
        for key in (b"", b"theirs"):
            _, answer = await dial(stub, "d0", key=key)
            assert answer.may_retry
            assert answer.problem == "engine_id: d0, which is alive, has d0-0"
        (node,) = pool.nodes
        _, answer = await dial(stub, "d0", key=b"mine")  # it saw first that its link broke
        assert answer.problem == ""
        assert pool.nodes != [node]
        with contextlib.suppress(asyncio.CancelledError):
            while isinstance(await old.read(), node_pb2.RouterMessage):
                pass  # hung up on, and not told to end


def test_without_a_key_nobody_is_the_same_process() -> None:
    pool = make_pool()
    HandNode(pool, make_registration("d", D))
    assert pool.gate.obstacle(make_registration("d", D))


def test_a_machine_that_vanished_keeps_its_name_until_it_is_found_silent() -> None:
    pool = make_pool()
    HandNode(pool, make_registration("d", D))
    again = make_registration("d", D, incarnation=1)
    for _ in range(6):
        assert pool.gate.obstacle(again)
        pool.count_missed_beats()
    pool.count_missed_beats()
    assert pool.gate.obstacle(again) == ""


def test_a_whole_cluster_may_join_at_once_and_a_flood_from_one_address_is_slowed_down() -> None:
    clock = VirtualClock()
    gate = JoinGate(clock)
    num_let_in = 0
    for _ in range(5000):
        num_let_in += not gate.obstacle(make_registration("d", D), "ipv4:10.0.0.1")
        clock.advance(0.001)
    assert JOIN_BURST <= num_let_in <= JOIN_BURST + 6 * JOINS_PER_S
    assert gate.obstacle(make_registration("d", D), "ipv4:10.0.0.2") == ""


def test_what_a_flood_of_joins_leaves_behind_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join_gate, "MAX_ADDRESSES", 10)
    pool = make_pool()
    prefill, _ = join_pair(pool)
    for number in range(1000):
        registration = dataclasses.replace(
            make_registration(f"x{number}", D), peer_info=bytes(1000)
        )
        assert pool.gate.obstacle(registration, f"ipv4:10.0.0.{number}") == ""
        hand = HandNode(pool, registration)
        pool.lost_nodes.note_missing(registration)
        pool.gate.expel(registration.engine_id)
        prefill.reach(hand)
        hand.leave()
        pool.lost_nodes.note_missing(registration)
    assert len(pool.lost) == MAX_SHOWN
    assert all(lost.peer_info == b"" for lost in pool.lost)
    assert len(pool.gate._left) == 10
    assert set(prefill.node.reports) == {"d0-0"}
    assert len([update for update in prefill.of(PeerUpdate) if update.removed]) == 1000


def test_a_router_has_no_more_nodes_than_it_can_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join_gate, "MAX_NODES", 2)
    pool = make_pool()
    join_pair(pool)
    assert "the most that it takes" in pool.gate.obstacle(make_registration("d9", D))


@asynchronous
async def test_a_call_that_never_registers_is_ended() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(link_service, "REGISTER_TIMEOUT_S", 0.1)
        async with served(make_pool()) as stub:
            link = stub.Link()
            answer = (await link.read()).registered
    assert answer.problem == "no registration came within 0.1 s"
    assert answer.may_retry  # the node, or the router, may only have been stopped, or busy


def test_a_node_that_reads_nothing_of_its_link_is_hung_up_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool = make_pool()

    @asynchronous
    async def run() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(link_service, "MAX_QUEUED_COMMANDS", 100)
            async with served(pool) as stub:
                await dial(stub, "d0")
                (node,) = pool.nodes
                while pool.nodes:  # what gRPC holds for it comes first
                    for _ in range(50):
                        node.send(PeerUpdate("p", bytes(50_000)))
                    await asyncio.sleep(0.001)

    run()
    assert "hung up on d0, which reads nothing of its link" in caplog.text


def test_registrations_of_all_nodes_have_only_so_many_bytes() -> None:
    """Regression: 4,096 registrations of 1.5 MiB each took 6 GiB."""
    gate = JoinGate(VirtualClock())
    nodes: list[Node] = []

    def join(number: int, address: str) -> str:
        registration = dataclasses.replace(
            make_registration(f"d{number}", D), peer_info=bytes(2**20 - 2**15)
        )
        problem = gate.obstacle(registration, address)
        if not problem:
            nodes.append(Node(registration, lambda command: None, address=address))
            gate.note_joined(nodes[-1])
        return problem

    refused = [join(number, "10.0.0.1") for number in range(40)]
    assert sum(map(bool, refused)) == 7
    assert refused[-1].startswith("registrations of all nodes may have 100663296 bytes together")
    refused = [join(number, f"10.0.1.{number}") for number in range(40, 140)]
    assert len(nodes) == 99
    gate.note_left(nodes.pop())
    assert join(999, "10.0.2.1") == ""
