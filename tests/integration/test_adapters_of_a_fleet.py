"""Adapters behind a router: named, switched, unloaded, reloaded under load, with nodes killed."""

from __future__ import annotations

import asyncio
import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton import AsyncClient, Client, Completion, SamplingParams, StructuredOutput
from baton.adapters.files import adapter_digest
from baton.api.errors import NotFoundError
from baton.cli.app import app
from baton.deployment.local_deployment import LocalDeployment
from engine import LLM
from tests.fakes.adapter_files import pair, write_adapter, write_query_adapter
from tests.fakes.checkpoints.demo_model import DEMO_MODEL
from tests.fakes.processes.deployments import READY_TIMEOUT_S, run_deployment
from tests.fakes.time.waiting import wait_until

pytestmark = [pytest.mark.large, pytest.mark.nixl, pytest.mark.timeout(350)]

PARAMS = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
PROMPTS = [[3 + (i * 37 + j * 11) % 4000 for j in range(20 + 9 * i)] for i in range(6)]
ADAPTERS = ("one", "two", "three")
BASE = ""
NUM_SWITCHES, NUM_AT_ONCE = 20, 4
TOKEN = "made for this test"
HEADERS = {"Content-Type": "application/json", "Authorization": f"Bearer {TOKEN}"}


@dataclass
class Scene:
    """Adapters on disk, and what they say.

    Attributes:
        root: folder of the adapters, named as in ``ADAPTERS``.
        expected: by adapter and prompt number, the tokens of one process.
        digests: by adapter.
    """

    root: Path
    expected: Mapping[tuple[str, int], tuple[int, ...]]
    digests: Mapping[str, str]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    root = tmp_path_factory.mktemp("adapters")
    folders = {name: write_query_adapter(root, name, i) for i, name in enumerate(ADAPTERS, 1)}
    llm = LLM(str(DEMO_MODEL), dtype="float32", num_threads=1, adapters=folders)
    expected = {}
    for name in (BASE, *ADAPTERS):
        for number, completion in enumerate(llm.generate(PROMPTS, PARAMS, adapter=name)):
            expected[name, number] = tuple(completion.token_ids)
    for number in range(len(PROMPTS)):  # or a mix-up would not show
        assert len({expected[name, number] for name in (BASE, *ADAPTERS)}) == 1 + len(ADAPTERS)
    digests = {name: adapter_digest(folder) for name, folder in folders.items()}
    return Scene(root, expected, digests | {BASE: ""})


@pytest.fixture(scope="module")
def deployment(scene: Scene, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalDeployment]:
    names_file = tmp_path_factory.mktemp("names") / "names.toml"
    root = ["--adapter-root", str(scene.root)]
    names = [word for name in ADAPTERS for word in ("--adapter", f"{name}={name}")]
    router_args = [
        *root, *names, "--served-model-name", "base", "--names-file", str(names_file),
        "--return-timeout-s", "150",
    ]  # fmt: skip
    # Two slots for three adapters: they take each other's. Drafts change no token.
    node_args = [
        "--num-blocks", "300", *root, "--max-adapters", "2", "--speculative-method", "ngram",
        "--ngram-min", "1",
    ]  # fmt: skip
    settings = {"num_decode": 2, "router_args": router_args, "http": True, "admin_token": TOKEN}
    with run_deployment(*node_args, **settings) as running:
        yield running


def admin(deployment: LocalDeployment, *words: str) -> str:
    """Run an admin command on the router; return what it printed."""
    access = ["--router", deployment.config.listen, "--token", TOKEN]
    result = CliRunner().invoke(app, ["admin", *words, *access])
    assert result.exit_code == 0, result.output
    return result.output


def open_client(deployment: LocalDeployment) -> AsyncClient:
    return AsyncClient(deployment.config.listen, api_key=TOKEN)


async def ask(client: AsyncClient, name: str, number: int) -> Completion:
    return await client.generate(PROMPTS[number], PARAMS, timeout_s=120, model=name or "base")


async def check_all(client: AsyncClient, scene: Scene, names: Mapping[str, str]) -> None:
    """Ask every prompt under these names at once, and check that their adapters answered."""

    async def check(name: str, number: int) -> None:
        completion = await ask(client, name, number)
        assert tuple(completion.token_ids) == scene.expected[names[name], number], name
        told = completion.receipt
        assert told is not None
        assert (told.model, told.adapter) == (name or "base", scene.digests[names[name]])

    jobs = [(name, number) for number in range(len(PROMPTS)) for name in names]
    await asyncio.gather(*(check(*job) for job in jobs))


