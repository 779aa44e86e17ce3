"""Tests that a node ends when one of its ranks dies, and that its requests go on elsewhere."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from baton import Client, SamplingParams
from baton.deployment.local_deployment import LocalDeployment
from tests.fakes.processes.deployments import (
    READY_TIMEOUT_S,
    held_by,
    node_with,
    run_deployment,
)
from tests.fakes.processes.rank_processes import is_running, ranks_of
from tests.fakes.system.split_cases import rank_args
from tests.fakes.time.waiting import wait_until

pytestmark = [pytest.mark.large, pytest.mark.lengthy, pytest.mark.nixl, pytest.mark.timeout(300)]

LONG = SamplingParams(max_tokens=300, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def pairs() -> Iterator[LocalDeployment]:
    """Two prefill and two decode nodes of two ranks each."""
    with run_deployment(
        "--kv-cache-memory",
        "32M",
        "--long-prefill-token-threshold",
        "64",
        *rank_args((2, 1)),
        num_prefill=2,
        num_decode=2,
    ) as running:
        yield running


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("which", [0, 1], ids=["leader", "other"])
@pytest.mark.parametrize("role", ["p", "d"])
def test_a_node_ends_as_one_with_any_of_its_ranks_and_its_requests_go_on_elsewhere(
    pairs: LocalDeployment, role: str, which: int, number: signal.Signals
) -> None:
    prompt = [5 + j * (which + 3) % 4000 for j in range(1200)]
    with Client(pairs.config.listen) as client, ThreadPoolExecutor(1) as pool:
        request = pool.submit(client.generate, prompt, LONG)
        name = node_with(pairs, role, lambda node: bool(held_by(pairs, node.node_name).requests))
        processes = ranks_of(pairs, name)
        os.kill(processes[which], number)
        wait_until(lambda: not any(map(is_running, processes)), f"{name} has ended")
        token_ids = request.result().token_ids
        assert len(token_ids) == LONG.max_tokens
        assert client.generate(prompt, LONG).token_ids == token_ids
    pairs.restart(name)
    pairs.wait_ready(READY_TIMEOUT_S)
