"""Two base models and three adapters behind one address: no token of another one, nothing lost."""

from __future__ import annotations

import asyncio
import random
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from baton import AsyncClient, Client, SamplingParams
from baton.api.errors import NodeUnavailableError, NotFoundError
from baton.cli.app import app
from baton.deployment.local_deployment import LocalDeployment
from engine import LLM
from tests.fakes.adapter_files import write_query_adapter
from tests.fakes.checkpoints.demo_model import DEMO_MODEL
from tests.fakes.processes.deployments import READY_TIMEOUT_S, described_nodes, run_deployment
from tests.fakes.time.waiting import wait_until

pytestmark = [pytest.mark.large, pytest.mark.nixl, pytest.mark.timeout(350)]

NUM_REQUESTS, NUM_AT_ONCE = 200, 8
PARAMS = SamplingParams(max_tokens=12, temperature=0.8, seed=5, ignore_eos=True)
ADAPTERS = {"one": "demo", "two": "demo", "three": "tuned"}  # and their base models
NAMES = ("demo", "tuned", *ADAPTERS)
PROMPTS = [[3 + (i * 37 + j * 11) % 4000 for j in range(20 + 7 * i)] for i in range(10)]
SOON_S = 1.0  # far below the 5 s for which a request waits for nodes, with room for a busy machine


@dataclass
class Models:
    """Two models of one configuration and tokenizer, which differ in their weights; adapters.

    Attributes:
        folders: folders of the models, by name.
        root: folder of the adapters.
        expected: by name and prompt number, the tokens of one process.
    """

    folders: Mapping[str, Path]
    root: Path
    expected: Mapping[tuple[str, int], tuple[int, ...]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    tuned = tmp_path_factory.mktemp("models") / "tuned"
    shutil.copytree(DEMO_MODEL, tuned)
    weights = load_file(tuned / "model.safetensors")
    save_file(
        {name: weight.flip(0) if "mlp" in name else weight for name, weight in weights.items()},
        tuned / "model.safetensors",
        metadata={"format": "pt"},
    )
    folders = {"demo": DEMO_MODEL, "tuned": tuned}
    root = tmp_path_factory.mktemp("adapters")
    adapters = {name: write_query_adapter(root, name, i) for i, name in enumerate(ADAPTERS)}
    expected = {}
    for model, folder in folders.items():
        own = {name: adapters[name] for name, base in ADAPTERS.items() if base == model}
        llm = LLM(str(folder), dtype="float32", num_threads=1, adapters=own)
        for name in ("", *own):
            for number, completion in enumerate(llm.generate(PROMPTS, PARAMS, adapter=name)):
                expected[name or model, number] = tuple(completion.token_ids)
    for number in range(len(PROMPTS)):  # or a mix-up would not show
        assert len({expected[name, number] for name in NAMES}) == len(NAMES)
    return Models(folders, root, expected)


@pytest.fixture(scope="module")
def deployment(
    models: Models, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalDeployment]:
    names_file = tmp_path_factory.mktemp("names") / "names.toml"
    demo, tuned = (str(folder) for folder in models.folders.values())
    router_args = [
        "--served-model-name", f"demo={demo}", "--served-model-name", f"tuned={tuned}",
        "--names-file", str(names_file), "--return-timeout-s", "150",
        "--adapter-root", str(models.root),
    ]  # fmt: skip
    for name, base in ADAPTERS.items():
        router_args += ["--adapter", f"{name}={name}={base}"]
    node_args = ["--num-blocks", "300", "--adapter-root", str(models.root), "--max-adapters", "1"]
    with run_deployment(
        *node_args, model=demo, more_models=[tuned], router_args=router_args
    ) as running:
        yield running


def test_requests_in_random_order_while_a_node_of_each_is_killed(
    deployment: LocalDeployment, models: Models
) -> None:
    rng = random.Random(7)
    wanted = [(rng.choice(NAMES), rng.randrange(10)) for _ in range(NUM_REQUESTS)]
    num_done = 0

    async def ask_all(client: AsyncClient) -> None:
        nonlocal num_done
        while wanted:
            name, number = wanted.pop()
            completion = await client.generate(PROMPTS[number], PARAMS, timeout_s=180, model=name)
            assert tuple(completion.token_ids) == models.expected[name, number], name
            num_done += 1

    async def kill_one_of_each() -> None:
        for name, after in (("d0", NUM_REQUESTS // 4), ("p1", NUM_REQUESTS // 2)):
            while num_done < after:  # noqa: ASYNC110 - counts of tasks set no event
                await asyncio.sleep(0.01)
            await asyncio.to_thread(deployment.restart, name)

    async def run() -> None:
        async with AsyncClient(deployment.config.listen) as client, asyncio.timeout(250):
            await asyncio.gather(kill_one_of_each(), *(ask_all(client) for _ in range(NUM_AT_ONCE)))

    asyncio.run(run())
    assert num_done == NUM_REQUESTS


def test_a_restarted_router_has_its_names_and_refuses_others_at_once(
    deployment: LocalDeployment, models: Models
) -> None:
    wait_for_nodes(deployment)
    check(deployment, models, {name: name for name in NAMES})
    admin(deployment, "names", "alias", "chat", "tuned")
    admin(deployment, "names", "remove", "tuned")
    served = {name: name for name in NAMES if name != "tuned"} | {"chat": "tuned"}
    check(deployment, models, served)
    deployment.restart("router")
    wait_for_nodes(deployment)
    check(deployment, models, served)
    unknown = refused_in_s(deployment, "tuned", NotFoundError, "'three', 'chat' are served")
    assert unknown < SOON_S
    for name in ("p1", "d1"):
        admin(deployment, "remove", name, "--force")
    for name in ("chat", "three"):
        lost = refused_in_s(deployment, name, NodeUnavailableError, "no node of '.*' has joined")
        assert lost < SOON_S
    with Client(deployment.config.listen) as client:
        completion = client.generate(PROMPTS[2], PARAMS, timeout_s=60, model="demo")
    assert tuple(completion.token_ids) == models.expected["demo", 2]


def check(deployment: LocalDeployment, models: Models, served: Mapping[str, str]) -> None:
    """Check that each of these names, and no other, gives the tokens of its model."""
    with Client(deployment.config.listen) as client:
        assert {one.name for one in client.models()} == served.keys()
        for name, model in served.items():
            completion = client.generate(PROMPTS[1], PARAMS, timeout_s=60, model=name)
            assert tuple(completion.token_ids) == models.expected[model, 1], name


def admin(deployment: LocalDeployment, *words: str) -> None:
    """Run an admin command on the router."""
    arguments = ["admin", *words, "--router", deployment.config.listen]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output


def refused_in_s(
    deployment: LocalDeployment, name: str, error: type[Exception], match: str
) -> float:
    """Return how long a request under a name takes to be refused with this error."""
    with Client(deployment.config.listen) as client:
        client.models()  # connects
        began_at = time.monotonic()
        with pytest.raises(error, match=match):
            client.generate(PROMPTS[0], PARAMS, model=name)
        return time.monotonic() - began_at


def wait_for_nodes(deployment: LocalDeployment) -> None:
    """Wait until all four nodes have joined the router and reach a peer."""
    wait_until(lambda: num_connected(deployment) == 4, "4 nodes", timeout_s=READY_TIMEOUT_S)


def num_connected(deployment: LocalDeployment) -> int:
    """Return how many nodes have joined the router and reach a peer."""
    try:
        nodes = described_nodes(deployment).values()
    except grpc.RpcError:
        return 0
    return sum(any(peer.connected for peer in node.peers) for node in nodes)