def test_names_of_adapters_and_of_the_base_model_share_a_fleet(
    deployment: LocalDeployment, scene: Scene
) -> None:
    names = {name: name for name in (BASE, *ADAPTERS)}

    async def run() -> None:
        async with (
            open_client(deployment) as client,
            asyncio.timeout(200),
        ):
            for _ in range(2):  # the second time with prefix hits
                await check_all(client, scene, names)
            fresh = [[7 + (j * 29) % 4000 for j in range(64)]]
            found = []
            for name in ("one", "two", "base", "one"):
                completion = await client.generate(fresh[0], PARAMS, timeout_s=60, model=name)
                assert completion.receipt is not None
                found.append(completion.receipt.num_cached_tokens)
            assert found[:3] == [0, 0, 0], "KV of another version was found"
            assert found[3] > 0

    asyncio.run(run())
    assert "one" in admin(deployment, "adapters", "list")
    with Client(deployment.config.listen, api_key=TOKEN) as client:
        assert [one.name for one in client.models()] == ["base", *ADAPTERS]


def test_several_outputs_and_structured_ones_are_those_of_one_process(
    deployment: LocalDeployment, scene: Scene
) -> None:
    drawn = SamplingParams(max_tokens=8, temperature=1.0, seed=3, n=2, ignore_eos=True)
    word = SamplingParams(
        max_tokens=24, temperature=0, structured_output=StructuredOutput(regex="[a-z]{4,6}[0-9]{2}")
    )
    folders = {name: scene.root / name for name in ADAPTERS}
    llm = LLM(str(DEMO_MODEL), dtype="float32", num_threads=1, adapters=folders)
    texts = set()
    with Client(deployment.config.listen, api_key=TOKEN) as client:
        for name in (BASE, *ADAPTERS):
            for params in (drawn, word):
                expected = llm.generate([PROMPTS[0]], params, adapter=name)
                [found] = client.generate_batch(
                    [PROMPTS[0]], params, timeout_s=60, model=name or "base"
                )
                assert [one.token_ids for one in found] == [one.token_ids for one in expected]
            assert re.fullmatch("[a-z]{4,6}[0-9]{2}", found[0].text)
            texts.add(found[0].text)
    assert len(texts) > 1, "adapters change structured outputs, too"


def test_a_switch_under_load_gives_no_token_of_another_version(
    deployment: LocalDeployment, scene: Scene
) -> None:
    admin(deployment, "adapters", "alias", "live", "one")
    history = ["one"]  # what "live" stood for, in order, and may stand for soon
    num_settled, is_over = 1, False

    async def ask_often(client: AsyncClient, number: int) -> int:
        num_done = 0
        while not is_over:
            since = num_settled - 1
            completion = await ask(client, "live", number)
            assert completion.receipt is not None
            wanted = {
                (scene.expected[version, number], scene.digests[version])
                for version in history[since:]
            }
            found = tuple(completion.token_ids), completion.receipt.adapter
            assert found in wanted, history[since:]
            num_done += 1
        return num_done

    async def switch(client: AsyncClient) -> None:
        nonlocal is_over, num_settled
        try:
            for turn in range(1, 1 + NUM_SWITCHES):
                fresh = [5 + (turn * 41 + j * 13) % 4000 for j in range(48)]
                assert await num_cached(client, fresh) == 0
                version = ADAPTERS[turn % 3]
                history.append(version)  # from now on it may come
                how = ("load", "live", version) if turn % 2 else ("alias", "live", version)
                await asyncio.to_thread(admin, deployment, "adapters", *how)
                num_settled = len(history)
                assert await num_cached(client, fresh) == 0, "KV of another version was found"
        finally:
            is_over = True

    async def num_cached(client: AsyncClient, prompt: list[int]) -> int:
        params = SamplingParams(max_tokens=2, temperature=0)
        completion = await client.generate(prompt, params, timeout_s=60, model="live")
        assert completion.receipt is not None
        return completion.receipt.num_cached_tokens

    async def run() -> list[int]:
        async with (
            open_client(deployment) as client,
            asyncio.timeout(250),
        ):
            asked = [ask_often(client, number) for number in range(NUM_AT_ONCE)]
            _, *counts = await asyncio.gather(switch(client), *asked)
            return [count for count in counts if count is not None]

    assert sum(asyncio.run(run())) > NUM_SWITCHES


