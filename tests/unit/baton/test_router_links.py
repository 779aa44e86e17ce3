"""Unit tests of a node's links to several routers: real gRPC links, nodes and calls by hand."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import wraps
from types import SimpleNamespace
from typing import Any

import grpc.aio
import pytest

from baton.access.access import Access
from baton.api.errors import ConfigError, NodeUnavailableError
from baton.api.outputs import RequestDelta, TokenLogprobs
from baton.api.sampling_params import SamplingParams
from baton.link import router_links
from baton.link.beat_pace import INTERVALS_AT_REST
from baton.link.drain import Drain
from baton.link.node_end import MAX_MISSED_BEATS, NodeEnd
from baton.link.router_link import RouterLink
from baton.link.router_links import RouterLinks
from baton.link.words import (
    BEAT_INTERVAL_S,
    AbortAll,
    CancelCommand,
    DrainCommand,
    NodeBeat,
    NodeEvent,
    NodeRole,
    PeerReport,
    PeerUpdate,
    PrefillCommand,
    RouterBeat,
    RouterCommand,
    ServingState,
    split_request_id,
)
from baton.processes.free_address import free_address
from baton.serving.call_gate import CallGate
from baton.v1 import node_pb2, node_pb2_grpc
from router.api.grpc.link_service import NodeLinkService
from router.fleet.node import LegDelta, LegWork, Node
from router.fleet.node_pool import NodePool
from tests.fakes.router.nodes import HandNode, make_pool, make_registration


def asynchronous(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(test)
    def run(**arguments: Any) -> None:
        asyncio.run(asyncio.wait_for(test(**arguments), 30))

    return run


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110  # what is waited for is in other objects' fields
            await asyncio.sleep(0.01)


class CountingClock:
    """A clock that moves by hand, and counts how often it is read."""

    def __init__(self) -> None:
        self.now_s, self.num_reads = 0.0, 0

    def __call__(self) -> float:
        self.num_reads += 1
        return self.now_s


class Inbox(asyncio.Queue[int]):
    """The tokens of one request."""

    def on_leg_delta(self, item: LegDelta) -> None:
        for token_id in item.delta.token_ids:
            self.put_nowait(token_id)

    def on_token(self, role: NodeRole, output_index: int, token_id: int) -> None:
        self.put_nowait(token_id)


class Router:
    """The node side of a router: its pool behind a real server."""

    def __init__(self, token: str = "", listen: str = "127.0.0.1:0") -> None:
        self.pool: NodePool = make_pool()
        access = Access(node_token=token)
        self.server = grpc.aio.server(interceptors=[CallGate(access)])
        service = NodeLinkService(self.pool, access)
        node_pb2_grpc.add_NodeLinkServicer_to_server(service, self.server)  # type: ignore[no-untyped-call]  # generated
        host = listen.rpartition(":")[0]
        self.address = f"{host}:{self.server.add_insecure_port(listen)}"

    @property
    def node(self) -> Node:
        [node] = [node for node in self.pool.nodes if node.name == "p0"]
        return node

    async def beat(self) -> None:
        """Say now and then that it lives: links to a router that is silent break."""
        while True:
            await asyncio.sleep(BEAT_INTERVAL_S)
            for node in self.pool.nodes:
                node.send(RouterBeat())

    def place(self, request_id: str, epoch: int) -> Inbox:
        """Send a request to the node; what it says of it comes into the inbox."""
        inbox = Inbox()
        self.node.open_leg(request_id, epoch, inbox, LegWork(num_tokens=3))
        self.node.send(
            PrefillCommand(
                request_id=request_id,
                epoch=epoch,
                prompt_token_ids=[1, 2, 3],
                sampling_params=SamplingParams(),
                decode_engine_id="",
                timeout_s=60,
            )
        )
        return inbox


class Scene:
    """One node, by hand, with links to some routers."""

    def __init__(self, *routers: str, token: str = "", join_timeout_s: float = 5.0) -> None:
        self.drain = Drain()
        self.commands: list[RouterCommand | AbortAll] = []
        self.stops: list[bool] = []
        self.joins: list[bool] = []
        self.links = RouterLinks(
            routers,
            make_registration("p0", NodeRole.PREFILL),
            self.commands.append,
            self.drain,
            on_joined=self._note,
            on_stop=lambda: self.stops.append(True),
            join_timeout_s=join_timeout_s,
            node_token=token,
        )

    async def _note(self, joined: bool) -> None:
        self.joins.append(joined)

    def placed(self) -> list[PrefillCommand]:
        return [command for command in self.commands if isinstance(command, PrefillCommand)]

    def say(self, command: PrefillCommand, token_id: int) -> None:
        self.links.emit((RequestDelta(command.request_id, 0, (token_id,), epoch=command.epoch),))

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[asyncio.Task[None]]:
        task = asyncio.create_task(self.links.run())
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@contextlib.asynccontextmanager
async def served(*routers: Router) -> AsyncIterator[None]:
    for router in routers:
        await router.server.start()
    beats = [asyncio.create_task(router.beat()) for router in routers]
    try:
        yield
    finally:
        for beat in beats:
            beat.cancel()
        for router in routers:
            await router.server.stop(None)


@asynchronous
async def test_one_request_id_at_two_routers_is_two_requests() -> None:
    one, other = Router(), Router()
    scene = Scene(one.address, other.address)
    async with served(one, other), scene.running():
        await until(lambda: one.pool.nodes and other.pool.nodes)
        inboxes = [one.place("same", 1), other.place("same", 2)]
        await until(lambda: len(scene.placed()) == 2)
        ids = [command.request_id for command in scene.placed()]
        assert len(set(ids)) == 2
        assert {split_request_id(name)[0] for name in ids} == {"same"}
        for command in scene.placed():
            scene.say(command, 10 + command.epoch)
        for inbox, token_id in zip(inboxes, (11, 12), strict=True):
            assert await inbox.get() == token_id
            assert inbox.empty()
        one.node.send(CancelCommand("same", 1))
        # Either router's request may have come first.
        [its_id] = [command.request_id for command in scene.placed() if command.epoch == 1]
        await until(lambda: CancelCommand(its_id, 1) in scene.commands)


@pytest.mark.medium
@asynchronous
async def test_a_router_that_dies_takes_its_own_requests_with_it_and_no_others() -> None:
    one, other = Router(), Router()
    scene = Scene(one.address, other.address)
    async with served(one, other), scene.running():
        await until(lambda: one.pool.nodes and other.pool.nodes)
        one.place("a", 1)
        inbox = other.place("b", 2)
        await until(lambda: len(scene.placed()) == 2)
        await one.server.stop(None)
        await until(lambda: any(isinstance(command, AbortAll) for command in scene.commands))
        [abort] = [command for command in scene.commands if isinstance(command, AbortAll)]
        concerned = {
            split_request_id(command.request_id)[0]: abort.concerns(command.request_id)
            for command in scene.placed()
        }
        assert concerned == {"a": True, "b": False}
        assert scene.joins[-1]  # one router is enough to be ready
        [command] = [c for c in scene.placed() if c.request_id.startswith("b")]
        scene.say(command, 7)
        assert await inbox.get() == 7


@asynchronous
async def test_a_peer_is_gone_only_when_no_router_has_it_any_more() -> None:
    one, other = Router(), Router()
    scene = Scene(one.address, other.address)
    async with served(one, other), scene.running():
        await until(lambda: one.pool.nodes and other.pool.nodes)
        peers = [
            HandNode(router.pool, make_registration("d0", NodeRole.DECODE))
            for router in (one, other)
        ]
        await until(lambda: sum(isinstance(c, PeerUpdate) for c in scene.commands) == 2)
        peers[0].leave()
        one.node.send(CancelCommand("marker", 1))  # behind it on the same stream
        await until(lambda: any(isinstance(c, CancelCommand) for c in scene.commands))
        assert PeerUpdate("d0-0", removed=True) not in scene.commands
        peers[1].leave()
        await until(lambda: PeerUpdate("d0-0", removed=True) in scene.commands)


def test_a_peer_that_left_while_the_router_was_away_is_forgotten_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: a node tried to reach such peers for ever, and no message would end this."""
    monkeypatch.setattr(router_links, "UNLISTED_S", 0.0)

    @asynchronous
    async def run() -> None:
        first = Router()
        scene = Scene(first.address)
        async with scene.running():
            async with served(first):
                await until(lambda: first.pool.nodes)
                for name in ("d0", "d1"):
                    HandNode(first.pool, make_registration(name, NodeRole.DECODE))
                await until(lambda: sum(isinstance(c, PeerUpdate) for c in scene.commands) == 2)
                scene.links.emit(PeerReport("d0-0", True, "t"))
            await until(lambda: scene.joins[-1:] == [False])
            assert PeerUpdate("d0-0", removed=True) not in scene.commands  # KV goes on meanwhile
            second = Router(listen=first.address)
            HandNode(second.pool, make_registration("d1", NodeRole.DECODE))
            async with served(second):
                await until(lambda: PeerUpdate("d0-0", removed=True) in scene.commands)
                assert not scene.links.reached

    run()


