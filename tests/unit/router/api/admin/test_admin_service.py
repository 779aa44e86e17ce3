"""Tests of the admin service over hand-driven nodes and real sockets: rights, changes, errors."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
import pytest

from baton.access.access import Access
from baton.access.identity import ANYBODY, ANYBODY_HERE
from baton.api.errors import RequestCancelledError
from baton.api.outputs import FinishReason
from baton.link.words import DrainCommand, NodeBeat, NodeRole, ServingState
from baton.serving.call_gate import CallGate
from baton.serving.rpc import RpcServer, open_channel
from baton.v1 import admin_pb2, admin_pb2_grpc, node_pb2
from router.api.admin import service
from router.api.admin.service import AdminService
from router.api.admin.views import describe_nodes
from router.policies.cost import Cost
from tests.fakes.router.intakes import make_intake
from tests.fakes.router.name_tables import one_base
from tests.fakes.router.nodes import HandNode, make_registration, token_1
from tests.fakes.router.router_scene import Scene, asynchronous

SERVICE = admin_pb2.DESCRIPTOR.services_by_name["Admin"]
Call = Callable[..., Any]


@contextlib.asynccontextmanager
async def served(
    scene: Scene, *, token: str = "", is_public: bool = False, given: str = ""
) -> AsyncIterator[Call]:
    """A router's admin service; calls of it by name and fields of the request."""
    intake = make_intake(scene.dispatcher, None, vocab_size=100, default_timeout_s=60)
    admin = AdminService(one_base(scene.dispatcher, intake), policy="least_tokens")
    server = RpcServer(
        [SERVICE],
        lambda one: admin_pb2_grpc.add_AdminServicer_to_server(admin, one),  # type: ignore[no-untyped-call]  # generated
        CallGate(Access(admin_token=token), ANYBODY if is_public else ANYBODY_HERE),
    )
    address = await server.start("127.0.0.1:0")
    metadata = (("authorization", f"Bearer {given}"),) if given else ()
    try:
        async with open_channel(address) as channel:
            stub = admin_pb2_grpc.AdminStub(channel)  # type: ignore[no-untyped-call]  # generated

            async def call(method: str, **fields: Any) -> Any:
                name = SERVICE.methods_by_name[method].input_type.name
                request = getattr(admin_pb2, name)(**fields)
                return await getattr(stub, method)(request, metadata=metadata, timeout=5)

            yield call
    finally:
        await server.stop(0)


