"""Tests of a router that has just started: requests wait for the nodes that are to join."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from array import array
from collections.abc import Iterator
from typing import Any

import pytest

from baton.api.errors import (
    BatonError,
    ConfigError,
    DeadlineExceededError,
    NodeUnavailableError,
    OverloadedError,
    RequestCancelledError,
)
from baton.api.outputs import FinishReason, RequestDelta, TextDelta
from baton.api.pooling import PoolingKind, PoolingParams
from baton.api.sampling_params import SamplingParams
from baton.link.words import DecodeCommand, NodeRole, PrefillCommand
from baton.processes.free_address import free_address
from baton.serving.rpc import RpcServer
from router.calls.call import Call
from router.calls.dispatcher import Dispatcher
from router.calls.recovery.recovery import Recoveries
from router.config import RouterConfig
from router.fleet.lost_nodes import LostNodes
from router.fleet.node import Node
from router.gate.admission import make_admission
from router.gate.admission_options import AdmissionOptions
from router.policies.cost import Cost
from router.program import serve
from tests.fakes.checkpoints.demo_model import DEMO_MODEL
from tests.fakes.router.nodes import (
    PREFILL_RECEIPT,
    HandNode,
    failure,
    join_pair,
    make_pool,
    make_registration,
    token,
)
from tests.fakes.router.router_scene import Scene
from tests.fakes.time.virtual_clock import VirtualClock
from tests.fakes.time.virtual_loop import VirtualLoop

LENGTH = FinishReason.LENGTH
GRACE_S = 10.0
NO_NODE = "no prefill node has joined the router"
POOLED = PoolingParams(PoolingKind.MEAN)


class Started:
    """A router without nodes, on virtual time, that has just started."""

    def __init__(self, *, grace_s: float = GRACE_S, max_queued: int = 0) -> None:
        self.clock = VirtualClock()
        self.loop = VirtualLoop(self.clock)
        self.pool = make_pool(may_self_prefill=True, clock=self.clock)
        self.pool.lost_nodes.expect_newcomers(grace_s)
        admission = make_admission(self.pool, AdmissionOptions(max_queued_requests=max_queued))
        self.dispatcher = Dispatcher(self.pool, Cost(), Recoveries(self.pool), admission)
        self.outputs: list[TextDelta] = []

    def begin(self, **fields: Any) -> asyncio.Task[None]:
        """Begin a call; see `Scene.make`."""
        return self.run(self._collect(Scene.make(**fields)))

    def begin_pooled(self) -> asyncio.Task[None]:
        """Begin a call for an embedding."""
        params = SamplingParams(max_tokens=1, seed=0)
        call = dataclasses.replace(Scene.make(params=params), pooling=POOLED)
        return self.run(self._collect(call))

    def run(self, coroutine: Any) -> asyncio.Task[Any]:
        task = self.loop.create_task(coroutine)
        self.loop.run_until_idle()
        return task

    async def _collect(self, call: Call) -> None:
        self.outputs.extend([output async for output in self.dispatcher.run(call)])

    def join(self, name: str, role: NodeRole, *, alone: bool = False) -> HandNode:
        registration = dataclasses.replace(make_registration(name, role), computes_prompts=alone)
        with self.loop.entered():
            hand = HandNode(self.pool, registration)
        self.loop.run_until_idle()
        return hand

    def join_pair(self) -> tuple[HandNode, HandNode]:
        """Join two nodes that reach each other."""
        with self.loop.entered():
            prefill, decode = join_pair(self.pool)
            prefill.reach(decode)
        self.pass_time(0.01)
        return prefill, decode

    def say(self, hand: HandNode, delta: RequestDelta) -> None:
        with self.loop.entered():
            hand.say(delta)
        self.loop.run_until_idle()

    def pass_time(self, seconds: float) -> None:
        """Let time pass, timer by timer."""
        end = self.clock() + seconds
        self.loop.run_until_idle()
        while 0 < self.loop.idle_s <= end - self.clock():
            self.clock.advance(self.loop.idle_s)
            self.loop.run_until_idle()
        self.clock.now_s = end
        self.loop.run_until_idle()

    @property
    def num_held(self) -> int:
        """Number of calls that the router holds in any place."""
        return self.dispatcher.num_open + self.dispatcher.admission.num_queued


@pytest.fixture
def started() -> Iterator[Started]:
    router = Started()
    with contextlib.closing(router.loop):
        yield router
        assert router.num_held == 0


def error_of(task: asyncio.Task[None]) -> BatonError:
    assert task.done()
    error = task.exception()
    assert isinstance(error, BatonError)
    return error


def test_a_call_waits_for_the_first_pair_of_nodes(started: Started) -> None:
    """Regression: right after a restart, calls failed because no node had joined yet."""
    task = started.begin()
    started.pass_time(1.5)
    assert not task.done()
    prefill, _ = started.join_pair()
    epoch = prefill.of(PrefillCommand)[0].epoch
    started.say(prefill, token("a", 0, 10, epoch=epoch, finish=LENGTH))
    assert task.exception() is None
    assert [delta.token_ids for delta in started.outputs] == [(10,)]


def test_a_call_waits_although_one_node_of_its_pair_is_there(started: Started) -> None:
    started.join("p0", NodeRole.PREFILL)
    task = started.begin()
    started.pass_time(GRACE_S - 0.1)
    assert not task.done()
    started.pass_time(0.2)
    assert str(error_of(task)) == "no decode node has joined the router"


def test_without_nodes_a_call_gets_its_reason_when_the_grace_is_over(started: Started) -> None:
    task = started.begin()
    started.pass_time(GRACE_S - 0.1)
    assert not task.done()
    started.pass_time(0.2)
    assert isinstance(error_of(task), NodeUnavailableError)
    assert str(error_of(task)) == NO_NODE
    assert str(error_of(started.begin())) == NO_NODE  # now at once


def test_a_router_without_grace_refuses_calls_at_once() -> None:
    router = Started(grace_s=0.0)
    with contextlib.closing(router.loop):
        assert str(error_of(router.begin())) == NO_NODE


def test_a_call_keeps_its_deadline(started: Started) -> None:
    task = started.begin(timeout_s=3.0)
    started.pass_time(2.9)
    assert not task.done()
    started.pass_time(0.2)
    assert isinstance(error_of(task), DeadlineExceededError)


def test_a_client_that_leaves_frees_its_place(started: Started) -> None:
    task = started.begin()
    assert started.num_held
    task.cancel()
    started.loop.run_until_idle()
    assert task.cancelled()


def test_an_operator_cancels_a_waiting_call(started: Started) -> None:
    task = started.begin()
    assert started.dispatcher.abort("a", "by an operator")
    started.loop.run_until_idle()
    assert isinstance(error_of(task), RequestCancelledError)


def test_a_router_that_stops_ends_waiting_calls(started: Started) -> None:
    task = started.begin()
    with started.loop.entered():
        started.dispatcher.stop("the router is stopping")
    started.loop.run_until_idle()
    assert str(error_of(task)) == "the router is stopping"


def test_waiting_calls_are_bounded_by_the_gate() -> None:
    router = Started(max_queued=2)
    with contextlib.closing(router.loop):
        tasks = [router.begin(request_id=f"r{number}") for number in range(3)]
        assert isinstance(error_of(tasks[-1]), OverloadedError)
        assert not any(task.done() for task in tasks[:-1])
        router.pass_time(GRACE_S + 0.1)
        assert [str(error_of(task)) for task in tasks[:-1]] == [NO_NODE] * 2


def test_a_pooled_call_waits_for_a_prefill_node_only(started: Started) -> None:
    task = started.begin_pooled()
    started.pass_time(1.0)
    assert not task.done()
    prefill = started.join("p0", NodeRole.PREFILL)
    started.pass_time(0.01)
    [command] = prefill.of(PrefillCommand)
    values = array("f", [1.0]).tobytes()
    started.say(
        prefill,
        RequestDelta(
            command.request_id, 0, (), FinishReason.STOP,
            epoch=command.epoch, prefill=PREFILL_RECEIPT, pooled=values,
        ),
    )  # fmt: skip
    assert task.exception() is None


def test_a_pooled_call_gets_its_reason_when_the_grace_is_over(started: Started) -> None:
    task = started.begin_pooled()
    started.pass_time(GRACE_S + 0.1)
    assert str(error_of(task)) == NO_NODE


def test_a_call_waits_for_a_decode_node_that_works_alone(started: Started) -> None:
    task = started.begin()
    started.pass_time(1.0)
    decode = started.join("d0", NodeRole.DECODE, alone=True)
    started.pass_time(0.01)
    [command] = decode.of(DecodeCommand)
    started.say(decode, failure("a", "INVALID_ARGUMENT", "decode: x", epoch=command.epoch))
    assert "decode: x" in str(error_of(task))


def test_the_only_decode_node_that_works_alone_is_awaited_when_it_is_lost() -> None:
    """Regression: because no prefill node had ever joined, the call failed at once."""
    router = Started(grace_s=0.0)
    with contextlib.closing(router.loop):
        decode = router.join("d0", NodeRole.DECODE, alone=True)
        with router.loop.entered():
            decode.leave()
        task = router.begin()
        router.pass_time(20.0)
        again = router.join("d0", NodeRole.DECODE, alone=True)
        router.pass_time(0.01)
        [command] = again.of(DecodeCommand)
        router.say(again, token("a", 0, 10, epoch=command.epoch, finish=LENGTH))
        assert task.exception() is None


def test_a_command_to_a_node_waits_until_the_node_joins(started: Started) -> None:
    search: asyncio.Task[Node | None] = started.run(started.pool.find_or_await_node("p0", 15.0))
    started.pass_time(2.0)
    assert not search.done()
    hand = started.join("p0", NodeRole.PREFILL)
    assert search.result() is hand.node
    unknown: asyncio.Task[Node | None] = started.run(started.pool.find_or_await_node("x", 15.0))
    started.pass_time(GRACE_S)
    assert unknown.result() is None


def test_nodes_are_expected_before_the_first_server_listens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []
    expect = LostNodes.expect_newcomers

    def note_expect(self: LostNodes, for_s: float) -> None:
        calls.append("expect")
        expect(self, for_s)

    async def refuse_start(self: RpcServer, listen: str) -> str:
        calls.append("start")
        raise ConfigError("no port is free")

    monkeypatch.setattr(LostNodes, "expect_newcomers", note_expect)
    monkeypatch.setattr(RpcServer, "start", refuse_start)
    config = RouterConfig(
        model=str(DEMO_MODEL), listen=free_address(), http_listen="", audit_log=""
    )
    with pytest.raises(ConfigError, match="no port is free"):
        asyncio.run(serve(config))
    assert calls == ["expect", "start"]
