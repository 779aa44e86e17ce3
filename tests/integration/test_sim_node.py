"""Simulated nodes behind a real router: right tokens under load and faults; the page in docs/."""

from __future__ import annotations

import asyncio
import random
import re
import shlex
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import loadtest.load.generate as generate
import loadtest.load.traces as traces
from baton import AsyncClient, Completion, SamplingParams
from baton.api.errors import NodeUnavailableError
from baton.checkpoint.model_folder import read_limits
from baton.processes.free_address import free_address
from sim_node.cluster import SimCluster
from sim_node.faults import FaultSpec
from sim_node.options import SimOptions
from sim_node.sim_model import output_tokens
from tests.fakes.checkpoints.demo_model import DEMO_MODEL
from tests.fakes.processes.deployments import READY_TIMEOUT_S, wait_for_answer

pytestmark = pytest.mark.large

ROOT = Path(__file__).parents[2]
VOCAB_SIZE = read_limits(DEMO_MODEL).vocab_size
BLOCK_SIZE = 16
NO_FAULTS = FaultSpec()
OPTIONS = SimOptions(block_size=BLOCK_SIZE, num_blocks=2000)
COMMAND = re.compile(r"^baton (?:router|sim-node|generate) .*", re.MULTILINE)
PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)

Case = tuple[list[int], int]  # prompt, max_tokens


def start(*arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "baton", *arguments], cwd=ROOT)


def end(process: subprocess.Popen[bytes]) -> int:
    process.send_signal(signal.SIGTERM)
    return process.wait(timeout=20)


@pytest.fixture
def router() -> Iterator[str]:
    """Router's address; it retries often, as one request may meet many of a test's faults."""
    address = free_address()
    options = ["--model", str(DEMO_MODEL), "--listen", address, "--http-listen", ""]
    options += ["--max-attempts", "10", "--no-local-prefill"]
    process = start("router", *options)
    yield address
    assert end(process) == 0


def make_cases(number: int, seed: int) -> list[Case]:
    """Prompts of which two in three begin like others."""
    chance = random.Random(seed)
    heads = [[chance.randrange(VOCAB_SIZE) for _ in range(160)] for _ in range(4)]
    cases = []
    for index in range(number):
        head = [] if index % 3 == 0 else chance.choice(heads)
        tail = [chance.randrange(VOCAB_SIZE) for _ in range(chance.randrange(1, 400))]
        cases.append((head + tail, chance.randrange(1, 60)))
    return cases


async def complete(client: AsyncClient, case: Case) -> Completion:
    prompt, max_tokens = case
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    completion = await client.generate(prompt, params, timeout_s=90)
    assert completion.token_ids == output_tokens(prompt, max_tokens, vocab_size=VOCAB_SIZE)
    return completion


async def complete_over_time(address: str, cases: list[Case], *, over_s: float) -> list[Completion]:
    """All cases, begun evenly over a while; raises what went wrong with the first that failed."""

    async def later(client: AsyncClient, index: int) -> Completion:
        await asyncio.sleep(over_s * index / len(cases))
        return await complete(client, cases[index])

    async with AsyncClient(address) as client:
        return list(await asyncio.gather(*(later(client, index) for index in range(len(cases)))))


def join(
    address: str, *, num_prefill: int, num_decode: int, faults: FaultSpec = NO_FAULTS
) -> SimCluster:
    return SimCluster(
        address,
        str(DEMO_MODEL),
        num_prefill=num_prefill,
        num_decode=num_decode,
        options=OPTIONS,
        faults=faults,
        join_timeout_s=READY_TIMEOUT_S,
    )


