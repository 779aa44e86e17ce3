"""New weights for running nodes behind a router, under load: no answer mixes two versions."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from baton import AsyncClient, Completion, SamplingParams
from baton.api.beam_search import BeamCompletion
from baton.api.errors import NodeUnavailableError
from baton.checkpoint.model_folder import weights_digest
from baton.cli.app import app
from baton.deployment.local_deployment import LocalDeployment
from engine import LLM
from tests.fakes.checkpoints.demo_model import DEMO_MODEL
from tests.fakes.processes.deployments import run_deployment
from tests.property.num_examples import num_draws

NUM_UPDATES = num_draws(4)
pytestmark = [
    pytest.mark.large,
    pytest.mark.nixl,
    pytest.mark.timeout(600 + 30 * NUM_UPDATES),
]

PARAMS = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
PROMPTS = [[3 + (i * 37 + j * 11) % 4000 for j in range(20 + 9 * i)] for i in range(6)]
VERSIONS = ("old", "new")
BEAMS: dict[str, Any] = {"beam_width": 3, "max_tokens": 12}


@dataclass
class Scene:
    """Two versions of the demo model below one folder.

    Attributes:
        root: folder of both versions.
        expected: by digest, the tokens of each prompt in one process.
        beams: by digest, the beams of the first prompt in one process.
        digests: by name of a version.
    """

    root: Path
    expected: Mapping[str, list[tuple[int, ...]]]
    beams: Mapping[str, list[BeamCompletion]]
    digests: Mapping[str, str]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    root = tmp_path_factory.mktemp("versions")
    torch.manual_seed(1)
    for name in VERSIONS:
        shutil.copytree(DEMO_MODEL, root / name)
    file = root / "new" / "model.safetensors"
    tensors = load_file(file)
    changed = {n: one + 0.1 * one.std() * torch.randn_like(one) for n, one in tensors.items()}
    save_file(changed, file, metadata={"format": "pt"})
    damaged = root / "damaged.safetensors"
    changed["model.norm.weight"][0] = torch.nan
    save_file(changed, damaged)
    digests = {name: weights_digest(root / name) for name in VERSIONS}
    expected, beams = {}, {}
    for name, digest in digests.items():
        llm = LLM(str(root / name), dtype="float32", num_threads=1)
        expected[digest] = [one.token_ids for one in llm.generate(PROMPTS, PARAMS)]
        [beams[digest]] = llm.beam_search(PROMPTS[:1], **BEAMS)
    assert expected[digests["old"]] != expected[digests["new"]]
    return Scene(root, expected, beams, digests)


@pytest.fixture(params=[1, 2], ids=["one_each", "two_each"])
def deployment(request: pytest.FixtureRequest, scene: Scene) -> Iterator[LocalDeployment]:
    counts = {"num_prefill": request.param, "num_decode": request.param}
    node_args = ("--num-blocks", "300", "--weights-root", str(scene.root))
    with run_deployment(*node_args, model=scene.root / "old", **counts) as running:
        yield running


def admin(deployment: LocalDeployment, *words: str, exit_code: int = 0) -> str:
    """Run an admin command on the router; return what it printed."""
    words = ("admin", "weights", *words, "--router", deployment.config.listen)
    result = CliRunner().invoke(app, words)
    assert result.exit_code == exit_code, result.output
    return result.output


def versions_of(deployment: LocalDeployment) -> dict[str, str]:
    """Return the state and the digest of the nodes' weights, counted."""
    found = admin(deployment, "list", "--output", "json")
    decoder, at, nodes = json.JSONDecoder(), 0, dict[str, Any]()
    while at < len(found.rstrip()):
        one, at = decoder.raw_decode(found, at)
        at += 1
        nodes[one["node_name"]] = one["weights"]
    return {name: f"{one['state']} {one['digest']}" for name, one in nodes.items()}