async def code_of(call: Call, method: str, **fields: Any) -> tuple[grpc.StatusCode, str]:
    """The status that a call fails with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(method, **fields)
    return caught.value.code(), caught.value.details() or ""


@asynchronous
async def test_with_a_token_only_who_brings_it_may_call() -> None:
    async with served(Scene(), token="right", given="right") as call:
        assert (await call("GetPolicy")).policy == "least_tokens"
    for given in ("", "wrong", "right1"):
        async with served(Scene(), token="right", given=given) as call:
            for method in ("ListNodes", "SetPolicy"):
                code, details = await code_of(call, method)
                assert code is grpc.StatusCode.UNAUTHENTICATED
                assert details.startswith("authorization: ")


@asynchronous
async def test_without_a_token_others_machines_may_look_and_change_nothing() -> None:
    scene = Scene()
    changes = {"Drain", "Resume", "Remove", "Abort", "SetPolicy", "FlushCache", "SetLogLevel",
               "Profile", "ReleaseQuarantine", "ChangeRollout", "SetName",
               "RemoveName", "LoadAdapter", "PinAdapter", "UnloadAdapter",
               "ChangeWeights", "DropPins"}  # fmt: skip
    async with served(scene, is_public=True) as call:
        for method in SERVICE.methods_by_name:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await call(method)
                continue
            code, _ = await code_of(call, method)
            assert (code is grpc.StatusCode.PERMISSION_DENIED) == (method in changes), method
    assert scene.prefill.of(DrainCommand) == []


@asynchronous
async def test_drain_resume_and_remove_are_told_to_the_node_and_logged() -> None:
    scene = Scene()
    async with served(scene) as call:
        await call("Drain", node="d0")
        await call("Resume", node="d0-0")  # by its engine id
        await call("Remove", node="d0")
        assert scene.decode.of(DrainCommand) == [
            DrainCommand(),
            DrainCommand(resume=True),
            DrainCommand(stop=True),
        ]
        scene.pool.on_event(scene.decode.node, NodeBeat(serving_state=ServingState.DRAINED))
        found = await call("GetNode", node="d0")
        assert found.beat.serving_state == node_pb2.SERVING_STATE_DRAINED
        assert (await call("GetNode", node="p0")).peers[0].node_name == "d0"
        code, why = await code_of(call, "Drain", node="nobody")
        assert code is grpc.StatusCode.NOT_FOUND
        never = "none of this name has joined this router, which started 0 s ago"
        assert why == f"there is no node 'nobody': {never}"


@asynchronous
async def test_a_node_removed_by_force_is_out_at_once_and_may_only_come_back_anew() -> None:
    scene = Scene()
    async with served(scene) as call:
        assert (await call("Remove", node="d0", force=True)).lost
        assert [node.name for node in scene.pool.nodes] == ["p0"]
        again = make_registration("d0", NodeRole.DECODE)
        assert scene.pool.refusal(again) == "d0 was removed by an operator; start it anew"
        assert scene.pool.refusal(make_registration("d0", NodeRole.DECODE, incarnation=1)) == ""
        code, _ = await code_of(call, "Remove", node="d0", force=True)
        assert code is grpc.StatusCode.NOT_FOUND


@asynchronous
async def test_trace_requests_stats_and_abort_go_by_the_log() -> None:
    scene = Scene()
    await scene.call("a")
    async with served(scene) as call:
        assert (await call("Trace", request_id="a")).state == "running"
        stats = await call("GetStats")
        assert (stats.num_open, stats.num_queued, stats.admission.num_begun) == (1, 0, 1)
        scene.prefill.say(token_1("a", 5, epoch=scene.epoch, finish=FinishReason.STOP))
        await scene.end()
        trace = await call("Trace", request_id="a")
        assert (trace.state, trace.finish_reason, trace.num_output_tokens) == (
            "finished", "stop", 1,
        )  # fmt: skip
        assert trace.receipt.prefill_node == "p0"
        assert not trace.attempts[0].HasField("failed_s")
        await scene.call("b")
        assert [one.request_id for one in (await call("ListRequests")).requests] == ["b", "a"]
        assert len((await call("ListRequests", limit=1)).requests) == 1
        [open_one] = (await call("ListRequests", open_only=True)).requests
        assert open_one.request_id == "b"
        await call("Abort", request_id="b")
        with pytest.raises(RequestCancelledError, match="an operator ended the request"):
            await scene.end()
        code, details = await code_of(call, "Abort", request_id="b")
        assert (code, details) == (grpc.StatusCode.NOT_FOUND, "request 'b' is not open")
        stats = await call("GetStats")
        assert (stats.num_finished, dict(stats.num_failed)) == (1, {"CANCELLED": 1})
        assert [node.node_name for node in stats.nodes] == ["p0"]
        code, _ = await code_of(call, "Trace", request_id="never")
        assert code is grpc.StatusCode.NOT_FOUND


@asynchronous
async def test_explain_tells_of_the_past_and_of_now() -> None:
    scene = Scene(num_decode=2)
    scene.dispatcher.placer.policy = Cost()
    await scene.call("a")
    async with served(scene) as call:
        [decision] = (await call("Explain", request_id="a")).decisions
        assert decision.num_prompt_tokens == 3
        [attempt] = (await call("Trace", request_id="a")).attempts
        chosen = decision.candidates[0]
        assert (chosen.prefill_node, chosen.decode_node) == ("p0", attempt.decode_node)
        assert {term.name for term in chosen.terms} >= {"prefill_ms", "decode_ms"}
        terms = {term.name: term.value for term in chosen.terms}
        assert decision.forecast.compute_ms == pytest.approx(terms["prefill_ms"])
        assert (decision.forecast.num_tokens, decision.forecast.is_measured) == (3, False)
        scene.prefill.say(token_1("a", 5, epoch=scene.epoch))
        [decision] = (await call("Explain", request_id="a")).decisions
        assert decision.forecast.is_measured
        assert 0 < decision.forecast.measured_compute_ms <= 200  # as the receipt says, at most
        [now] = (await call("Explain", num_prompt_tokens=50, max_tokens=9)).decisions
        assert {one.decode_node for one in now.candidates} == {"d0", "d1"}
        assert now.candidates[0].decode_node == now.decode_node
        assert (now.num_prompt_tokens, now.max_tokens) == (50, 9)
        for node in scene.decodes:
            node.leave()
        code, details = await code_of(call, "Explain", num_prompt_tokens=50)
        assert code is grpc.StatusCode.UNAVAILABLE
        assert details == "no decode node has joined the router"
        code, _ = await code_of(call, "Explain")
        assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert scene.task is not None
    await asyncio.gather(scene.task, return_exceptions=True)


@asynchronous
async def test_the_policy_of_the_next_request_can_be_chosen() -> None:
    scene = Scene()
    async with served(scene) as call:
        assert (await call("SetPolicy", policy="cost")).policy == "cost"
        assert isinstance(scene.dispatcher.placer.policy, Cost)
        code, details = await code_of(call, "SetPolicy", policy="best")
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert details.startswith("policy: unknown routing policy 'best'; known: cost,")
        assert isinstance(scene.dispatcher.placer.policy, Cost)
        assert (await call("GetStats")).policy == "cost"


@asynchronous
async def test_the_log_level_of_the_router_can_be_changed_and_the_change_is_logged() -> None:
    ours = logging.getLogger("router")
    before = ours.level
    try:
        async with served(Scene()) as call:
            await call("SetLogLevel", level="error")
            assert ours.level == logging.ERROR
            assert (await call("SetLogLevel", level="info")).previous == "error"
            code, details = await code_of(call, "SetLogLevel", level="loud")
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert details == "log_level: must be one of debug, info, warning, error, got 'loud'"
    finally:
        logging.getLogger().setLevel(before)


@asynchronous
async def test_a_profile_of_the_router_says_what_its_thread_does() -> None:
    async with served(Scene()) as call:
        found = await call("Profile", seconds=0.2)
        assert found.num_samples > 5
        names = [one.function for one in found.functions]
        assert any("run" in name for name in names)
        assert found.functions[0].num_own <= found.functions[0].num_total <= found.num_samples
        code, details = await code_of(call, "Profile", seconds=1000)
        assert (code, details) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "seconds: must be above 0 and at most 60, got 1000",
        )


@asynchronous
async def test_a_rollout_is_told_paused_undone_and_resumed() -> None:
    scene = Scene()
    HandNode(scene.pool, make_registration("p7", NodeRole.PREFILL, differs={"revision": "v2"}))
    async with served(scene) as call:
        told = await call("GetRollout")
        assert told.state == "steady"
        assert [(one.revision, one.state, one.share) for one in told.revisions] == [
            ("", "serving", 1.0),
            ("v2", "incomplete", 0.0),
        ]
        assert list(told.revisions[1].nodes) == ["p7"]
        paused = await call("ChangeRollout", action=admin_pb2.ROLLOUT_ACTION_PAUSE)
        assert paused.state == "paused"
        undone = await call("ChangeRollout", action=admin_pb2.ROLLOUT_ACTION_UNDO)
        assert (undone.state, undone.revisions[1].state) == ("undone", "undone")
        resumed = await call("ChangeRollout", action=admin_pb2.ROLLOUT_ACTION_RESUME)
        assert resumed.state == "steady"
        for fields, code in (
            ({}, grpc.StatusCode.INVALID_ARGUMENT),
            (
                {"action": admin_pb2.ROLLOUT_ACTION_UNDO, "revision": "v9"},
                grpc.StatusCode.NOT_FOUND,
            ),
        ):
            assert (await code_of(call, "ChangeRollout", **fields))[0] is code


@asynchronous
async def test_others_have_their_turn_while_many_nodes_are_described() -> None:
    scene = Scene(num_decode=5)
    pool, num_turns = scene.dispatcher.pool, 0

    async def another() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(another())
    nodes = await describe_nodes(pool, pool.nodes)
    task.cancel()
    assert len(nodes) == 6
    assert num_turns >= 5


@asynchronous
async def test_a_call_waits_for_a_node_that_was_just_lost_and_joins_again() -> None:
    """Regression: a node that stood still for a second was unknown until it had joined again."""
    scene = Scene()
    async with served(scene) as call:
        scene.decode.leave()
        asked = asyncio.create_task(call("Drain", node="d0"))
        looked = asyncio.create_task(call("GetNode", node="d0"))
        assert (await looked).lost  # the router shows what it knows at once
        assert not asked.done()
        again = HandNode(scene.pool, make_registration("d0", NodeRole.DECODE))
        assert (await asked).engine_id == "d0-0"
        assert again.of(DrainCommand) == [DrainCommand()]


@pytest.mark.parametrize(
    ("why", "on_purpose", "told"),
    [
        ("is silent (missed 4 beats)", False, "it is silent (missed 4 beats), 0 s ago"),
        ("said something impossible", True, "it said something impossible, 0 s ago"),
    ],
)
def test_an_unknown_nodes_error_says_why_it_left(
    why: str, on_purpose: bool, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "RETURN_S", 0.01)

    @asynchronous
    async def run() -> None:
        scene = Scene()
        async with served(scene) as call:
            scene.pool.remove(scene.decode.node, why, on_purpose=on_purpose)
            for name in ("d0", "d0-0"):  # name and engine id
                code, problem = await code_of(call, "Drain", node=name)
                assert code is grpc.StatusCode.NOT_FOUND
                assert problem == f"there is no node {name!r}: {told}"

    run()


@asynchronous
async def test_a_drained_node_that_left_is_not_awaited() -> None:
    scene = Scene()
    async with served(scene) as call:
        scene.pool.on_event(scene.decode.node, NodeBeat(serving_state=ServingState.DRAINED))
        scene.decode.leave()
        _, problem = await code_of(call, "Resume", node="d0")
        assert problem == "there is no node 'd0': it left after its drain, 0 s ago"