def test_500_requests_get_their_tokens_and_prefixes_are_found_again(router: str) -> None:
    async def scene() -> None:
        async with join(router, num_prefill=8, num_decode=8) as cluster:
            done = await complete_over_time(router, make_cases(500, seed=1), over_s=3.0)
            receipts = [completion.receipt for completion in done if completion.receipt]
            assert len(receipts) == 500
            for receipt in receipts:
                parts = receipt.ttft_parts
                assert sum(parts.values()) == pytest.approx(receipt.ttft_s)
                assert receipt.num_attempts > 1 or min(parts.values()) > -1e-6, parts
            assert {r.prefill_node for r in receipts} == {f"sim-p{i}" for i in range(8)}
            cached = [r.prefill.num_cached_tokens for r in receipts if r.prefill]
            assert max(cached) == 160
            assert cluster.stats().num_tokens >= sum(r.num_output_tokens for r in receipts)

    asyncio.run(scene())


def test_no_request_is_lost_when_nodes_are_killed_and_stand_still(router: str) -> None:
    async def hurt(cluster: SimCluster) -> None:
        for round_number in range(3):
            await asyncio.sleep(1.0)
            killed = [f"sim-d{round_number}", f"sim-p{round_number}"]
            for name in killed:
                await cluster.kill(name)
            await cluster.stall(f"sim-d{round_number + 4}", 2.0)
            cluster.slow(f"sim-p{round_number + 4}", 3.0)
            await asyncio.sleep(0.5)
            for name in killed:
                await cluster.restart(name)

    async def scene() -> None:
        async with join(router, num_prefill=8, num_decode=8) as cluster:
            hurting = asyncio.create_task(hurt(cluster))
            done = await complete_over_time(router, make_cases(500, seed=2), over_s=5.0)
            await hurting
            attempts = [
                completion.receipt.num_attempts for completion in done if completion.receipt
            ]
            assert len(attempts) == 500
            assert max(attempts) > 1

    asyncio.run(scene())


def test_faults_that_come_by_themselves_lose_no_request(router: str) -> None:
    faults = FaultSpec(
        kill=4.0, restart_s=0.5, stall=4.0, stall_s=1.5, slow=0.25, refuse=0.01, seed=3
    )

    # (So many die of so many that none of it looks like the doing of one request: ADR 0027.)
    async def scene() -> None:
        async with join(router, num_prefill=8, num_decode=8, faults=faults):
            done = await complete_over_time(router, make_cases(200, seed=3), over_s=5.0)
            assert max(c.receipt.num_attempts for c in done if c.receipt) > 1

    asyncio.run(scene())


def test_nodes_of_two_processes_are_not_paired_and_the_reason_is_said(router: str) -> None:
    async def scene() -> None:
        async with (
            join(router, num_prefill=1, num_decode=0),
            join(router, num_prefill=0, num_decode=1),
            AsyncClient(router) as client,
        ):
            with pytest.raises(NodeUnavailableError, match="same sim-node process"):
                await complete(client, ([1, 2, 3], 4))

    asyncio.run(scene())


def page_with(address: str) -> str:
    """The page, with another router."""
    page = (ROOT / "docs" / "sim_node.md").read_text(encoding="utf-8")
    return page.replace("127.0.0.1:50051", address)


def test_the_python_of_the_page_works(router: str, tmp_path: Path) -> None:
    driving, making = PYTHON.findall(page_with(router))

    async def scene() -> None:
        source = f"async def scene():\n{textwrap.indent(driving, '    ')}"
        names: dict[str, Any] = {"SimCluster": SimCluster}
        exec(source.replace("examples/demo_model", str(DEMO_MODEL)), names)
        await names["scene"]()

    asyncio.run(scene())
    path = tmp_path / "trace.jsonl"
    exec(making.replace('"trace.jsonl"', repr(str(path))), vars(generate) | vars(traces))
    assert len(list(traces.read_trace(path))) > 1000


def test_the_commands_of_the_page_work() -> None:
    address = free_address()
    commands = [shlex.split(line)[1:] for line in COMMAND.findall(page_with(address))]
    assert [command[0] for command in commands] == ["router", "sim-node", "generate"]
    processes = [start(*command) for command in commands[:2]]
    try:
        wait_for_answer(address)
        arguments = [sys.executable, "-m", "baton", *commands[2]]
        done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
    finally:
        assert [end(process) for process in reversed(processes)] == [0, 0]
