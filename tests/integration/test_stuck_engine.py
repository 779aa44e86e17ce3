"""A real node whose engine's thread stands still: its requests go on elsewhere, health says so, and
its process ends itself."""

from __future__ import annotations

import os
import time
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton import Client, SamplingParams
from baton.deployment.local_deployment import LocalDeployment, LocalDeploymentConfig
from baton.processes.free_address import free_address
from baton.v1 import admin_pb2, admin_pb2_grpc
from tests.fakes.time.waiting import wait_until
from tests.integration.conftest import DEMO_MODEL, READY_TIMEOUT_S

pytestmark = [pytest.mark.large, pytest.mark.nixl, pytest.mark.timeout(200)]

PARAMS = SamplingParams(max_tokens=150, temperature=0.0, ignore_eos=True)
ENGINE_TIMEOUT_S = 1.5


def test_an_engine_that_hangs_while_its_process_beats_is_found_out(tmp_path: Path) -> None:
    config = LocalDeploymentConfig(
        model=str(DEMO_MODEL),
        listen=free_address(),
        num_prefill=1,
        num_decode=2,
        router_args=("--engine-timeout-s", str(ENGINE_TIMEOUT_S), "--no-local-prefill"),
        node_args=["--num-blocks", "400"],
    )
    os.environ["BATON_DUMP_FOLDER"] = str(tmp_path)
    try:
        with LocalDeployment(config) as running:
            running.wait_ready(READY_TIMEOUT_S)
            running.restart("d0", "--inject-faults", "hang_engine=40", "--engine-timeout-s", "12")
            running.wait_ready(READY_TIMEOUT_S)
            longest_s, met_it = stream_until_it_hangs(config.listen)
            assert met_it
            assert longest_s < 8.0  # and not the deadline of ten minutes
            (node,) = (n for n in nodes(config.listen) if n.node_name == "d0")
            assert node.health == "stuck"
            with grpc.insecure_channel(node.address) as channel:
                stub = health_pb2_grpc.HealthStub(channel)
                not_serving = health_pb2.HealthCheckResponse.NOT_SERVING
                wait_until(
                    lambda: stub.Check(health_pb2.HealthCheckRequest()).status == not_serving,
                    "health that means it",
                )
            process = running.child("d0").process
            wait_until(lambda: process.poll() is not None, "the end of d0")
            assert process.returncode == 1
            assert list(tmp_path.rglob("baton-crash*"))
    finally:
        del os.environ["BATON_DUMP_FOLDER"]


def stream_until_it_hangs(address: str) -> tuple[float, bool]:
    """Requests one after the other; the longest pause, and whether one was placed again."""
    longest_s, give_up_at = 0.0, time.monotonic() + 60
    with Client(address) as client:
        while time.monotonic() < give_up_at:
            last_at = time.monotonic()
            receipt = None
            for delta in client.stream([5, 6, 7], PARAMS, timeout_s=120):
                longest_s = max(longest_s, time.monotonic() - last_at)
                last_at, receipt = time.monotonic(), delta.receipt
            if receipt is not None and receipt.num_attempts > 1:
                return longest_s, True
    return longest_s, False


def nodes(address: str) -> list[admin_pb2.NodeDescription]:
    with grpc.insecure_channel(address) as channel:
        stub = admin_pb2_grpc.AdminStub(channel)  # type: ignore[no-untyped-call]  # generated
        return list(stub.ListNodes(admin_pb2.ListNodesRequest()).nodes)
