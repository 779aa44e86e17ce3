"""A router with two base models behind one address, over nodes that answer by themselves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from baton.access.access import Access
from baton.access.identity import ANYBODY_HERE
from baton.client.client import AsyncClient
from baton.link.words import NodeRole, PrefillCommand
from baton.serving.call_gate import CallGate
from baton.serving.rpc import RpcServer
from baton.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc
from router.api.admin.service import AdminService
from router.api.grpc.inference_service import InferenceService
from router.api.http_server import HttpServer
from router.calls.recovery.recovery import Recoveries
from router.calls.recovery.retry_budget import RetryOptions
from router.intake.metrics import RouterMetrics
from router.names.base_model import BaseModel
from router.names.metrics_page import MetricsPage
from router.names.names_file import NamesFile
from router.names.served_name import ServedName
from router.names.table import NameTable
from router.policies.least_tokens import LeastTokens
from tests.fakes.router.grpc_scene import TOKENIZER, AnsweringNode
from tests.fakes.router.intakes import make_intake
from tests.fakes.router.nodes import make_pool
from tests.fakes.router.router_scene import RecordingDispatcher

RETRIES = RetryOptions(max_attempts=1, pair_timeout_s=30, return_timeout_s=30)


class NamedModel:
    """One base model with a pair of nodes; clear ``talks`` to silence its decode node."""

    def __init__(self, model: str, *, has_nodes: bool = True) -> None:
        self.pool = make_pool()
        self.talks = asyncio.Event()
        self.talks.set()
        self.nodes: list[AnsweringNode] = []
        if has_nodes:
            self.join()
        recoveries = Recoveries(self.pool, RETRIES)
        self.dispatcher = RecordingDispatcher(self.pool, LeastTokens(), recoveries)
        metrics = RouterMetrics(self.pool)
        intake = make_intake(
            self.dispatcher, TOKENIZER, vocab_size=4096, default_timeout_s=60.0, metrics=metrics
        )
        self.base = BaseModel(
            model=model, dispatcher=self.dispatcher, intake=intake, metrics=metrics
        )

    def join(self) -> None:
        """Join a pair of nodes."""
        self.nodes = [AnsweringNode(self, role) for role in (NodeRole.PREFILL, NodeRole.DECODE)]
        self.nodes[0].reach(self.nodes[1])

    @property
    def num_prompts(self) -> int:
        """Number of prompts that its prefill node was asked for."""
        return len(self.nodes[0].of(PrefillCommand)) if self.nodes else 0


class NamedModels:
    """A router with the base models "a" and "b", which are served under these names.

    Attributes:
        url: URL of the HTTP API.
        address: address of the gRPC API and the admin service.
    """

    def __init__(
        self,
        models: Sequence[NamedModel] | None = None,
        *,
        names: Sequence[ServedName] | None = None,
        file: Path | None = None,
        access: Access | None = None,
    ) -> None:
        self.a, self.b = models or (NamedModel("a"), NamedModel("b"))
        bases = [self.a.base, self.b.base]
        served = names or [ServedName(name=base.model, base=base) for base in bases]
        self.table = NameTable(bases, served, NamesFile(file) if file else None)
        self.access = access or Access()
        self.access.note_names(lambda: self.table.names)
        page = MetricsPage({base.model: base.metrics for base in bases})
        self.http = HttpServer(self.table, page, access=self.access)
        self.url = self.address = ""
        self.session: aiohttp.ClientSession

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[NamedModels]:
        """Serve all APIs inside this context."""
        service = InferenceService(self.table)
        admin = AdminService(self.table, policy="least_tokens")

        def register(server: object) -> None:
            inference_pb2_grpc.add_InferenceServicer_to_server(service, server)  # type: ignore[no-untyped-call]  # generated
            admin_pb2_grpc.add_AdminServicer_to_server(admin, server)  # type: ignore[no-untyped-call]  # generated

        services = [
            inference_pb2.DESCRIPTOR.services_by_name["Inference"],
            admin_pb2.DESCRIPTOR.services_by_name["Admin"],
        ]
        server = RpcServer(services, register, CallGate(self.access, ANYBODY_HERE))
        self.url = f"http://{await self.http.start('127.0.0.1:0')}"
        self.address = await server.start("127.0.0.1:0")
        async with aiohttp.ClientSession() as self.session:
            yield self
        await server.stop(0)
        await self.http.stop()

    def client(self, api_key: str = "") -> AsyncClient:
        """Return a gRPC client."""
        return AsyncClient(self.address, api_key=api_key)

    async def complete(self, model: str, key: str = "") -> tuple[int, dict[str, Any]]:
        """Ask for three tokens over HTTP; return the status and the body."""
        body = {"model": model, "prompt": "x", "max_tokens": 3, "seed": 1}
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        path = f"{self.url}/v1/completions"
        async with self.session.post(path, json=body, headers=headers) as response:
            return response.status, await response.json()
