"""Unit tests of the router's end of a node's link: one bad message is not the end of the others."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import threading
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest
from google.protobuf.message import Message

from baton.api.errors import error_of
from baton.api.outputs import RequestDelta, TokenLogprobs
from baton.api.sampling_params import SamplingParams
from baton.kv.cache_use import NO_CACHE
from baton.link import wire
from baton.link.words import (
    REVISION,
    AdminReply,
    CancelCommand,
    DecodeCommand,
    NodeBeat,
    NodeEvent,
    NodeRole,
    PeerReport,
    RequestError,
)
from baton.serving.rpc import RpcServer, open_channel
from baton.v1 import node_pb2, node_pb2_grpc, types_pb2
from baton.wire import reading as wire_reading
from router.api.grpc.link_service import NodeLinkService
from router.fleet.node import LegDelta, LegWork
from router.fleet.node_claims import (
    MAX_TEXT_CHARS,
    Vocabulary,
    event_problem,
    registration_problem,
)
from router.fleet.node_pool import MAX_KEPT_CHARS, NodePool
from tests.fakes.router.http_scene import until
from tests.fakes.router.nodes import (
    DECODE_RECEIPT,
    PREFILL_RECEIPT,
    HandNode,
    failure,
    make_pool,
    make_registration,
)
from tests.fakes.router.router_scene import asynchronous


class Reader:
    """Remembers what a node said of an attempt."""

    def __init__(self) -> None:
        self.items: list[LegDelta] = []

    def on_leg_delta(self, item: LegDelta) -> None:
        self.items.append(item)

    def on_token(self, role: NodeRole, output_index: int, token_id: int) -> None:
        raise AssertionError("nothing here says a token")


@contextlib.asynccontextmanager
async def joined(pool: NodePool) -> AsyncIterator[Any]:
    """A decode node's end of its link, registered."""
    server = RpcServer(
        [node_pb2.DESCRIPTOR.services_by_name["NodeLink"]],
        lambda one: node_pb2_grpc.add_NodeLinkServicer_to_server(NodeLinkService(pool), one),  # type: ignore[no-untyped-call]  # generated
    )
    address = await server.start("127.0.0.1:0")
    async with open_channel(address) as channel, asyncio.timeout(30):
        stub = node_pb2_grpc.NodeLinkStub(channel)  # type: ignore[no-untyped-call]  # generated
        link = stub.Link()
        await link.write(wire.registration_to_proto(make_registration("d", NodeRole.DECODE)))
        assert (await link.read()).registered.problem == ""
        yield link
        link.cancel()
    await server.stop(0)


@asynchronous
async def test_a_command_that_cannot_be_sent_ends_its_request_and_not_the_link() -> None:
    pool = make_pool()
    async with joined(pool) as link:
        (node,) = pool.nodes
        reader = Reader()
        node.open_leg("a\udcff", 1, reader, LegWork(num_tokens=10))
        node.send(
            DecodeCommand(
                request_id="a\udcff",  # no text that protobuf takes
                epoch=1,
                prompt_token_ids=[1],
                sampling_params=SamplingParams(),
                prefill_engine_id="",
                timeout_s=1.0,
            )
        )
        node.send(CancelCommand("a\udcff", 1))
        node.send(CancelCommand("b", 2))
        message = await link.read()
        assert message.cancel.request_id == "b"
        (item,) = reader.items
        assert item.delta.error is not None
        assert item.delta.error.code == "INVALID_ARGUMENT"
        assert pool.nodes == [node]


class Broken(Reader):
    """Cannot take tokens."""

    def on_token(self, role: NodeRole, output_index: int, token_id: int) -> None:
        raise ArithmeticError("a bug")


def test_a_link_that_breaks_by_what_its_node_says_leaves_a_word_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool = make_pool()

    @asynchronous
    async def run() -> None:
        async with joined(pool) as link:
            (node,) = pool.nodes
            node.open_leg("a", 1, Broken(), LegWork(num_tokens=10))
            step = node_pb2.StepDeltas(epochs=[1], output_indexes=[0], token_ids=[5])
            await link.write(node_pb2.NodeMessage(deltas=step))
            assert not isinstance(await link.read(), node_pb2.RouterMessage)

    run()
    assert "a message of d broke its link" in caplog.text
    assert pool.nodes == []


