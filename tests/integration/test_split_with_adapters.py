"""Adapters over real processes: prefill and decode nodes give the tokens of PEFT, killed or not.

Where no node is killed, the router is a test's hand (`tests/fakes/hand_router.py`): nodes know
adapters by digest alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from baton import AsyncClient
from baton.adapters.files import adapter_digest
from baton.api.sampling_params import SamplingParams
from baton.deployment.local_deployment import LocalDeployment
from baton.link.words import ADAPTER_MISSING, PAIR_ROLES, RequestError
from baton.processes.free_address import free_address
from baton.v1 import admin_pb2
from engine import LLM
from tests.fakes.adapter_files import cache, install
from tests.fakes.hand_router import HandRouter, until
from tests.fakes.processes.deployments import READY_TIMEOUT_S, run_deployment
from tests.numerics.family_checkpoints import FAMILIES
from tests.numerics.peft_adapters import PeftAdapter, certain_prompts, make_adapter
from tests.numerics.test_adapters_of_each_family import make_model, names_of_targets
from tests.numerics.tiny_models import make_hugging_face_model, save

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(200)]

VOCAB_SIZE = 61
NUM_OUTPUTS = 16
NUM_TOKENS = 30
GREEDY = SamplingParams(max_tokens=NUM_OUTPUTS, temperature=0, ignore_eos=True, seed=1)
# Families, and the ranks of each node: one with experts, one with states, three dense ones. Another
# test below is of a dense one.
FAMILIES_HERE = [
    ("Qwen3MoeForCausalLM", 1),
    ("Qwen3NextForCausalLM", 1),
    *(
        pytest.param(name, num_ranks, marks=pytest.mark.large)
        for name, num_ranks in (
            ("LlamaForCausalLM", 1),
            ("Gemma3ForCausalLM", 1),
            ("Phi3ForCausalLM", 2),
            ("Qwen3MoeForCausalLM", 2),
            ("Qwen3NextForCausalLM", 2),
        )
    ),
]
TWO: dict[str, dict[str, Any]] = {
    "one": {"r": 8, "lora_alpha": 16},
    "two": {"r": 4, "lora_alpha": 4, "use_dora": True, "use_rslora": True},
}
EIGHT: dict[str, dict[str, Any]] = {
    f"{kind}{rank}": {"r": rank, "lora_alpha": 8, **more}
    for rank in (8, 16, 64, 256)
    for kind, more in (("lora", {}), ("dora", {"use_dora": True}))
}
# Blocks of 4 tokens, for which requests wait and take turns.
NUM_BLOCKS = 60


def make_scene(
    architecture: str, root: Path, kinds: Mapping[str, Mapping[str, Any]]
) -> tuple[Any, dict[str, PeftAdapter]]:
    """Make a model with adapters of all targets below ``root``; PEFT has no DoRA for experts."""
    torch.set_num_threads(1)  # two threads compute tiny experts 300 times as slowly
    theirs = make_model(architecture, next(iter(FAMILIES[architecture].variants)))
    save(theirs, root / "model")
    targets, stacked = names_of_targets(architecture, theirs)
    made = {}
    for seed, (name, config) in enumerate(kinds.items()):
        parameters = [] if config.get("use_dora") else stacked
        more = {"target_modules": targets, "target_parameters": parameters}
        made[name] = make_adapter(theirs, root / "adapters" / name, seed, **more, **config)
    return theirs, made


def start_nodes(
    options: Sequence[str], of_decode: Sequence[str] = ()
) -> list[subprocess.Popen[bytes]]:
    """Start a node of each role."""
    return [
        subprocess.Popen([sys.executable, "-m", "baton", role, *options, *more])
        for role, more in (("prefill", ()), ("decode", of_decode))
    ]


@contextlib.asynccontextmanager
async def running_pair(
    root: Path, adapters: Sequence[str], *more: str, of_decode: Sequence[str] = ()
) -> AsyncIterator[HandRouter]:
    """Run a prefill and a decode node that load these adapters at start.

    Args:
        more: further options of both nodes.
        of_decode: further options of the decode node.
    """
    router = HandRouter()
    await router.start()
    options = [
        "--model", str(root / "model"), "--router", router.address, "--dtype", "float32",
        "--block-size", "4", "--long-prefill-token-threshold", "8", "--kv-cache-memory", "16M",
        "--max-adapters", str(max(2, len(adapters))), "--adapter-root", str(root / "adapters"),
        "--num-threads", "1", "--drain-timeout-s", "0", *more,
    ]  # fmt: skip
    for name in adapters:
        options += ["--adapter", name]
    nodes = start_nodes(options, of_decode)
    try:
        await router.wait_for_pair()
        yield router
    finally:
        for node in nodes:
            node.terminate()
        for node in nodes:
            await asyncio.to_thread(node.wait, 30)
        await router.stop()


@pytest.mark.parametrize(("architecture", "num_ranks"), FAMILIES_HERE)
def test_split_equals_one_process_and_peft(
    architecture: str, num_ranks: int, tmp_path: Path
) -> None:
    """Eight adapters and the base model: in chunks, preempted, with prefix hits the second time."""
    theirs, made = make_scene(architecture, tmp_path, EIGHT)
    digests = {name: adapter_digest(one.folder) for name, one in made.items()} | {"": ""}
    models = {"": theirs, **{name: one.model for name, one in made.items()}}
    rows = [
        (name, *one)
        for name, model in models.items()
        for one in certain_prompts(model, 2, NUM_TOKENS, NUM_OUTPUTS, VOCAB_SIZE, seed=len(name))
    ]
    rows = rows[::2] + rows[1::2]  # adapters alternate
    llm = LLM(
        str(tmp_path / "model"),
        dtype="float32",
        block_size=4,
        num_blocks=NUM_BLOCKS,
        num_threads=1,
        long_prefill_token_threshold=8,
        adapters={name: one.folder for name, one in made.items()},
    )
    for _ in range(2):
        alone = llm.generate([row[1] for row in rows], GREEDY, adapter=[row[0] for row in rows])
        for (name, _, output), completion in zip(rows, alone, strict=True):
            assert list(completion.token_ids) == output, name
    assert llm.engine.metrics().preemptions_total > 0
    again = rows[1]
    for _ in range(2):
        [completion] = llm.generate([again[1]], GREEDY, adapter=again[0])
        assert list(completion.token_ids) == again[2]
    assert llm.engine.metrics().cached_prompt_tokens_total > 0
    crossed = rows[0][1]  # a prompt that was the base model's
    [expected_crossed] = llm.generate([crossed], GREEDY, adapter="lora8")
    metrics = free_address()
    ranks = ["--tensor-parallel-size", str(num_ranks)]
    of_decode = ["--num-blocks", str(NUM_BLOCKS), "--preemption", "recompute"]
    of_decode += ["--metrics-listen", metrics]

    async def check() -> None:
        async with running_pair(tmp_path, list(made), *ranks, of_decode=of_decode) as router:
            await until_reported(router, {digests[name] for name in made})
            for _ in range(2):  # the second time the nodes know the prompts
                answers = await asyncio.gather(
                    *(router.ask(prompt, GREEDY, digests[name]) for name, prompt, _ in rows)
                )
                for (name, _, output), answer in zip(rows, answers, strict=True):
                    assert answer.errors == [], f"{router.num_silences} requests were sent again"
                    assert answer.output == output, name
            for _ in range(2):
                answer = await router.ask(again[1], GREEDY, digests[again[0]])
                assert answer.output == again[2]
            assert answer.num_cached_tokens > 0
            answer = await router.ask(crossed, GREEDY, digests["lora8"])
            assert answer.num_cached_tokens == 0, "the base model's KV is of no use"
            assert answer.output == list(expected_crossed.token_ids)
            page = await asyncio.to_thread(read_page, f"http://{metrics}/metrics")
            assert not re.search(r"^baton:preemptions_total.* 0\.0$", page, re.MULTILINE), page

    asyncio.run(check())


@pytest.mark.large
def test_killed_nodes_change_no_token(tmp_path: Path) -> None:
    """Eight adapters and the base model decode without pause while nodes get SIGKILL."""
    theirs, made = make_scene("LlamaForCausalLM", tmp_path, EIGHT)
    models = {"base": theirs, **{name: one.model for name, one in made.items()}}
    rows = [
        (name, *one)
        for name, model in models.items()
        for one in certain_prompts(model, 2, NUM_TOKENS, NUM_OUTPUTS, VOCAB_SIZE, seed=len(name))
    ]
    root = ["--adapter-root", str(tmp_path / "adapters")]
    of_names = [word for name in made for word in ("--adapter", f"{name}={name}")]
    is_over, num_rounds, retried = False, [0] * len(rows), dict[str, int]()

    def has_asked(goal: int) -> bool:
        return min(num_rounds) >= goal

    def has_retried(before: int) -> bool:
        return sum(retried.values()) > before

    async def ask_often(client: AsyncClient, place: int) -> None:
        name, prompt, output = rows[place]
        while not is_over:
            found = await client.generate(prompt, GREEDY, timeout_s=60, model=name)
            assert list(found.token_ids) == output, name
            assert found.receipt is not None
            retried[name] = retried.get(name, 0) + found.receipt.num_attempts - 1
            num_rounds[place] += 1

    async def kill(deployment: LocalDeployment) -> None:
        nonlocal is_over
        try:
            for node in ("d0", "p0", "d1", "p1"):
                await until(functools.partial(has_asked, min(num_rounds) + 2))
                before = sum(retried.values())
                await asyncio.to_thread(deployment.restart, node)
                await until(functools.partial(has_retried, before))
                await asyncio.to_thread(deployment.wait_ready, READY_TIMEOUT_S)
        finally:
            is_over = True

    async def run(deployment: LocalDeployment) -> None:
        async with AsyncClient(deployment.config.listen) as client, asyncio.TaskGroup() as group:
            for place in range(len(rows)):
                group.create_task(ask_often(client, place))
            group.create_task(kill(deployment))

    with run_deployment(
        *("--block-size", "4", "--long-prefill-token-threshold", "8", "--kv-cache-memory", "16M"),
        *("--max-adapters", "8", *root),
        model=tmp_path / "model",
        num_prefill=2,
        num_decode=2,
        router_args=["--served-model-name", "base", *root, *of_names],
    ) as deployment:
        asyncio.run(run(deployment))
    assert set(retried) == set(models)


def read_page(address: str) -> str:
    with urllib.request.urlopen(address, timeout=20) as response:
        text: str = response.read().decode()
        return text


async def until_reported(router: HandRouter, digests: set[str]) -> None:
    """Wait until both nodes report these adapters in their beats."""
    nodes = router.nodes.values()
    await until(lambda: all(set(node.beat.adapters) == digests for node in nodes))


def test_operators_load_and_unload_while_nodes_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, made = make_scene("LlamaForCausalLM", tmp_path, TWO)
    hub, site = tmp_path / "hub", tmp_path / "site"
    monkeypatch.setenv("HF_HUB_CACHE", str(hub))
    monkeypatch.setenv("PYTHONPATH", str(site))
    shutil.copytree(made["two"].folder, cache(hub, "team/two"), dirs_exist_ok=True)
    shutil.copytree(made["one"].folder, site / "habit")
    install(site, "habit-adapter", [f"habit/{one.name}" for one in (site / "habit").iterdir()])
    digests = {name: adapter_digest(one.folder) for name, one in made.items()}
    (prompt, output), _ = certain_prompts(theirs, 2, NUM_TOKENS, NUM_OUTPUTS, VOCAB_SIZE)
    adapted, by_two = (
        certain_prompts(made[name].model, 1, NUM_TOKENS, NUM_OUTPUTS, VOCAB_SIZE)[0]
        for name in ("one", "two")
    )

    async def load(router: HandRouter, digest: str, source: str) -> list[str]:
        """Load on both nodes; return what each of them said."""
        request = admin_pb2.LoadAdapterRequest(digest=digest, source=source)
        said = []
        for role in PAIR_ROLES:
            found = await router.admin(role, load_adapter=request)
            if isinstance(found, RequestError):
                said.append(f"{found.code}: {found.message}")
            else:
                said += [one.digest for one in found.adapters]
        return said

    async def check() -> None:
        one, two = digests["one"], digests["two"]
        async with running_pair(tmp_path, []) as router:
            answer = await router.ask(prompt, GREEDY, one)
            for error in answer.errors:
                assert error.code == ADAPTER_MISSING
                assert error.message.startswith(f"adapter: {one[:12]} is not loaded here")
            assert answer.errors
            assert await load(router, one, "habit-adapter") == [one, one]
            await until_reported(router, {one})
            assert (await router.ask(adapted[0], GREEDY, one)).output == adapted[1]
            assert (await router.ask(prompt, GREEDY)).output == output
            for source, problem in {
                "two": f"has the digest {two}, not {'0' * 64}",
                "../model": "must be a path below the adapters' folder",
                "none": "no such folder",
            }.items():
                for line in await load(router, "0" * 64, source):
                    assert line.startswith("INVALID_ARGUMENT: adapter: ")
                    assert problem in line
            unload = admin_pb2.UnloadAdapterRequest(digest=one)
            for role in PAIR_ROLES:
                found = await router.admin(role, unload_adapter=unload)
                assert not isinstance(found, RequestError)
                assert list(found.adapters) == []
            answer = await router.ask(adapted[0], GREEDY, one)
            assert answer.output == adapted[1], "it comes back; the base model never answers"
            for role in PAIR_ROLES:
                await router.admin(role, unload_adapter=unload)
            assert await load(router, one, "gone") == [one, one], "its numbers were kept"
            fresh, expected = certain_prompts(
                made["one"].model, 2, NUM_TOKENS, NUM_OUTPUTS, VOCAB_SIZE
            )[1]
            answer = await router.ask(fresh, GREEDY, one, of_prefill="")
            assert [error.message for error in answer.errors] == [
                "decode: the commit record does not fit"
            ]
            answer = await router.ask(fresh, GREEDY, one)
            assert answer.output == expected, "the base model's KV was cached for the adapter"
            await until_reported(router, {one})
            for _ in range(2):
                answer = await router.ask(by_two[0], GREEDY, two, source="team/two")
                assert answer.output == by_two[1], "both nodes load it when they are asked for it"
            await until_reported(router, {one, two})
            answer = await router.ask(by_two[0], GREEDY, "0" * 64, source="two")
            assert {error.code for error in answer.errors} == {ADAPTER_MISSING}
            assert not answer.output

    asyncio.run(check())


def test_a_node_that_cannot_load_its_adapters_does_not_start(tmp_path: Path) -> None:
    make_scene("LlamaForCausalLM", tmp_path, TWO)
    other = make_hugging_face_model("LlamaForCausalLM", hidden_size=48)
    save(other, tmp_path / "other")
    for options, problem in (
        (["--adapter", "one"], "max-adapters: must be 1 or more with --adapter-root, got 0"),
        (
            ["--max-adapters", "1", "--adapter", "one", "--adapter", "two"],
            "max-adapters: must be at least 2 for that many --adapter, got 1",
        ),
        (
            ["--max-adapters", "1", "--adapter", "none"],
            "'none': no such folder or file below --adapter-root",
        ),
        (
            ["--model", str(tmp_path / "other"), "--max-adapters", "1", "--adapter", "one"],
            "was it trained for another base model?",
        ),
    ):
        model = [] if "--model" in options else ["--model", str(tmp_path / "model")]
        done = subprocess.run(
            [sys.executable, "-m", "baton", "prefill", *model, "--router", "127.0.0.1:9",
             "--adapter-root", str(tmp_path / "adapters"), *options],
            capture_output=True, text=True, timeout=90, check=False,
        )  # fmt: skip
        assert done.returncode != 0
        assert problem in done.stderr
        assert "Traceback" not in done.stderr