@asynchronous
async def test_a_node_leaves_a_router_that_says_nothing_for_too_many_beats() -> None:
    router = Router()
    scene = Scene(router.address)
    await router.server.start()  # it sends no beats
    async with scene.running():
        await until(lambda: scene.joins == [True])
        router.node.answered_at = math.inf  # the router answers no beat
        for _ in range(MAX_MISSED_BEATS):
            scene.links.beat(NodeBeat())
        await until(lambda: not router.node.num_missed_beats)
        assert scene.joins == [True]
        scene.links.beat(NodeBeat())
        await until(lambda: False in scene.joins)
    await router.server.stop(None)


@asynchronous
async def test_the_router_that_asks_for_the_most_beats_decides() -> None:
    routers = Router(), Router()
    scene = Scene(*(router.address for router in routers))
    assert scene.links.beat(NodeBeat()) == INTERVALS_AT_REST  # no router has been joined
    for router in routers:
        await router.server.start()  # it sends no beats
    async with scene.running():
        await until(lambda: all(router.pool.nodes for router in routers))
        for router in routers:
            router.node.answered_at = math.inf  # the router answers no beat
        for told in ((4, 3), (2, 4)):

            def is_heard(told: tuple[int, int] = told) -> bool:
                for router, intervals in zip(routers, told, strict=True):
                    router.node.send(RouterBeat(intervals))
                return scene.links.beat(NodeBeat()) == min(told)

            await until(is_heard)
        assert scene.links.beat(NodeBeat(num_running=1)) == 1
    for router in routers:
        await router.server.stop(None)