@asynchronous
async def test_a_message_of_very_many_parts_is_not_read_and_ends_its_link() -> None:
    pool = make_pool()
    async with joined(pool) as link:
        many = [node_pb2.RequestDelta()] * 200_000  # two bytes each on the wire
        await link.write(node_pb2.NodeMessage(deltas=node_pb2.StepDeltas(deltas=many)))
        while await link.read():  # until the router hangs up
            pass
        assert pool.nodes == []


def test_an_error_of_a_node_is_bounded_whatever_it_answers() -> None:
    error = RequestError("INTERNAL", "x" * MAX_TEXT_CHARS)
    delta = RequestDelta("a", 0, (), epoch=1, error=error)
    for event in ((delta,), AdminReply(1, error=error)):
        problem = event_problem(make_registration("d", NodeRole.DECODE), event, Vocabulary(9, 9))
        assert problem == f"error: must have at most {MAX_TEXT_CHARS} characters"


@pytest.mark.parametrize("name", ["encoder_s", "pixels_wait_s", "fetch_wait_s"])
def test_times_in_receipts_are_numbers(name: str) -> None:
    wrong: dict[str, Any] = {name: float("nan")}
    receipt = dataclasses.replace(PREFILL_RECEIPT, **wrong)
    delta = RequestDelta("a", 0, (), epoch=1, prefill=receipt)
    node = make_registration("p", NodeRole.PREFILL)
    assert "receipt: times must be" in event_problem(node, (delta,), Vocabulary(9, 9))


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0, 1e300])
@pytest.mark.parametrize("name", ["memory_age_s", "file_age_s", "fetched_age_s", "evicted_after_s"])
def test_ages_that_pages_show_are_numbers(name: str, seconds: float) -> None:
    wrong: dict[str, Any] = {name: seconds}
    beat = NodeBeat(cache=dataclasses.replace(NO_CACHE, **wrong))
    node = make_registration("p", NodeRole.PREFILL)
    problem = event_problem(node, beat, Vocabulary(9, 9))
    assert problem.startswith(f"cache.{name}: must be 0 to")


@pytest.mark.parametrize("revision", ["x" * 129, "a\nb", "\x1b[2J"])
def test_a_revision_is_a_short_word(revision: str) -> None:
    told = make_registration("d", NodeRole.DECODE, differs={REVISION: revision})
    assert registration_problem(told) == "revision: must have at most 128 printable characters"


def test_what_a_node_says_of_a_peer_is_cut_to_what_pages_and_memory_have_room_for() -> None:
    pool = make_pool()
    prefill, decode = (
        HandNode(pool, make_registration("p", NodeRole.PREFILL)),
        HandNode(pool, make_registration("d", NodeRole.DECODE)),
    )
    pool.on_event(prefill.node, PeerReport(decode.engine_id, False, problem="x" * 60_000))
    assert len(prefill.node.reports[decode.engine_id].problem) == MAX_KEPT_CHARS
    pool.on_event(prefill.node, PeerReport(decode.engine_id, True, "t" * 257))
    assert prefill.is_hung_up


def test_what_a_node_says_to_people_is_short_and_moves_no_cursor() -> None:
    escape = "\x1b[2J"
    registration = make_registration("d", NodeRole.DECODE)

    def problem_of(event: NodeEvent) -> str:
        return event_problem(registration, event, Vocabulary(9, 9))

    def delta(**changes: Any) -> tuple[RequestDelta]:
        receipt = dataclasses.replace(DECODE_RECEIPT, **changes)
        return (RequestDelta("a", 0, (), epoch=1, decode=receipt),)

    for text in (escape, "x" * 1025):
        assert "why_drafts: must have at most 1024" in problem_of(delta(why_drafts=text))
        push = dataclasses.replace(DECODE_RECEIPT.push, transport=text)
        assert "push.transport: must have at most 256" in problem_of(delta(push=push))
        assert "names: must have at most 256" in problem_of(PeerReport("p", True, text))
        assert "stalled_thread: must have" in problem_of(NodeBeat(stalled_thread=text))
        assert "adapters: must be at most 4096 digests" in problem_of(NodeBeat(adapters=(text,)))
    assert not problem_of(delta(why_drafts="3 of 4 drafts paid"))
    assert "adapters: must be" in problem_of(NodeBeat(adapters=("0f" * 32,) * 4097))
    assert not problem_of(NodeBeat(adapters=("0f" * 32,)))
    pool = make_pool()
    prefill = HandNode(pool, make_registration("p", NodeRole.PREFILL))
    decode = HandNode(pool, registration)
    pool.on_event(prefill.node, PeerReport(decode.engine_id, False, problem=escape))
    assert prefill.node.reports[decode.engine_id].problem == "\\x1b[2J"
    reader = Reader()
    decode.node.open_leg("a", 1, reader, LegWork(num_tokens=10))
    decode.say(failure("a", "INTERNAL", escape, epoch=1))
    assert reader.items[0].delta.error == RequestError("INTERNAL", "\\x1b[2J")
    assert str(error_of(RequestError("INTERNAL", escape))) == "\\x1b[2J"