def test_an_unload_under_load_never_leaves_the_base_model_to_answer(
    deployment: LocalDeployment, scene: Scene
) -> None:
    admin(deployment, "adapters", "alias", "gone", "three")
    admin(deployment, "names", "remove", "three")
    admin(deployment, "names", "remove", "live")
    num_refused = num_right = 0

    async def ask_until_gone(client: AsyncClient, number: int) -> None:
        nonlocal num_refused, num_right
        while num_refused < 3 * NUM_AT_ONCE:
            try:
                completion = await ask(client, "gone", number)
            except NotFoundError:
                num_refused += 1
                continue
            assert tuple(completion.token_ids) == scene.expected["three", number]
            num_right += 1

    async def run() -> None:
        async with (
            open_client(deployment) as client,
            asyncio.timeout(200),
        ):
            asked = [
                asyncio.create_task(ask_until_gone(client, number)) for number in range(NUM_AT_ONCE)
            ]
            await asyncio.sleep(1.0)
            await asyncio.to_thread(admin, deployment, "adapters", "unload", "gone")
            await asyncio.gather(*asked)

    asyncio.run(run())
    assert num_right > 0
    listed = json.loads(admin(deployment, "adapters", "list", "--output", "json"))
    assert "three" not in [one["source"] for one in listed["adapters"] if one["nodes"]]
    admin(deployment, "adapters", "load", "three", "three")


def test_a_killed_node_and_a_restarted_router_lose_nothing(
    deployment: LocalDeployment, scene: Scene
) -> None:
    names = {name: name for name in (BASE, *ADAPTERS)}

    async def run() -> None:
        async with (
            open_client(deployment) as client,
            asyncio.timeout(200),
        ):
            asked = asyncio.create_task(check_all(client, scene, names))
            await asyncio.sleep(0.2)
            await asyncio.to_thread(deployment.restart, "d0")
            await asked
            wait_until(lambda: num_here(deployment) == 3, "3 nodes", timeout_s=READY_TIMEOUT_S)
            await check_all(client, scene, names)
            await asyncio.to_thread(deployment.restart, "p0")
            await check_all(client, scene, names)

    asyncio.run(run())
    deployment.restart("router")
    wait_until(lambda: num_here(deployment) == 3, "3 nodes", timeout_s=READY_TIMEOUT_S)

    async def again() -> None:
        async with (
            open_client(deployment) as client,
            asyncio.timeout(100),
        ):
            await check_all(client, scene, names)

    asyncio.run(again())


def num_here(deployment: LocalDeployment) -> int:
    """Return how many nodes have joined and reach a peer."""
    access = ["--router", deployment.config.listen, "--token", TOKEN, "--output", "json"]
    result = CliRunner().invoke(app, ["admin", "nodes", *access])
    if result.exit_code:  # the router is starting
        return 0
    nodes = json.loads(result.output)["nodes"]
    return sum(any(peer["connected"] for peer in node["peers"]) for node in nodes)


def test_other_bytes_in_a_folder_are_another_adapter_over_http(
    deployment: LocalDeployment, scene: Scene
) -> None:
    write_query_adapter(scene.root, "edited", 1)
    said = post(deployment, "load_lora_adapter", lora_name="edited", lora_path="edited")
    assert said == (200, "Success: LoRA adapter 'edited' added successfully.")
    assert complete(deployment, "edited") == complete(deployment, "one")
    write_query_adapter(scene.root, "edited", 2)
    assert complete(deployment, "edited") == complete(deployment, "one"), "nobody has loaded it"
    write_adapter(scene.root / "wide", pair(inputs=512, outputs=512))  # of another base model
    path = str(scene.root / "edited")
    assert post(deployment, "load_lora_adapter", lora_name="edited", lora_path=path)[0] == 200
    assert complete(deployment, "edited") == complete(deployment, "two")
    for body, status, problem in (
        ({"lora_name": "base", "lora_path": "one"}, 400, "stands for a base model"),
        ({"lora_name": "x", "lora_path": "../one"}, 400, "must be a path below"),
        ({"lora_name": "x", "lora_path": "none"}, 400, "no such folder"),
        ({"lora_name": "x", "lora_path": "wide"}, 400, "lora_path: no .* node could load it: /.*"),
    ):
        found, text = post(deployment, "load_lora_adapter", **body)
        assert found == status
        assert re.search(problem, text)
    assert post(deployment, "unload_lora_adapter", lora_name="edited")[0] == 200
    assert post(deployment, "unload_lora_adapter", lora_name="edited")[0] == 404


def post(deployment: LocalDeployment, path: str, **fields: str) -> tuple[int, str]:
    """Post to a path below ``/v1``; return the status and the body."""
    request = urllib.request.Request(
        f"http://{deployment.config.http_listen}/v1/{path}",
        json.dumps(fields).encode(),
        HEADERS,
    )
    try:
        with urllib.request.urlopen(request, timeout=100) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def complete(deployment: LocalDeployment, name: str) -> str:
    """Return the text that a name answers over HTTP."""
    body = json.dumps({"model": name, "prompt": "def f(", "max_tokens": 8, "temperature": 0})
    request = urllib.request.Request(
        f"http://{deployment.config.http_listen}/v1/completions",
        body.encode(),
        HEADERS,
    )
    with urllib.request.urlopen(request, timeout=100) as response:
        text = json.loads(response.read())["choices"][0]["text"]
    assert isinstance(text, str)
    return text
