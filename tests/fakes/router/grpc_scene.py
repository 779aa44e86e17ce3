"""A router's gRPC server in this process, over a pair of nodes that answer by themselves."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from baton.access.access import Access
from baton.api.outputs import FinishReason
from baton.api.sampling_params import SamplingParams
from baton.client.client import AsyncClient
from baton.link.words import CancelCommand, DecodeCommand, NodeRole, PrefillCommand, RouterCommand
from baton.serving.access_log import AccessLog
from baton.serving.call_gate import CallGate
from baton.serving.connection_limits import RpcLimits
from baton.serving.rpc import RpcServer
from baton.text.tokenizer import Tokenizer
from baton.v1 import inference_pb2, inference_pb2_grpc
from router.api.grpc.inference_service import InferenceService
from router.api.grpc.journal import Journal, JournalOptions
from router.calls.recovery.recovery import Recoveries
from router.calls.recovery.retry_budget import RetryOptions
from router.fleet.node_pool import NodePool
from router.intake.images.image_options import ImageOptions
from router.intake.images.image_reader import ImageReader
from router.policies.least_tokens import LeastTokens
from tests.fakes.checkpoints.demo_model import DEMO_MODEL
from tests.fakes.checkpoints.image_tokenizer import image_tokenizer, rows_layout
from tests.fakes.router.intakes import make_intake
from tests.fakes.router.name_tables import one_base
from tests.fakes.router.nodes import HandNode, make_pool, make_registration, token, token_1
from tests.fakes.router.router_scene import RecordingDispatcher

TOKENIZER = Tokenizer(DEMO_MODEL)


def expected(seed: int, num_tokens: int) -> tuple[int, ...]:
    """Return the tokens that the nodes of this scene send for a request."""
    return tuple(seed % 1000 + index for index in range(num_tokens))


class Router(Protocol):
    """The router's part that an answering node needs."""

    pool: NodePool
    talks: asyncio.Event


class AnsweringNode(HandNode):
    """A node that answers each request with the `expected` tokens while ``talks`` is set.

    Each behind a turn of the loop, as far as ``max_tokens`` goes.
    """

    def __init__(self, scene: Router, role: NodeRole) -> None:
        self.scene = scene
        super().__init__(scene.pool, make_registration(role.value, role, encodes_images=True))
        self.node.send = self._obey
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def _obey(self, command: RouterCommand) -> None:
        self.commands.append(command)
        if isinstance(command, PrefillCommand | DecodeCommand):
            self._tasks[command.epoch] = asyncio.create_task(self._answer(command))
        elif isinstance(command, CancelCommand) and command.epoch in self._tasks:
            self._tasks.pop(command.epoch).cancel()

    async def _answer(self, command: PrefillCommand | DecodeCommand) -> None:
        params, epoch = command.sampling_params, command.epoch
        assert params.seed is not None
        token_ids = expected(params.seed, params.max_tokens)
        if isinstance(command, PrefillCommand):
            finish = None if command.decode_engine_id else FinishReason.LENGTH
            self.say(token_1(command.request_id, token_ids[0], epoch=epoch, finish=finish))
            return
        for index in range(1, params.max_tokens):
            await self.scene.talks.wait()
            await asyncio.sleep(0.001)
            finish = FinishReason.LENGTH if index + 1 == params.max_tokens else None
            self.say(token(command.request_id, index, token_ids[index], epoch=epoch, finish=finish))


class GrpcScene:
    """A served router and its parts; clear ``talks`` to silence the decode node.

    Attributes:
        address: the server's address.
    """

    def __init__(
        self,
        options: JournalOptions | None = None,
        max_timeout_s: float = math.inf,
        images: ImageOptions | None = None,
    ) -> None:
        self.address = ""
        self.pool = make_pool()
        self.talks = asyncio.Event()
        self.talks.set()
        self.prefill = AnsweringNode(self, NodeRole.PREFILL)
        self.decode = AnsweringNode(self, NodeRole.DECODE)
        self.prefill.reach(self.decode)
        retries = RetryOptions(max_attempts=1, pair_timeout_s=0, return_timeout_s=0)
        self.dispatcher = RecordingDispatcher(
            self.pool, LeastTokens(), Recoveries(self.pool, retries)
        )
        intake = make_intake(
            self.dispatcher,
            TOKENIZER if images is None else image_tokenizer(),
            vocab_size=4096 if images is None else 4200,
            default_timeout_s=60.0,
            images=None if images is None else ImageReader(rows_layout(), images),
        )
        self.close = intake.close
        self.journal = Journal(options)
        self.names = one_base(self.dispatcher, intake)
        self.service = InferenceService(
            self.names, journal=self.journal, max_timeout_s=max_timeout_s
        )

    async def until_quiet(self) -> None:
        """Wait until no request is in progress."""
        async with asyncio.timeout(5):
            while self.dispatcher.num_open:  # noqa: ASYNC110
                await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def served(
    options: JournalOptions | None = None,
    *,
    access: Access | None = None,
    api_key: str = "",
    limits: RpcLimits | None = None,
    max_timeout_s: float = math.inf,
    access_log: AccessLog | None = None,
    images: ImageOptions | None = None,
) -> AsyncIterator[tuple[GrpcScene, AsyncClient]]:
    """Serve a scene by a real server; yield the scene and a client."""
    scene = GrpcScene(options, max_timeout_s, images)
    server = RpcServer(
        [inference_pb2.DESCRIPTOR.services_by_name["Inference"]],
        lambda one: inference_pb2_grpc.add_InferenceServicer_to_server(scene.service, one),  # type: ignore[no-untyped-call]  # generated
        CallGate(access, access_log=access_log),
        limits=limits,
    )
    scene.address = address = await server.start("127.0.0.1:0")
    async with AsyncClient(address, api_key=api_key) as client:
        yield scene, client
    await server.stop(0)
    scene.close()


@contextlib.asynccontextmanager
async def breakable(address: str) -> AsyncIterator[tuple[str, Callable[[], None]]]:
    """Yield an address that leads to another one, and a function that breaks its connections."""
    host, _, port = address.rpartition(":")
    writers: list[asyncio.StreamWriter] = []
    pipes: set[asyncio.Task[None]] = set()

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
        writer.close()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection(host, int(port))
        writers.extend((writer, there_writer))
        pipes.add(asyncio.create_task(pipe(reader, there_writer)))
        pipes.add(asyncio.create_task(pipe(there_reader, writer)))

    def cut() -> None:
        while writers:
            writers.pop().transport.abort()

    server = await asyncio.start_server(connect, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", cut
        cut()
        await asyncio.gather(*pipes)


def params(max_tokens: int = 8, *, seed: int | None = 100, n: int = 1) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=seed, n=n, ignore_eos=True)
