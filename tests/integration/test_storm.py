"""A storm: cancels, deadlines and a killed prefill node; at the end no block has a holder."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Iterator

import pytest

from baton import AsyncClient, BatonError, SamplingParams
from baton.deployment.local_deployment import LocalDeployment
from tests.fakes.processes.deployments import (
    described_nodes,
    held_by,
    run_deployment,
)

pytestmark = [pytest.mark.large, pytest.mark.nixl, pytest.mark.timeout(200)]

NUM_REQUESTS = 60


@pytest.fixture(scope="module", params=["--no-async-scheduling", "--async-scheduling"])
def deployment(request: pytest.FixtureRequest) -> Iterator[LocalDeployment]:
    """Two nodes of each kind with so few blocks that requests wait for each other."""
    with run_deployment(
        "--num-blocks", "150", "--max-num-requests", "16", request.param,
        local_prefill=True, num_prefill=2, num_decode=2,
    ) as running:  # fmt: skip
        yield running


async def one_request(client: AsyncClient, chance: random.Random) -> str:
    """A request that runs to its end, is left in the middle, or has too little time."""
    prompt = [chance.randrange(4000) for _ in range(chance.randrange(1, 700))]
    params = SamplingParams(max_tokens=chance.choice([1, 2, 30]), temperature=0.0, ignore_eos=True)
    kind = chance.choice(["whole", "left", "late"])
    await asyncio.sleep(chance.random() * 3)
    try:
        if kind == "left":
            async with contextlib.aclosing(client.stream(prompt, params)) as deltas:
                async for _ in deltas:
                    if chance.random() < 0.5:
                        break
            return "left"
        timeout_s = chance.random() * 0.4 if kind == "late" else None
        completion = await client.generate(prompt, params, timeout_s=timeout_s)
    except BatonError as error:
        return type(error).__name__
    assert len(completion.token_ids) == params.max_tokens
    return "whole"


async def storm(address: str, seed: int) -> list[str]:
    chance = random.Random(seed)
    async with AsyncClient(address) as client:
        calls = [one_request(client, random.Random(chance.random())) for _ in range(NUM_REQUESTS)]
        return await asyncio.wait_for(asyncio.gather(*calls), timeout=120)


def assert_nothing_is_held(deployment: LocalDeployment, num_nodes: int) -> None:
    """Every block of every node is free, within a few seconds."""
    give_up_at = time.monotonic() + 10
    while True:
        held = {}
        nodes = described_nodes(deployment)
        for name in nodes:
            answer = held_by(deployment, name)
            if answer.requests or answer.num_free_blocks != answer.num_blocks:
                held[name] = answer
        if len(nodes) == num_nodes and not held:
            return
        assert time.monotonic() < give_up_at, f"{len(nodes)} nodes, held: {held}"
        time.sleep(0.1)


def test_cancels_and_deadlines_leave_no_block_held(deployment: LocalDeployment) -> None:
    address = deployment.config.listen
    ends = asyncio.run(storm(address, seed=1))
    # Refused: the router saw that a deadline could not be kept.
    assert {"whole", "left", "DeadlineExceededError"} <= set(ends)
    assert set(ends) <= {"whole", "left", "DeadlineExceededError", "OverloadedError"}
    assert_nothing_is_held(deployment, num_nodes=4)


def test_a_killed_prefill_node_leaves_no_block_held(deployment: LocalDeployment) -> None:
    address = deployment.config.listen
    victim = next(child for child in deployment.children if child.name == "p0")

    async def run() -> list[str]:
        requests = asyncio.create_task(storm(address, seed=2))
        await asyncio.sleep(1.5)
        victim.process.kill()
        return await requests

    ends = asyncio.run(run())
    errors = {"DeadlineExceededError", "NodeUnavailableError", "OverloadedError"}
    assert set(ends) <= {"whole", "left"} | errors
    assert ends.count("whole") > 0
    assert_nothing_is_held(deployment, num_nodes=3)
