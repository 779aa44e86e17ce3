"""Deployments of real processes, the answers of their routers, and requests of many outputs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc

from baton import AsyncClient, BatonError, Client, Completion, SamplingParams
from baton.deployment.local_deployment import LocalDeployment, LocalDeploymentConfig
from baton.processes.free_address import free_address
from baton.v1 import admin_pb2, admin_pb2_grpc
from tests.fakes.checkpoints.demo_model import DEMO_MODEL
from tests.fakes.time.waiting import wait_until

READY_TIMEOUT_S = 90.0


def deployment_config(
    *node_args: str,
    model: Path | str = DEMO_MODEL,
    dtype: str = "float32",
    http: bool = False,
    local_prefill: bool = False,
    router_args: Sequence[str] = (),
    **options: Any,
) -> LocalDeploymentConfig:
    """Return the settings of a router, a prefill node and a decode node on free addresses.

    Args:
        node_args: further arguments of both nodes.
        http: whether the router has an HTTP API.
        local_prefill: whether the decode node may compute prompts itself.
        router_args: further arguments of the router.
        options: further fields of `LocalDeploymentConfig`.
    """
    return LocalDeploymentConfig(
        model=str(model),
        listen=free_address(),
        http_listen=free_address() if http else "",
        router_args=[*([] if local_prefill else ["--no-local-prefill"]), *router_args],
        node_args=["--dtype", dtype, *node_args],
        **options,
    )


@contextlib.contextmanager
def run_deployment(*node_args: str, **settings: Any) -> Iterator[LocalDeployment]:
    """Run the processes of `deployment_config`, with its arguments; yield when they are ready."""
    with LocalDeployment(deployment_config(*node_args, **settings)) as running:
        running.wait_ready(READY_TIMEOUT_S)
        yield running


@contextlib.contextmanager
def open_admin(running: LocalDeployment) -> Iterator[admin_pb2_grpc.AdminStub]:
    """Open the operators' calls of a router without keys."""
    with grpc.insecure_channel(running.config.listen) as channel:
        yield admin_pb2_grpc.AdminStub(channel)  # type: ignore[no-untyped-call]  # generated


def described_nodes(running: LocalDeployment) -> dict[str, admin_pb2.NodeDescription]:
    """Return the router's description of each node, by name."""
    with open_admin(running) as admin:
        nodes = admin.ListNodes(admin_pb2.ListNodesRequest(), timeout=20).nodes
    return {node.node_name: node for node in nodes}


def held_by(running: LocalDeployment, name: str) -> admin_pb2.ListRequestsResponse:
    """Return the requests and free blocks of a node, asked through the router."""
    with open_admin(running) as admin:
        found = admin.ListNodeRequests(admin_pb2.NodeRequest(node=name), timeout=20)
    assert isinstance(found, admin_pb2.ListRequestsResponse)
    return found


def node_with(
    running: LocalDeployment, role: str, is_it: Callable[[admin_pb2.NodeDescription], bool]
) -> str:
    """Wait for a living node of a role ("p" or "d") that meets the condition; return it."""
    found: list[str] = []

    def look() -> bool:
        nodes = described_nodes(running).items()
        found[:] = [
            name for name, node in nodes if name[0] == role and not node.lost and is_it(node)
        ]
        return bool(found)

    wait_until(look, f"a node {role} with the request")
    return found[0]


def wait_for_beats(running: LocalDeployment) -> None:
    """Wait for two beats of each node: the router then knows what the nodes cached before."""
    for _ in range(2):
        before = _rounds_of(running)
        wait_until(
            lambda before=before: all(  # type: ignore[misc]  # keeps the value
                number > before.get(name, 0) for name, number in _rounds_of(running).items()
            ),
            "a beat of each node",
        )


def _rounds_of(running: LocalDeployment) -> dict[str, int]:
    """Return how many rounds each node's engine had ended at the node's last beat."""
    return {name: node.beat.num_rounds for name, node in described_nodes(running).items()}


def wait_for_answer(address: str) -> None:
    """Wait until a router has nodes and a node answers."""

    def is_answered() -> bool:
        with contextlib.suppress(BatonError):
            client.generate([1, 2, 3], SamplingParams(max_tokens=2), timeout_s=10)
            return True
        return False

    with Client(address) as client:
        wait_until(is_answered, "an answer", timeout_s=READY_TIMEOUT_S)


def complete_all(
    running: LocalDeployment,
    prompts: Sequence[Any],
    params: SamplingParams | Sequence[SamplingParams],
) -> list[Completion]:
    """Complete all prompts at once, each with its own parameters on a stream of its own."""
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params

    async def complete() -> list[Completion]:
        async with AsyncClient(running.config.listen) as client:
            calls = [client.generate(*one) for one in zip(prompts, each, strict=True)]
            return await asyncio.gather(*calls)

    return asyncio.run(complete())
