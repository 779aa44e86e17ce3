"""A router driven by hand: real node processes join it, and a test sends each its commands.

It pairs every prefill node with every decode node, beats, and collects what nodes say. It sends a
request again once, and only if a node was silent. Refuses to know: names, policies, other retries.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from baton.api.sampling_params import SamplingParams
from baton.link import wire
from baton.link.router_end import registered
from baton.link.words import (
    BEAT_INTERVAL_S,
    AdminCall,
    AdminReply,
    CancelCommand,
    DecodeCommand,
    NodeBeat,
    NodeRegistration,
    NodeRole,
    PeerReport,
    PeerUpdate,
    PrefillCommand,
    RequestDelta,
    RequestError,
    RouterBeat,
    RouterCommand,
    StepDeltas,
)
from baton.v1 import admin_pb2, node_pb2, node_pb2_grpc

_TIMEOUT_S = 60.0


@dataclass(slots=True)
class JoinedNode:
    """A node's link, and what the node said last."""

    registration: NodeRegistration
    commands: asyncio.Queue[RouterCommand] = field(default_factory=asyncio.Queue)
    beat: NodeBeat = field(default_factory=NodeBeat)
    reached: set[str] = field(default_factory=set)  # engine ids of connected peers
    replies: dict[int, bytes | RequestError] = field(default_factory=dict)


@dataclass(slots=True)
class Answer:
    """Answers of nodes to one request.

    Attributes:
        num_computed_tokens: prompt tokens that the prefill node computed.
        num_cached_tokens: prompt tokens that it found in its cache.
    """

    tokens: dict[int, int] = field(default_factory=dict)
    errors: list[RequestError] = field(default_factory=list)
    has_ended: bool = False
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0

    @property
    def output(self) -> list[int]:
        return [self.tokens[index] for index in sorted(self.tokens)]


async def until(condition: Callable[[], object]) -> None:
    """Wait until a condition holds; raises TimeoutError after a minute."""
    async with asyncio.timeout(_TIMEOUT_S):
        while not condition():  # noqa: ASYNC110 - what it waits for sets no event
            await asyncio.sleep(0.005)