@asynccontextmanager
async def load(
    client: AsyncClient,
    found: list[tuple[int, Completion]],
    searches: list[list[BeamCompletion]],
) -> AsyncIterator[None]:
    """Keep some prompts and a beam search open; note each prompt's number and completion."""
    is_over = False

    async def search() -> None:
        while not is_over:
            searches.extend(await client.beam_search(PROMPTS[:1], **BEAMS, timeout_s=120))

    async def ask(number: int) -> None:
        while not is_over:
            found.append((number, await client.generate(PROMPTS[number], PARAMS, timeout_s=120)))

    tasks = [asyncio.create_task(ask(number)) for number in range(len(PROMPTS))]
    tasks.append(asyncio.create_task(search()))
    try:
        yield
    finally:
        is_over = True
        await asyncio.gather(*tasks)


def check(scene: Scene, found: list[tuple[int, Completion]]) -> Counter[str]:
    """Assert that each completion is of the version that it names; count versions."""
    counts = Counter[str]()
    for number, completion in found:
        assert completion.receipt is not None
        version = completion.receipt.weights
        assert completion.token_ids == scene.expected[version][number]
        counts[version] += 1
    return counts


def test_updates_under_load_fail_no_request_and_mix_no_versions(
    deployment: LocalDeployment, scene: Scene, record_property: Callable[[str, object], None]
) -> None:
    found: list[tuple[int, Completion]] = []
    searches: list[list[BeamCompletion]] = []

    async def run() -> None:
        async with (
            AsyncClient(deployment.config.listen) as client,
            load(client, found, searches),
        ):
            for number in range(NUM_UPDATES):
                name = VERSIONS[(number + 1) % 2]
                await asyncio.to_thread(admin, deployment, "update", name)
                states = await asyncio.to_thread(versions_of, deployment)
                assert set(states.values()) == {f"serving {scene.digests[name]}"}
                num_found = len(found)
                while len(found) < num_found + 12:  # noqa: ASYNC110  # tasks fill it
                    await asyncio.sleep(0.05)
                assert found[-1][1].receipt is not None
                assert found[-1][1].receipt.weights == scene.digests[name]

    asyncio.run(run())
    counts = check(scene, found)
    assert set(counts) == set(scene.digests.values())
    assert all(one in scene.beams.values() for one in searches), "a search mixes versions"
    assert {str(one) for one in searches} == {str(one) for one in scene.beams.values()}
    record_property("updates", NUM_UPDATES)
    record_property("beam searches", len(searches))
    record_property("answers", len(found))


def test_a_refused_update_changes_no_node(deployment: LocalDeployment, scene: Scene) -> None:
    said = admin(deployment, "update", "damaged.safetensors", exit_code=2)
    assert "model.norm.weight: has a number that is NaN or infinite" in said
    assert set(versions_of(deployment).values()) == {f"serving {scene.digests['old']}"}
    assert "leads out of --weights-root" in admin(deployment, "update", "..", exit_code=2)
    found: list[tuple[int, Completion]] = []

    async def run() -> None:
        async with AsyncClient(deployment.config.listen) as client:
            found.append((0, await client.generate(PROMPTS[0], PARAMS, timeout_s=60)))

    asyncio.run(run())
    assert check(scene, found) == {scene.digests["old"]: 1}


def test_nodes_sleep_and_wake(deployment: LocalDeployment, scene: Scene) -> None:
    found: list[tuple[int, Completion]] = []

    async def ask(timeout_s: float) -> None:
        async with AsyncClient(deployment.config.listen) as client:
            found.append((1, await client.generate(PROMPTS[1], PARAMS, timeout_s=timeout_s)))

    asyncio.run(ask(60))
    admin(deployment, "sleep")
    assert {one.split()[0] for one in versions_of(deployment).values()} == {"asleep"}
    with pytest.raises(NodeUnavailableError):
        asyncio.run(ask(60))
    admin(deployment, "wake")
    asyncio.run(ask(60))
    admin(deployment, "sleep", "--level", "host")
    admin(deployment, "update", "new")  # wakes them, with other weights
    asyncio.run(ask(60))
    assert check(scene, found) == {scene.digests["old"]: 2, scene.digests["new"]: 1}
