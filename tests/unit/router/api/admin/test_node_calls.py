"""Tests that operators' calls to nodes use the nodes' links: the router opens no connection."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from baton.access.access import Access
from baton.access.audit_log import AuditLog
from baton.api.errors import InvalidRequestError, NodeUnavailableError
from baton.api.outputs import RequestDelta
from baton.link.admin_answers import PART_BYTES, Answer
from baton.link.drain import Drain
from baton.link.router_links import RouterLinks
from baton.link.words import (
    AdminCall,
    AdminReply,
    NodeBeat,
    NodeRole,
    RequestView,
    RouterBeat,
)
from baton.serving.rpc import RpcServer
from baton.telemetry.ledger import BlockHolding, BlockOwner, Ledger
from baton.v1 import admin_pb2, node_pb2, node_pb2_grpc
from node_runtime.node_admin import NodeAdmin
from router.api.admin.node_calls import NodeCalls
from router.api.grpc.link_service import NodeLinkService
from router.fleet.node import LegWork, Node
from tests.fakes.router.http_scene import until
from tests.fakes.router.nodes import make_pool, make_registration
from tests.fakes.router.router_scene import asynchronous


class AskedNode:
    """A node with a ledger of so many holdings."""

    def __init__(self, num_holdings: int = 1) -> None:
        self.num_flushes = 0
        self._ledger = Ledger(
            holdings=tuple(
                BlockHolding(owner=BlockOwner.REQUEST, block_ids=(i,), request_id=f"{i:0>1000}")
                for i in range(num_holdings)
            ),
            num_blocks=10, num_free_blocks=9, num_references=1, orphans=(), overdrawn=(),
        )  # fmt: skip

    def beat(self) -> NodeBeat:
        return NodeBeat(num_free_blocks=7)

    def requests(self) -> list[RequestView]:
        return [
            RequestView(
                request_id="a~r", status="RUNNING", transfer_state="", num_tokens=1,
                num_computed_tokens=1, num_blocks=1, age_s=0.5,
            )
        ]  # fmt: skip

    def ledger(self) -> Future[Ledger]:
        future: Future[Ledger] = Future()
        future.set_result(self._ledger)
        return future

    def flush_prefix_cache(self) -> Future[int]:
        self.num_flushes += 1
        future: Future[int] = Future()
        future.set_result(3)
        return future


@contextlib.asynccontextmanager
async def joined(answer: Answer | None) -> AsyncIterator[tuple[Node, RouterLinks]]:
    """A node at a router, both with real sockets; the address that it registers is nobody's."""
    pool = make_pool()
    service = NodeLinkService(pool)
    server = RpcServer(
        [node_pb2.DESCRIPTOR.services_by_name["NodeLink"]],
        lambda one: node_pb2_grpc.add_NodeLinkServicer_to_server(service, one),  # type: ignore[no-untyped-call]  # generated
    )
    address = await server.start("127.0.0.1:0")

    async def on_joined(joined: bool) -> None: ...

    links = RouterLinks(
        [address],
        make_registration("d0", NodeRole.DECODE),
        lambda command: None,
        Drain(),
        on_joined=on_joined,
        on_stop=lambda: None,
        join_timeout_s=5,
        answer=answer,
    )
    task = asyncio.create_task(links.run())
    try:
        async with asyncio.timeout(30):
            await until(lambda: pool.nodes)
            yield pool.nodes[0], links
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await server.stop(0)


@asynchronous
async def test_every_call_is_answered_over_the_link() -> None:
    asked = AskedNode()
    async with joined(NodeAdmin(asked, 10).answer) as (node, _):
        calls = NodeCalls("bob")
        listed = await calls.list_requests(node)
        assert [one.request_id for one in listed.requests] == ["a~r"]
        assert (listed.num_free_blocks, listed.num_blocks) == (7, 10)
        assert (await calls.list_blocks(node)).holdings[0].owner == "request"
        assert (await calls.flush_cache(node)).num_prefixes == 3
        assert asked.num_flushes == 1
        with pytest.raises(InvalidRequestError, match=r"^log_level: must be one of"):
            await calls.set_log_level(node, "loud")
        with pytest.raises(InvalidRequestError, match=r"^seconds: must be above 0"):
            await calls.profile(node, 1000)
        before = logging.getLogger().level
        try:
            await calls.set_log_level(node, "error")
            assert logging.getLogger().level == logging.ERROR
        finally:
            logging.getLogger().setLevel(before)


