"""Router and node as the programs that they are, in this process: who gets in where, with keys."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import aiohttp
import grpc
import grpc.aio
import pytest
from prometheus_client.registry import Collector

from baton.access.access import Access
from baton.access.api_keys import entry_text
from baton.access.audit_log import AuditLog
from baton.api.errors import ConfigError, PermissionDeniedError
from baton.api.sampling_params import SamplingParams
from baton.checkpoint.model_folder import config_digest
from baton.client.client import AsyncClient
from baton.link.words import (
    AbortAll,
    NodeBeat,
    NodeEvent,
    NodeRegistration,
    NodeRole,
    RouterCommand,
)
from baton.processes.free_address import free_address
from baton.serving.rpc import bearer, open_channel
from baton.telemetry.ledger import Ledger
from baton.telemetry.round_watch import Rounds
from baton.v1 import admin_pb2, admin_pb2_grpc
from node_runtime.node_program import run_node_program
from router.config import RouterConfig
from router.program import serve
from sim_node.cluster import SimCluster
from tests.fakes.checkpoints.demo_model import DEMO_MODEL
from tests.fakes.router.nodes import make_registration

pytestmark = pytest.mark.medium

CLIENT, OPERATOR, NODE = "the client's key", "the operator's key", "the node's key"


class EmptyNode:
    """Computes nothing, and says so."""

    adapters = weights = None

    def compute_first_steps(self) -> Future[None]:
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def registration(self, address: str) -> NodeRegistration:
        made = make_registration("d0", NodeRole.DECODE)
        fields = {name: getattr(made, name) for name in made.__dataclass_fields__}
        fields |= {"address": address, "compatibility": {"model": config_digest(DEMO_MODEL)}}
        return NodeRegistration(**fields)

    def submit(self, command: RouterCommand | AbortAll) -> None: ...

    def beat(self) -> NodeBeat:
        return NodeBeat(num_free_blocks=10)

    def requests(self) -> Iterable[Any]:
        return ()

    def ledger(self) -> Future[Ledger]:
        done: Future[Ledger] = Future()
        done.set_result(
            Ledger(holdings=(), num_blocks=10, num_free_blocks=10, num_references=0, orphans=(),
                   overdrawn=())
        )  # fmt: skip
        return done

    def rounds(self) -> dict[str, Rounds]:
        return {}

    def dump(self, error: Exception) -> None:
        raise NotImplementedError

    def flush_prefix_cache(self) -> Future[int]:
        done: Future[int] = Future()
        done.set_result(4)
        return done

    def collector(self) -> Collector:
        class Nothing(Collector):
            def collect(self) -> Iterable[Any]:
                return ()

        return Nothing()

    def close(self) -> None: ...


@contextlib.asynccontextmanager
async def running(program: Any) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(program)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def run_node(router: str, page: str, access: Access, token: str) -> Any:
    def make(emit: Callable[[NodeEvent], None], on_death: Callable[[Exception], None]) -> EmptyNode:
        return EmptyNode()

    return run_node_program(
        make,
        routers=[router],
        listen="127.0.0.1:0",
        join_timeout_s=10,
        node_token=token,
        metrics_listen=page,
        access=access,
    )


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text(
        entry_text(CLIENT, "alice")
        + entry_text(OPERATOR, "ops", roles=["look", "operate"])
        + entry_text(NODE, "nodes", roles=["join"]),
        encoding="utf-8",
    )
    return path


async def status_of(url: str, key: str = "") -> int:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as response:
        return response.status


async def list_services(address: str, key: str = "") -> grpc.StatusCode:
    path = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    async with open_channel(address) as channel:
        call = cast(Any, channel).unary_unary(path)(b"", metadata=bearer(key), timeout=5)
        code: grpc.StatusCode = await call.code()
        return code


def test_with_keys_every_port_of_every_program_asks_for_one(
    keys_file: Path, tmp_path: Path
) -> None:
    listen, http, page = free_address(), free_address(), free_address()
    router_log, node_log = tmp_path / "router.jsonl", tmp_path / "node.jsonl"

    async def run() -> None:
        config = RouterConfig(
            model=str(DEMO_MODEL), listen=listen, http_listen=http, served_model_name="demo",
            api_keys_file=str(keys_file), audit_log=str(router_log),
        )  # fmt: skip
        access = Access(keys_file=keys_file, audit=AuditLog(str(node_log), program="d0"))
        async with running(serve(config)) as router, open_channel(listen) as channel:
            stub = admin_pb2_grpc.AdminStub(channel)  # type: ignore[no-untyped-call]  # generated
            operator = {"metadata": bearer(OPERATOR), "timeout": 5, "wait_for_ready": True}
            await stub.GetPolicy(admin_pb2.GetPolicyRequest(), **operator)
            with pytest.raises(ConfigError, match=r"refused this node: authorization: the API key"):
                await run_node(listen, "", Access(), "a wrong key")
            with pytest.raises(ConfigError, match=r"alice must have the role join for this"):
                await run_node(listen, "", Access(), CLIENT)
            async with running(run_node(listen, page, access, NODE)) as node:
                nodes: list[Any] = []
                while not nodes:
                    found = await stub.ListNodes(admin_pb2.ListNodesRequest(), **operator)
                    nodes = list(found.nodes)
                assert (nodes[0].node_name, nodes[0].lost) == ("d0", False)
                flushed = await stub.FlushCache(admin_pb2.AdminFlushCacheRequest(), **operator)
                assert [(one.num_prefixes, one.problem) for one in flushed.nodes] == [(4, "")]
                own = nodes[0].address
                assert await list_services(own) is grpc.StatusCode.UNAUTHENTICATED
                assert await list_services(own, OPERATOR) is not grpc.StatusCode.UNAUTHENTICATED
                for url in (f"http://{page}/metrics", f"http://{page}/x", f"http://{http}/metrics"):
                    assert await status_of(url) == 401
                    assert await status_of(url, CLIENT) == 403
                assert await status_of(f"http://{page}/metrics", OPERATOR) == 200
                assert await status_of(f"http://{http}/metrics", OPERATOR) == 200
                assert await status_of(f"http://{http}/v1/models", CLIENT) == 200
                assert await status_of(f"http://{http}/health") == 200
                assert not node.done()
                assert not router.done()

    asyncio.run(asyncio.wait_for(run(), 60))
    gc.unfreeze()  # which a router does with what there is at its start
    told = [json.loads(line) for line in router_log.read_text(encoding="utf-8").splitlines()]
    assert {"failed", "refused", "joined", "looked", "changed", "left"} <= {
        event["event"] for event in told
    }
    [flush] = [event for event in told if event["call"].endswith("FlushCache")]
    assert (flush["event"], flush["who"], flush["address"]) == ("changed", "ops", "127.0.0.1")
    events = [json.loads(line) for line in node_log.read_text(encoding="utf-8").splitlines()]
    assert ("changed", "ops", "flush_cache") in {
        (event["event"], event["who"], event["call"]) for event in events
    }
    text = router_log.read_text(encoding="utf-8") + node_log.read_text(encoding="utf-8")
    assert not any(key in text for key in (CLIENT, OPERATOR, NODE, "a wrong key"))


def test_without_any_credential_everything_works_on_loopback() -> None:
    listen, http, page = free_address(), free_address(), free_address()

    async def run() -> None:
        config = RouterConfig(model=str(DEMO_MODEL), listen=listen, http_listen=http, audit_log="")
        async with running(serve(config)), open_channel(listen) as channel:
            stub = admin_pb2_grpc.AdminStub(channel)  # type: ignore[no-untyped-call]  # generated
            calls = {"timeout": 5, "wait_for_ready": True}
            await stub.SetPolicy(admin_pb2.SetPolicyRequest(policy="cost"), **calls)
            async with running(run_node(listen, page, Access(), "")):
                nodes: list[Any] = []
                while not nodes:
                    found = await stub.ListNodes(admin_pb2.ListNodesRequest(), **calls)
                    nodes = list(found.nodes)
                audit = await stub.Audit(admin_pb2.AuditRequest(), **calls)
                assert [(one.node_name, one.problem) for one in audit.nodes] == [("d0", "")]
                assert await list_services(nodes[0].address) is not (
                    grpc.StatusCode.UNAUTHENTICATED
                )
                assert await status_of(f"http://{page}/metrics") == 200
                assert await status_of(f"http://{http}/metrics") == 200

    asyncio.run(asyncio.wait_for(run(), 60))
    gc.unfreeze()


def test_simulated_nodes_and_a_client_bring_their_keys_and_requests_are_served(
    keys_file: Path,
) -> None:
    listen = free_address()

    async def run() -> None:
        config = RouterConfig(
            model=str(DEMO_MODEL), listen=listen, http_listen="", api_keys_file=str(keys_file),
            audit_log="",
        )  # fmt: skip
        cluster = SimCluster(listen, str(DEMO_MODEL), num_prefill=1, num_decode=1, node_token=NODE)
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        async with running(serve(config)), cluster:
            async with AsyncClient(listen, api_key=CLIENT) as client:
                completion = await client.generate([1, 2, 3], params)
                assert len(completion.token_ids) == 4
            async with AsyncClient(listen, api_key=NODE) as client:
                with pytest.raises(PermissionDeniedError, match="nodes must have the role infer"):
                    await client.generate([1, 2, 3], params)
            async with open_channel(listen) as channel:
                stub = admin_pb2_grpc.AdminStub(channel)  # type: ignore[no-untyped-call]  # generated
                operator = {"metadata": bearer(OPERATOR), "timeout": 5}
                [trace] = (
                    await stub.ListRequests(admin_pb2.ListRouterRequestsRequest(), **operator)
                ).requests
                assert (trace.tenant, trace.state) == ("alice", "finished")
                audit = await stub.Audit(admin_pb2.AuditRequest(node="sim-d0"), **operator)
                [node] = audit.nodes
                assert node.problem == "sim-d0: this node answers no admin calls"

    asyncio.run(asyncio.wait_for(run(), 60))
    gc.unfreeze()
