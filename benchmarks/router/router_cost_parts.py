"""Processes beside `router_cost.py`'s router: nodes without an engine, a relay, its backend.

Each function that runs one is called in its own process. Refuses to know: models.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import uvloop

from baton.access.tls import TlsOptions, read_tls
from baton.api.outputs import DecodeReceipt, FinishReason, PrefillReceipt, PushReceipt, RequestDelta
from baton.checkpoint.model_identity import folder_identity
from baton.link import wire
from baton.link.words import (
    BEAT_INTERVAL_S,
    PAIR_ROLES,
    CancelCommand,
    DecodeCommand,
    NodeBeat,
    NodeEvent,
    NodeRegistration,
    NodeRole,
    PeerReport,
    PeerUpdate,
    PrefillCommand,
    RouterCommand,
    StepDeltas,
)
from baton.serving.rpc import open_channel
from baton.text.tokenizer import Tokenizer
from baton.v1 import node_pb2_grpc

RELAY_METHOD = "/benchmark.Relay/Stream"
MESSAGE = bytes(60)
IDLE_S = 0.002  # seconds for which an idle node sleeps, so that other processes can use its core
PREFILL_RECEIPT = PrefillReceipt(
    queue_s=0.0, prefill_s=0.0, num_chunks=1, num_computed_tokens=8, num_cached_tokens=0
)
DECODE_RECEIPT = DecodeReceipt(
    parked_s=0.0,
    first_step_s=0.0,
    steps_until_first=1,
    num_prompt_tokens_computed=0,
    num_forwards=1,
    num_preemptions=0,
    push=PushReceipt(num_bytes=1, num_blocks=1, transport="none", exposed_transfer_s=0.0),
)


async def steps(interval_s: float) -> AsyncIterator[None]:
    """Yield at each step of an engine: every ``interval_s`` seconds; 0: as fast as possible."""
    due = time.perf_counter()
    while True:
        # a late node catches up on the steps of at most 1 s
        due = max(due + interval_s, time.perf_counter() - 1.0)
        await asyncio.sleep(max(due - time.perf_counter(), 0))
        yield


class TalkingNode:
    """A node's end of its link to a router; it sends one token per step for each request."""

    def __init__(self, registration: NodeRegistration, token_ids: list[int]) -> None:
        self._registration = registration
        self._token_ids = itertools.cycle(token_ids)
        self._active: dict[int, list[Any]] = {}  # epoch: [request id, next index, number of tokens]
        self._said: list[NodeEvent] = []

    async def run(self, router: str, interval_s: float, tls: TlsOptions) -> None:
        """Join a router, and send tokens until this process is killed."""
        async with open_channel(router, read_tls(tls)) as channel:
            call = node_pb2_grpc.NodeLinkStub(channel).Link()  # type: ignore[no-untyped-call]  # generated
            await call.write(wire.registration_to_proto(self._registration))
            self._reader = asyncio.create_task(self._read(call))
            beat_at = step_at = 0.0
            async for _ in steps(min(interval_s, BEAT_INTERVAL_S)):
                if not self._active and not self._said:
                    await asyncio.sleep(IDLE_S)
                said, self._said = self._said, []
                if time.perf_counter() >= beat_at:
                    beat_at = time.perf_counter() + BEAT_INTERVAL_S
                    num_free = self._registration.num_blocks
                    said.append(NodeBeat(num_running=len(self._active), num_free_blocks=num_free))
                if self._active and time.perf_counter() >= step_at:
                    if interval_s > BEAT_INTERVAL_S:
                        step_at = time.perf_counter() + interval_s
                    said.append(self._step())
                for event in said:
                    await call.write(wire.node_event_to_proto(event))

    async def _read(self, call: Any) -> None:
        async for message in call:
            command = wire.command_from_proto(message)
            if command is not None:
                self._obey(command)

    def _obey(self, command: RouterCommand) -> None:
        if isinstance(command, PeerUpdate):
            self._said.append(PeerReport(command.engine_id, True, "none"))
        elif isinstance(command, PrefillCommand):
            finish = None if command.decode_engine_id else FinishReason.LENGTH
            delta = RequestDelta(
                command.request_id, 0, (next(self._token_ids),), finish, epoch=command.epoch,
                prefill=PREFILL_RECEIPT,
            )  # fmt: skip
            self._said.append((delta,))
        elif isinstance(command, DecodeCommand):
            max_tokens = command.sampling_params.max_tokens
            self._active[command.epoch] = [command.request_id, 1, max_tokens]
        elif isinstance(command, CancelCommand):
            self._active.pop(command.epoch, None)

    def _step(self) -> StepDeltas:
        epochs, indexes, ended = [], [], []
        for epoch, request in self._active.items():
            request_id, index, num_tokens = request
            if index + 1 == num_tokens:
                last = RequestDelta(
                    request_id, index, (5,), FinishReason.LENGTH, epoch=epoch, decode=DECODE_RECEIPT
                )
                ended.append(last)
                continue
            epochs.append(epoch)
            indexes.append(index)
            request[1] += 1
        for delta in ended:
            del self._active[delta.epoch]
        token_ids = list(itertools.islice(self._token_ids, len(epochs)))
        return StepDeltas(epochs, indexes, token_ids, tuple(ended))