class HandRouter:
    """A server of `NodeLink`; nodes are there once `wait_for_pair` has returned.

    Attributes:
        num_silences: requests that were sent again, because a node was silent.
    """

    def __init__(self) -> None:
        self.address = ""
        self.nodes: dict[NodeRole, JoinedNode] = {}
        self.answers: dict[int, Answer] = {}
        self.num_silences = 0
        self._epochs = itertools.count(1)
        self._server = grpc.aio.server()
        node_pb2_grpc.add_NodeLinkServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]  # generated

    async def start(self) -> None:
        port = self._server.add_insecure_port("127.0.0.1:0")
        self.address = f"127.0.0.1:{port}"
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(0)

    async def wait_for_pair(self) -> None:
        """Wait until both nodes have joined and reach each other."""
        nodes = self.nodes
        await until(lambda: len(nodes) == 2 and all(node.reached for node in nodes.values()))

    async def _wait_for_beats(self) -> None:
        """Wait until each node has sent a further beat."""
        before = {role: node.beat for role, node in self.nodes.items()}
        await until(lambda: all(node.beat is not before[role] for role, node in self.nodes.items()))

    async def ask(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        adapter: str = "",
        *,
        source: str = "",
        of_prefill: str | None = None,
    ) -> Answer:
        """Have a prompt computed by both nodes; return what they said.

        On a busy machine a node may get no processor for a second, and the other node then rightly
        fails the request. Like a real router, this router then sends the request again, but once.

        Args:
            source: the adapter's folder, from which nodes may load it.
            of_prefill: another adapter, or none, for the prefill node alone.
        """
        answer = await self._ask_once(prompt, params, adapter, source, of_prefill)
        if not any("no beat from " in error.message for error in answer.errors):
            return answer
        self.num_silences += 1
        await self._wait_for_beats()
        await self.wait_for_pair()
        return await self._ask_once(prompt, params, adapter, source, of_prefill)

    async def _ask_once(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        adapter: str,
        source: str,
        of_prefill: str | None,
    ) -> Answer:
        epoch, prefill, decode = next(self._epochs), *self._pair()
        answer = self.answers[epoch] = Answer()
        shared: dict[str, Any] = {
            "request_id": f"request-{epoch}", "epoch": epoch, "prompt_token_ids": list(prompt),
            "sampling_params": params, "timeout_s": _TIMEOUT_S, "adapter_source": source,
        }  # fmt: skip
        on_decode = DecodeCommand(
            **shared, prefill_engine_id=prefill.registration.engine_id, adapter=adapter
        )
        on_prefill = PrefillCommand(
            **shared,
            decode_engine_id=decode.registration.engine_id,
            adapter=adapter if of_prefill is None else of_prefill,
        )
        decode.commands.put_nowait(on_decode)
        prefill.commands.put_nowait(on_prefill)
        await until(lambda: answer.has_ended or answer.errors)
        if answer.errors:
            for node in (prefill, decode):
                node.commands.put_nowait(CancelCommand(f"request-{epoch}", epoch))
        return answer

    async def admin(
        self, role: NodeRole, **request: Any
    ) -> admin_pb2.AdaptersDescription | RequestError:
        """Ask a node about its adapters, as operators do."""
        node, call_id = self.nodes[role], next(self._epochs)
        message = admin_pb2.NodeAdminRequest(**request)
        node.commands.put_nowait(AdminCall(call_id, message.SerializeToString(), _TIMEOUT_S, "me"))
        await until(lambda: call_id in node.replies)
        reply = node.replies[call_id]
        if isinstance(reply, RequestError):
            return reply
        response = admin_pb2.NodeAdminResponse.FromString(reply)
        kind = str(response.WhichOneof("response"))
        found: admin_pb2.AdaptersDescription = getattr(response, kind)
        return found

    async def Link(  # gRPC's naming
        self, messages: AsyncIterator[node_pb2.NodeMessage], context: object
    ) -> AsyncIterator[node_pb2.RouterMessage]:
        first = await anext(messages)
        registration = wire.registration_from_proto(first.register)
        assert registration is not None
        node = JoinedNode(registration)
        answer = registered("", "hand")
        answer.registered.batches_peers = False  # like a router of an older release
        yield answer
        for other in self.nodes.values():
            for one, peer in ((node, other), (other, node)):
                update = PeerUpdate(peer.registration.engine_id, peer.registration.peer_info)
                one.commands.put_nowait(update)
        self.nodes[registration.role] = node
        reader = asyncio.create_task(self._read(node, messages))
        try:
            while not reader.done():
                try:
                    async with asyncio.timeout(BEAT_INTERVAL_S):
                        command = await node.commands.get()
                except TimeoutError:
                    command = RouterBeat()
                yield wire.command_to_proto(command)
        finally:
            reader.cancel()

    async def _read(self, node: JoinedNode, messages: AsyncIterator[node_pb2.NodeMessage]) -> None:
        async for message in messages:
            event = wire.node_event_from_proto(message)
            match event:
                case NodeBeat():
                    node.beat = event
                case PeerReport(connected=True):
                    node.reached.add(event.engine_id)
                case PeerReport():
                    node.reached.discard(event.engine_id)
                case AdminReply():
                    node.replies[event.call_id] = event.error or event.part
                case StepDeltas():
                    self._take(node, event)

    def _take(self, node: JoinedNode, step: StepDeltas) -> None:
        rows = zip(step.epochs, step.output_indexes, step.token_ids, strict=True)
        for epoch, index, token_id in rows:
            self.answers[epoch].tokens[index] = token_id
        for delta in step.deltas:
            self._take_delta(node, delta)

    def _take_delta(self, node: JoinedNode, delta: RequestDelta) -> None:
        answer = self.answers[delta.epoch]
        answer.tokens |= dict(enumerate(delta.token_ids, delta.output_index))
        if delta.error is not None:
            answer.errors.append(delta.error)
        if delta.prefill is not None:
            answer.num_computed_tokens = delta.prefill.num_computed_tokens
            answer.num_cached_tokens = delta.prefill.num_cached_tokens
        answer.has_ended |= (
            delta.finish_reason is not None and node.registration.role is NodeRole.DECODE
        )

    def _pair(self) -> tuple[JoinedNode, JoinedNode]:
        return self.nodes[NodeRole.PREFILL], self.nodes[NodeRole.DECODE]