def test_the_nodes_audit_log_says_which_operator_asked(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    log = AuditLog(str(path), program="d0")

    @asynchronous
    async def run() -> None:
        admin = NodeAdmin(AskedNode(), 10, Access(audit=log))
        async with joined(admin.answer) as (node, _):
            await NodeCalls("bob").flush_cache(node)
            await NodeCalls("carol").list_blocks(node)

    run()
    log.close()
    events = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [(one["event"], one["who"], one["call"]) for one in events] == [
        ("changed", "bob", "flush_cache"),
        ("looked", "carol", "list_blocks"),
    ]


@pytest.mark.medium
@asynchronous
async def test_a_ledger_of_megabytes_comes_in_parts_between_which_tokens_go() -> None:
    asked = AskedNode(num_holdings=9_000)
    parts: list[int] = []
    heard_at: list[int] = []  # how many parts had come when a token did

    class Reader:
        def on_leg_delta(self, item: Any) -> None:
            heard_at.append(len(parts))

        def on_token(self, role: NodeRole, output_index: int, token_id: int) -> None:
            heard_at.append(len(parts))

    async with joined(NodeAdmin(asked, 10).answer) as (node, links):
        node.open_leg("r", 1, Reader(), LegWork(num_tokens=10))
        take = node.replies.on_reply

        def note(reply: AdminReply) -> None:
            parts.append(len(reply.part))
            take(reply)

        node.replies.on_reply = note  # type: ignore[method-assign]
        call = asyncio.create_task(NodeCalls().list_blocks(node))
        index = 0
        while not call.done():
            links.emit((RequestDelta("r", index, (1,), epoch=1),))
            index = (index + 1) % 500
            node.send(RouterBeat())
            await asyncio.sleep(0.001)
        ledger = await call
        assert len(ledger.holdings) == 9_000
        assert sum(parts) > 8 * 2**20  # more than one message may have
        assert max(parts) <= PART_BYTES + 2000
        assert len({number for number in heard_at if 0 < number < len(parts)}) > 5


@asynchronous
async def test_an_answer_that_is_too_large_is_an_error_on_both_sides() -> None:
    async def answer(call: AdminCall) -> list[bytes]:
        return [bytes(2**20)] * 17

    async with joined(answer) as (node, _):
        with pytest.raises(NodeUnavailableError, match="d0: the answer has 17825792 bytes, the"):
            await NodeCalls().list_blocks(node)
        call_id, promise = node.replies.open_call()  # of a node that keeps to no limit
        part = admin_pb2.NodeAdminResponse(
            list_blocks=admin_pb2.ListBlocksResponse(
                holdings=[admin_pb2.BlockHolding(request_id="x" * 2**20)]
            )
        )
        for _ in range(17):
            node.replies.on_reply(AdminReply(call_id, part.SerializeToString(), last=False))
        with pytest.raises(NodeUnavailableError, match="the answer has more than 16777216 bytes"):
            await promise


@asynchronous
async def test_an_answer_of_millions_of_empty_parts_is_not_kept() -> None:
    """16 MiB of them, which are allowed, made 700 MiB."""
    async with joined(None) as (node, _):
        for num_bytes in (PART_BYTES, 2**20):
            call_id, promise = node.replies.open_call()
            listed = admin_pb2.ListBlocksResponse.FromString(b"\x0a\x00" * (num_bytes // 2))
            part = admin_pb2.NodeAdminResponse(list_blocks=listed).SerializeToString()
            for _ in range(16 * 2**20 // len(part)):
                node.replies.on_reply(AdminReply(call_id, part, last=False))
            with pytest.raises(NodeUnavailableError, match="the answer has more than 524288 parts"):
                await promise
            assert len(node.replies._open[call_id].response.list_blocks.holdings) <= 2**19
            node.replies.close_call(call_id)


@asynchronous
async def test_a_node_that_answers_none_nothing_or_nonsense_is_one_line_that_names_it() -> None:
    async with joined(None) as (node, _):
        with pytest.raises(NodeUnavailableError, match="d0: this node answers no admin calls"):
            await NodeCalls().list_blocks(node)

    async def nonsense(call: AdminCall) -> list[bytes]:
        return [b"\xff\xff"]

    async with joined(nonsense) as (node, _):
        with pytest.raises(NodeUnavailableError, match="d0: its answer is no message"):
            await NodeCalls().list_blocks(node)

    async def silent(call: AdminCall) -> list[bytes]:
        await asyncio.Event().wait()
        return []

    async with joined(silent) as (node, _):
        impatient = NodeCalls(timeout_s=0.2)
        with pytest.raises(NodeUnavailableError, match=r"d0: (did not|no) answer within 0.2 s"):
            await impatient.list_blocks(node)


@asynchronous
async def test_a_node_answers_eight_calls_at_a_time_and_refuses_the_others() -> None:
    async def silent(call: AdminCall) -> list[bytes]:
        await asyncio.Event().wait()
        return []

    async with joined(silent) as (node, _):
        calls = [asyncio.create_task(NodeCalls().list_blocks(node)) for _ in range(20)]
        while len(calls) > 8:
            done, _pending = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
            for call in done:
                with pytest.raises(NodeUnavailableError, match="8 admin calls are open here"):
                    call.result()
                calls.remove(call)
        await asyncio.sleep(0.1)
        assert len(calls) == 8
        assert not any(call.done() for call in calls)
        for call in calls:
            call.cancel()


@asynchronous
async def test_a_node_that_goes_away_ends_the_calls_that_wait_for_it() -> None:
    asked = asyncio.Event()

    async def silent(call: AdminCall) -> list[bytes]:
        asked.set()
        await asyncio.Event().wait()
        return []

    async with joined(silent) as (node, _):
        call = asyncio.create_task(NodeCalls().list_blocks(node))
        await asked.wait()
        node.hang_up()
        with pytest.raises(NodeUnavailableError, match="d0: it went away"):
            await call
