"""Nodes of `baton up` compute on each other's cores while these have nothing to do."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from baton import AsyncClient, Completion, SamplingParams
from baton.deployment.local_deployment import LocalDeployment
from engine import LLM
from tests.fakes.checkpoints.demo_model import DEMO_MODEL
from tests.fakes.processes.deployments import complete_all, run_deployment

pytestmark = [
    pytest.mark.nixl,
    pytest.mark.timeout(200),
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core"),
]

PARAMS = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True, logprobs=2)
PROMPTS = [[2 + (7 * k + i) % 900 for i in range(50 + 60 * k)] for k in range(6)]


@pytest.mark.parametrize("lend_cores", [True, False])
def test_a_request_alone_is_computed_on_the_cores_of_both_nodes(lend_cores: bool) -> None:
    alone = LLM(str(DEMO_MODEL), dtype="float32", num_threads=1).generate(PROMPTS, PARAMS)
    with run_deployment(lend_cores=lend_cores) as running:
        places = {name: placed_threads(running, name) for name in ("p0", "d0")}
        one_by_one = [complete(running.config.listen, prompt) for prompt in PROMPTS]
        new = {name: placed_threads(running, name) for name in ("p0", "d0")}
        together = complete_all(running, PROMPTS, PARAMS)
        cores = {name: frozenset(running.child(name).cores or ()) for name in ("p0", "d0")}
    for found in (one_by_one, together):
        assert [one.token_ids for one in found] == [one.token_ids for one in alone]
        # To the bit, though threads came and went.
        assert [one.logprobs for one in found] == [one.logprobs for one in alone]
    for name, other in (("p0", "d0"), ("d0", "p0")):
        # (The steps before any request may have been computed on both nodes' cores, too.)
        assert lend_cores or cores[other] not in places[name]
        assert (cores[other] in new[name]) == lend_cores


def placed_threads(running: LocalDeployment, name: str) -> set[frozenset[int]]:
    """Where a node's threads may run."""
    tasks = Path(f"/proc/{running.child(name).process.pid}/task").iterdir()
    return {frozenset(os.sched_getaffinity(int(task.name))) for task in tasks}


def complete(address: str, prompt: list[int]) -> Completion:
    async def run() -> Completion:
        async with AsyncClient(address) as client:
            return await client.generate(prompt, PARAMS)

    return asyncio.run(run())