def test_what_differs_between_two_nodes_is_told_in_a_line() -> None:
    long = {"weights": "x" * 4096}
    pool = make_pool()
    prefill = HandNode(pool, make_registration("p", NodeRole.PREFILL, differs=long))
    decode = HandNode(pool, make_registration("d", NodeRole.DECODE))
    problem = prefill.node.reports[decode.engine_id].problem
    assert problem == f"weights differs: d has None, p has {'x' * 128}..."


class Hearer:
    """Remembers all that a node said, tokens that come as rows, too."""

    def __init__(self) -> None:
        self.told: list[RequestDelta] = []

    def on_leg_delta(self, item: LegDelta) -> None:
        self.told.append(item.delta)

    def on_token(self, role: NodeRole, output_index: int, token_id: int) -> None:
        self.told.append(RequestDelta("a", output_index, (token_id,), epoch=1))


def test_logprobs_of_a_long_prompt_are_read_in_a_thread_and_before_what_comes_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Logprobs of one message once held up all requests for a second and more."""
    pool = make_pool()
    threads: list[threading.Thread] = []

    def noting(*arguments: Any) -> str:
        threads.append(threading.current_thread())
        return event_problem(*arguments)

    monkeypatch.setattr("router.api.grpc.long_messages.event_problem", noting)

    @asynchronous
    async def run() -> None:
        async with joined(pool) as link:
            (node,) = pool.nodes
            reader = Hearer()
            node.open_leg("a", 1, reader, LegWork(num_tokens=10))
            top = tuple((token_id, -1.0) for token_id in range(20))
            of_prompt = (None, *[TokenLogprobs(-0.5, top)] * 900)
            for index, prompt_logprobs in enumerate((of_prompt, ())):
                await link.write(
                    wire.node_event_to_proto(
                        (RequestDelta("a", index, (5,), prompt_logprobs=prompt_logprobs, epoch=1),)
                    )
                )
            await until(lambda: len(reader.told) == 2)
            assert reader.told[0].prompt_logprobs == of_prompt
            assert [one.output_index for one in reader.told] == [0, 1]

    run()
    (thread,) = threads
    assert thread is not threading.main_thread()


@pytest.mark.parametrize(
    ("delta", "number", "problem"),
    [
        (node_pb2.RequestDelta(), 400_000, "request: must have at most 327680 parts"),
        (
            node_pb2.RequestDelta(
                logprobs=[
                    types_pb2.TokenLogprobs(
                        top_token_ids=[1] * 100_000, top_logprobs=[-1.0] * 100_000
                    )
                ]
            ),
            1,
            "logprobs: must have at most 20 others of a token",
        ),
    ],
    ids=["many", "long"],
)
def test_a_message_that_cannot_be_read_ends_the_link_with_a_line(
    delta: node_pb2.RequestDelta, number: int, problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    pool = make_pool()

    @asynchronous
    async def run() -> None:
        async with joined(pool) as link:
            step = node_pb2.StepDeltas(deltas=[delta] * number)
            await link.write(node_pb2.NodeMessage(deltas=step))
            await until(lambda: not pool.nodes)

    run()
    assert f"hung up on d, which said something impossible: {problem}" in caplog.text


MANY = 100_000
EARLY_DELTAS = [node_pb2.RequestDelta(request_id="a", epoch=1, output_index=9)] * 16_000


@pytest.mark.parametrize(
    "message",
    [
        node_pb2.NodeMessage(deltas=node_pb2.StepDeltas(deltas=[node_pb2.RequestDelta()] * MANY)),
        node_pb2.NodeMessage(
            deltas=node_pb2.StepDeltas(
                deltas=[node_pb2.RequestDelta(logprobs=[types_pb2.TokenLogprobs()] * MANY)]
            )
        ),
        node_pb2.NodeMessage(deltas=node_pb2.StepDeltas(deltas=EARLY_DELTAS)),
        node_pb2.NodeMessage(kv_events=node_pb2.KVCacheEvents(stored=[1] * MANY)),
        node_pb2.NodeMessage(register=node_pb2.Register(compatibility=dict.fromkeys(
            map(str, range(MANY // 2)), "x"))),
    ],
    ids=["deltas", "logprobs", "full deltas", "hashes", "entries"],
)  # fmt: skip
def test_no_message_of_many_parts_is_read_where_others_are_served(
    message: node_pb2.NodeMessage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To count and read the parts of one held up everybody for up to a second."""
    threads: list[threading.Thread] = []
    check = wire_reading._check_parts

    def noting(data: bytes, kind: type[Message], limit: int) -> None:
        threads.append(threading.current_thread())
        check(data, kind, limit)

    monkeypatch.setattr(wire_reading, "_check_parts", noting)
    pool = make_pool()

    @asynchronous
    async def run() -> None:
        async with joined(pool) as link:
            await link.write(message)
            await until(lambda: bool(threads))

    run()
    assert threading.main_thread() not in threads