@asynchronous
async def test_a_node_is_drained_when_every_router_knows_and_serves_again() -> None:
    one, other = Router(), Router()
    scene = Scene(one.address, other.address)
    busy = NodeBeat(num_running=1)
    async with served(one, other), scene.running():
        await until(lambda: one.pool.nodes and other.pool.nodes)
        scene.links.beat(busy)
        one.node.send(DrainCommand())
        await until(lambda: scene.drain.state is ServingState.DRAINING)
        scene.links.beat(busy)
        await until(lambda: one.node.is_draining and other.node.is_draining)

        def is_drained() -> bool:
            scene.links.beat(NodeBeat())
            return scene.drain.drained.is_set()

        await until(is_drained)
        drained = ServingState.DRAINED
        await until(lambda: one.node.beat.serving_state is drained)
        await until(lambda: other.node.beat.serving_state is drained)
        other.node.send(DrainCommand(resume=True))  # any router may say so
        await until(lambda: scene.drain.state is ServingState.SERVING)
        scene.links.beat(busy)
        await until(lambda: not one.node.is_draining and not other.node.is_draining)
        assert scene.stops == []
        one.node.send(DrainCommand(stop=True))
        await until(lambda: scene.stops == [True])


@asynchronous
async def test_a_node_without_the_token_is_refused() -> None:
    router = Router(token="secret")
    async with served(router):
        for token in ("", "Secret", "secret2"):
            with pytest.raises(ConfigError, match="the router refused this node: authorization:"):
                await Scene(router.address, token=token).links.run()
        assert router.pool.nodes == []
        async with Scene(router.address, token="secret").running():
            await until(lambda: router.pool.nodes)


@pytest.mark.medium
@asynchronous
async def test_one_router_that_answers_is_enough_and_none_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    router = Router()
    silent = free_address()
    with pytest.raises(NodeUnavailableError, match=r"tried for 0\.2 s"):
        await Scene(silent, join_timeout_s=0.2).links.run()
    clock = CountingClock()
    monkeypatch.setattr(router_links, "time", SimpleNamespace(monotonic=clock))
    scene = Scene(silent, router.address)
    async with served(router), scene.running() as task:
        await until(lambda: any(scene.joins))
        clock.now_s += 100  # far more than the time for joining
        end = clock.num_reads + 3
        await until(lambda: task.done() or clock.num_reads >= end)
        assert not task.done()


