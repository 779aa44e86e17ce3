"""Every server answers health checks and reflection, and the clients' commands work against it."""

from __future__ import annotations

import re
import subprocess
import sys

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from baton.deployment.local_deployment import LocalDeployment
from baton.v1 import admin_pb2, admin_pb2_grpc

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(120)]


def node_addresses(router: str) -> dict[str, str]:
    with grpc.insecure_channel(router) as channel:
        stub = admin_pb2_grpc.AdminStub(channel)  # type: ignore[no-untyped-call]  # generated
        nodes = stub.ListNodes(admin_pb2.ListNodesRequest()).nodes
    return {node.node_name: node.address for node in nodes}


def services_of(address: str) -> set[str]:
    with grpc.insecure_channel(address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        answers = list(stub.ServerReflectionInfo(iter([request])))
    return {s.name for answer in answers for s in answer.list_services_response.service}


def health_of(address: str, service: str) -> int:
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        status: int = stub.Check(health_pb2.HealthCheckRequest(service=service)).status
    return status


def test_every_server_is_healthy_and_says_what_it_serves(deployment: LocalDeployment) -> None:
    router = deployment.config.listen
    expected: dict[str, set[str]] = {
        router: {"baton.v1.Inference", "baton.v1.NodeLink", "baton.v1.Admin"},
        **{a: set() for a in node_addresses(router).values()},
    }
    assert len(expected) == 3
    for address, services in expected.items():
        ours = {name for name in services_of(address) if name.startswith("baton.")}
        assert ours == services
        for service in ("", *services):
            assert health_of(address, service) == health_pb2.HealthCheckResponse.SERVING


def test_commands_print_what_a_person_wants_to_see(deployment: LocalDeployment) -> None:
    router = deployment.config.listen

    def baton(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "baton", *arguments],
            input=text, capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip

    generated = baton("generate", "def add(a, b):\n", "--router", router, "--max-tokens", "8")
    assert generated.stdout.strip()
    assert "TTFT" in generated.stderr
    assert "prompt tokens" in generated.stderr
    nodes = baton("admin", "nodes", "--router", router).stdout
    assert "p0" in nodes
    assert "decode" in nodes
    assert re.search(r"nixl/ucx \w+ [\d.]+ [kMG]?B/s", " ".join(nodes.split()))
    assert "blocks free" in baton("admin", "requests", "d0", "--router", router).stdout
    question = "Write the function `is_empty(self)`: Return a bool.\n"
    chat = baton("chat", "--router", router, "--max-tokens", "16", text=question + "\n" + question)
    assert chat.stdout.strip()
    assert not chat.stdout.startswith("> "), "a script reads answers, not prompts"
