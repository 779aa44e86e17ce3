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
from tests.fakes.processes.deployments import (
    READY_TIMEOUT_S,
    described_nodes,
    run_deployment,
)
from tests.fakes.time.waiting import wait_until

pytestmark = [pytest.mark.large, pytest.mark.nixl, pytest.mark.timeout(200)]

PARAMS = SamplingParams(max_tokens=150, temperature=0.0, ignore_eos=True)
ENGINE_TIMEOUT_S = 1.5


def test_an_engine_that_hangs_while_its_process_beats_is_found_out(tmp_path: Path) -> None:
    router_args = ["--engine-timeout-s", str(ENGINE_TIMEOUT_S)]
    os.environ["BATON_DUMP_FOLDER"] = str(tmp_path)
    try:
        with run_deployment(
            "--num-blocks", "400", num_decode=2, router_args=router_args
        ) as running:
            running.restart("d0", "--inject-faults", "hang_engine=40", "--engine-timeout-s", "12")
            running.wait_ready(READY_TIMEOUT_S)
            longest_s, met_it = stream_until_it_hangs(running.config.listen)
            assert met_it
            assert longest_s < 8.0  # and not the deadline of ten minutes
            node = described_nodes(running)["d0"]
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