@asynchronous
async def test_a_name_with_several_addresses_is_several_routers() -> None:
    one = Router()
    port = one.address.rpartition(":")[2]
    other = Router(listen=f"127.0.0.2:{port}")
    names = {"routers.test": ["127.0.0.1"]}
    loop = asyncio.get_running_loop()

    async def getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
        if host not in names:
            raise OSError("unknown name")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (a, port)) for a in names[host]]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "getaddrinfo", getaddrinfo)
        patch.setattr(router_links, "RESOLVE_INTERVAL_S", 0.1)
        scene = Scene(f"routers.test:{port}", "nobody.test:1")
        async with served(one, other), scene.running():
            names["routers.test"] = ["127.0.0.1", "127.0.0.2"]
            await until(lambda: one.pool.nodes and other.pool.nodes)


@pytest.mark.medium
@asynchronous
async def test_a_node_that_one_router_removes_by_force_still_drains_for_the_other() -> None:
    one, other = Router(), Router()
    scene = Scene(one.address, other.address)
    async with served(one, other), scene.running() as task:
        await until(lambda: one.pool.nodes and other.pool.nodes)
        inbox = other.place("a", 7)
        await until(scene.placed)
        one.pool.expel("p0")
        await until(lambda: scene.stops)
        await until(lambda: one.address not in scene.links._links)  # it dialled, and was refused
        assert not task.done()
        assert one.pool.nodes == []
        assert scene.drain.state is ServingState.DRAINING
        scene.say(scene.placed()[0], 5)
        assert await inbox.get() == 5
        scene.links.beat(NodeBeat())
        await until(lambda: other.node.is_draining)

        def is_drained() -> bool:
            scene.links.beat(NodeBeat())
            return scene.drain.drained.is_set()

        await until(is_drained)


async def ignore(_: bool) -> None:
    pass


@asynchronous
async def test_messages_of_many_logprobs_are_made_beside_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before, a node's loop stood still for 0.1 s when a prompt's logprobs went to the router."""
    registration = make_registration("p0", NodeRole.PREFILL)
    link = RouterLink("x:1", registration, lambda _: None, on_joined=ignore, join_timeout_s=1)
    threads, real = list[int](), NodeEnd.say

    def say(end: NodeEnd, event: NodeEvent, now: float) -> list[node_pb2.NodeMessage]:
        threads.append(threading.get_ident())
        return real(end, event, now)

    monkeypatch.setattr(NodeEnd, "say", say)
    few, many = (
        (RequestDelta("a@b", 0, (1,), prompt_logprobs=(None, *(TokenLogprobs(-1.0),) * number)),)
        for number in (10, 5000)
    )
    [short], [long] = await link._say(few), await link._say(many)
    assert len(short.deltas.deltas[0].prompt_logprobs) == 11
    assert len(long.deltas.deltas[0].prompt_logprobs) == 5001

    def fail(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(asyncio, "to_thread", fail)
    assert await link._say(many) == [long]
    own = threading.get_ident()
    assert [thread == own for thread in threads] == [True, False, True]


def test_a_call_is_opened_only_when_its_link_has_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: routers refused nodes that waited for their turn with an open call."""
    opened = list[object]()

    class Stub:
        def __init__(self, channel: object) -> None:
            self.channel = channel

        def Link(self, metadata: object) -> None:  # as gRPC names it
            opened.append(metadata)
            raise TimeoutError

    monkeypatch.setattr(node_pb2_grpc, "NodeLinkStub", Stub)

    @asynchronous
    async def run() -> None:
        turns, registration = asyncio.Semaphore(1), make_registration("p0", NodeRole.PREFILL)
        link = RouterLink(
            "x:1", registration, lambda _: None, on_joined=ignore, join_timeout_s=1, turns=turns
        )
        async with turns:
            running = asyncio.create_task(link.run())
            await until(lambda: bool(turns._waiters))
            assert not opened
        await until(lambda: bool(opened))
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    run()


def test_an_encode_node_does_not_make_a_prefill_node_ready() -> None:
    """`--ready-with-peer` waits for a decode node."""
    links = Scene("127.0.0.1:1").links
    links.emit(PeerReport("e", True, is_encode_node=True))
    assert links.reached == set()
    links.emit(PeerReport("d", True))
    links.emit(PeerReport("d2", False))
    assert links.reached == {"d"}