class Counter:
    """Counts what a node said, and with how many turns of others in between."""

    def __init__(self) -> None:
        self.num_said = 0
        self.turns: set[int] = set()
        self.turn = 0

    def on_leg_delta(self, item: LegDelta) -> None:
        self.num_said += 1
        self.turns.add(self.turn)

    def on_token(self, role: NodeRole, output_index: int, token_id: int) -> None:
        self.num_said += 1
        self.turns.add(self.turn)


@pytest.mark.medium
@asynchronous
async def test_what_a_node_says_at_length_is_handed_over_with_turns_for_others() -> None:
    pool, counter = make_pool(), Counter()

    async def others() -> None:
        while True:
            counter.turn += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    async with joined(pool) as link:
        (node,) = pool.nodes
        node.open_leg("a", 1, counter, LegWork(num_tokens=10))
        rows = node_pb2.StepDeltas(
            epochs=[1] * MANY, output_indexes=[0] * MANY, token_ids=[5] * MANY, deltas=EARLY_DELTAS
        )
        await link.write(node_pb2.NodeMessage(deltas=rows))
        await until(lambda: counter.num_said == MANY + len(EARLY_DELTAS))
        assert len(counter.turns) >= 25
    task.cancel()


@asynchronous
async def test_a_registration_of_many_parts_is_refused_unread() -> None:
    server = RpcServer(
        [node_pb2.DESCRIPTOR.services_by_name["NodeLink"]],
        lambda one: node_pb2_grpc.add_NodeLinkServicer_to_server(NodeLinkService(make_pool()), one),  # type: ignore[no-untyped-call]  # generated
    )
    address = await server.start("127.0.0.1:0")
    async with open_channel(address) as channel, asyncio.timeout(30):
        link = node_pb2_grpc.NodeLinkStub(channel).Link()  # type: ignore[no-untyped-call]  # generated
        registration = wire.registration_to_proto(make_registration("d", NodeRole.DECODE))
        registration.register.compatibility.update(dict.fromkeys(map(str, range(2000)), "x"))
        await link.write(registration)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await link.read()
    await server.stop(0)
    assert caught.value.details() == "registration: has more than 1024 parts"


def test_what_a_node_has_its_peers_told_is_bounded() -> None:
    """A megabyte of it went to every node of the other role."""
    registration = make_registration("d", NodeRole.DECODE)
    for num_bytes, problem in ((2**17, ""), (2**17 + 1, "peer_info: must have at most 131072 b")):
        told = dataclasses.replace(registration, peer_info=bytes(num_bytes))
        assert registration_problem(told)[:37] == problem