def registration(role: NodeRole, model: Path) -> NodeRegistration:
    return NodeRegistration(
        node_name=role.value,
        engine_id=role.value,
        role=role,
        version="0",
        address="127.0.0.1:1",
        peer_info=b"",
        compatibility=folder_identity(model),
        max_model_len=2**20,
        num_blocks=2**20,
        block_size=16,
    )


async def run_nodes(
    routers: list[str], model: Path, text: str, interval_s: float, tls: TlsOptions
) -> None:
    """Run a prefill and a decode node for each router, which send the tokens of ``text``."""
    token_ids = Tokenizer(model).encode(text)
    async with asyncio.TaskGroup() as group:
        for router, role in itertools.product(routers, PAIR_ROLES):
            node = TalkingNode(registration(role, model), token_ids)
            group.create_task(
                node.run(router, interval_s if role is NodeRole.DECODE else 0.002, tls)
            )


# ---------------------------------------------------------------- a bare relay


async def serve_streams(listen: str, behavior: Any) -> None:
    """Serve one gRPC method: the request is bytes, the answer a stream of bytes."""
    server = grpc.aio.server()
    handler = grpc.unary_stream_rpc_method_handler(behavior)
    _, service, method = RELAY_METHOD.split("/")
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {method: handler}),)
    )
    server.add_insecure_port(listen)
    await server.start()
    await server.wait_for_termination()


async def run_relay(listen: str, backend: str) -> None:
    """Run a relay, which forwards each message of each stream without decoding it."""
    async with grpc.aio.insecure_channel(backend) as channel:
        method = channel.unary_stream(RELAY_METHOD, None, None)

        async def relay(request: bytes, _context: Any) -> AsyncIterator[bytes]:
            call = method(request)
            try:
                async for message in call:
                    yield message
            finally:
                call.cancel()

        await serve_streams(listen, relay)


async def run_backend(listen: str, interval_s: float) -> None:
    """Run the relay's backend, which sends one message per step on each stream."""

    async def talk(_request: bytes, _context: Any) -> AsyncIterator[bytes]:
        async for _ in steps(interval_s):
            yield MESSAGE

    await serve_streams(listen, talk)


def nodes(routers: str, model: str, interval_s: str, cert: str, key: str, ca: str) -> None:
    """Run a prefill and a decode node for each router, given comma-separated addresses."""
    text = Path(__file__).read_text(encoding="utf-8")
    tls = TlsOptions(cert=cert, key=key, ca=ca)
    uvloop.run(run_nodes(routers.split(","), Path(model), text, float(interval_s), tls))


def relay(listen: str, backend_address: str) -> None:
    """Run the relay until this process is killed."""
    uvloop.run(run_relay(listen, backend_address))


def backend(listen: str, interval_s: str) -> None:
    """Run the relay's backend until this process is killed."""
    uvloop.run(run_backend(listen, float(interval_s)))
