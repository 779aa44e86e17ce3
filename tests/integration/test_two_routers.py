"""Two routers over the same nodes, as real processes: neither knows of the other."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.api.errors import BatonError
from baton.api.outputs import Completion
from baton.api.sampling_params import SamplingParams
from baton.client.client import AsyncClient
from baton.deployment.local_deployment import LocalDeployment
from baton.processes.free_address import free_address
from tests.fakes.checkpoints.demo_model import DEMO_MODEL
from tests.fakes.checkpoints.foreign_model import make_foreign_model
from tests.fakes.processes.deployments import READY_TIMEOUT_S, deployment_config
from tests.fakes.time.waiting import wait_until

pytestmark = pytest.mark.large

PARAMS = SamplingParams(max_tokens=150, temperature=1.0, seed=3, ignore_eos=True)
KEY = "what operators bring, who may send prompts, too"
PROMPT = "def add(a, b):\n"
SPREAD = ("--policy", "round_robin")  # other policies may find one node the best for all


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[tuple[LocalDeployment, str]]:
    """Two decode nodes, and a second router that all nodes join."""
    second = free_address()
    config = deployment_config(
        "--router", second, "--node-token", "t", "--drain-timeout-s", "60",
        local_prefill=True,
        num_decode=2,
        router_args=["--node-token", "t", *SPREAD],
        log_folder=tmp_path,
        admin_token=KEY,
    )  # fmt: skip
    command = [
        "router", "--model", str(DEMO_MODEL), "--listen", second, "--http-listen", "",
        "--node-token", "t", *SPREAD,
    ]  # fmt: skip
    with (
        (tmp_path / "second.log").open("wb") as log,
        subprocess.Popen(
            [sys.executable, "-m", "baton", *command],
            stdout=log,
            stderr=log,
            env=os.environ | {"BATON_ADMIN_TOKEN": KEY},
        ) as router,
    ):
        try:
            with LocalDeployment(config) as running:
                running.wait_ready(READY_TIMEOUT_S)
                yield running, second
        finally:
            router.kill()


async def _complete(address: str, count: int) -> list[Completion | BaseException]:
    async with AsyncClient(address, api_key=KEY) as client:
        calls = (client.generate(PROMPT, PARAMS, timeout_s=60) for _ in range(count))
        return await asyncio.gather(*calls, return_exceptions=True)


@contextlib.contextmanager
def _foreign_node(folder: Path, routers: tuple[str, str]) -> Iterator[None]:
    """A node that joins both routers with other weights; until both have it, and told so."""
    model = make_foreign_model(DEMO_MODEL, folder)
    command = [
        "decode", "--model", str(model), "--name", "foreign", "--dtype", "float32",
        "--node-token", "t", *(word for router in routers for word in ("--router", router)),
    ]  # fmt: skip

    def state_at(router: str) -> str:
        shown = subprocess.run(
            [sys.executable, "-m", "baton", "admin", "nodes", "--router", router],
            capture_output=True, text=True, check=True, env=os.environ | {"BATON_ADMIN_TOKEN": KEY},
        ).stdout  # fmt: skip
        return next((line for line in shown.splitlines() if line.startswith("foreign ")), "")

    with (
        (folder / "foreign.log").open("wb") as log,
        subprocess.Popen([sys.executable, "-m", "baton", *command], stdout=log, stderr=log) as node,
    ):
        try:
            wait_until(
                lambda: all("not serving" in state_at(router) for router in routers),
                "the foreign node at both routers",
                timeout_s=READY_TIMEOUT_S,
            )
            yield
        finally:
            node.kill()


def _tokens(results: list[Completion | BaseException]) -> set[tuple[int, ...]]:
    return {result.token_ids for result in results if isinstance(result, Completion)}


@pytest.mark.nixl
def test_both_serve_all_nodes_and_the_end_of_one_is_not_the_others(
    deployment: tuple[LocalDeployment, str], tmp_path: Path
) -> None:
    running, second = deployment
    first = running.config.listen

    async def scenario() -> None:
        alone, other = await asyncio.gather(_complete(first, 8), _complete(second, 8))
        assert len(_tokens(alone)) == len(_tokens(other)) == 1
        assert _tokens(alone) == _tokens(other)
        assert all(isinstance(item, Completion) for item in [*alone, *other])

        # A node with other weights serves at neither.
        with _foreign_node(tmp_path, (first, second)):
            several = await asyncio.gather(_complete(first, 8), _complete(second, 8))
        assert _tokens([*several[0], *several[1]]) == _tokens(alone)
        for item in [*several[0], *several[1]]:
            assert isinstance(item, Completion)
            assert item.receipt is not None
            assert item.receipt.decode_node in ("d0", "d1")

        async def kill_first() -> None:
            await asyncio.sleep(0.3)
            running.child("router").process.send_signal(signal.SIGKILL)

        broken, whole, _ = await asyncio.gather(
            _complete(first, 8), _complete(second, 8), kill_first()
        )
        assert all(isinstance(item, Completion | BatonError) for item in broken)
        assert any(isinstance(item, BatonError) for item in broken)
        assert all(isinstance(item, Completion) for item in whole)
        assert _tokens(whole) == _tokens(alone)

        # A node that is told to stop ends what it has: nothing is tried again, nothing is lost.
        node = running.child("d0").process

        async def stop_node() -> None:
            await asyncio.sleep(0.3)
            node.send_signal(signal.SIGTERM)

        drained, _ = await asyncio.gather(_complete(second, 12), stop_node())
        completions = [item for item in drained if isinstance(item, Completion)]
        assert len(completions) == 12
        assert _tokens(drained) == _tokens(alone)
        receipts = [item.receipt for item in completions if item.receipt is not None]
        assert {receipt.num_attempts for receipt in receipts} == {1}
        assert {receipt.decode_node for receipt in receipts} == {"d0", "d1"}
        assert await asyncio.to_thread(node.wait, 20) == 0

    asyncio.run(scenario())
