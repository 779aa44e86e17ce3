"""Adapters over real processes: a prefill and a decode node give the tokens of PEFT.

The router is a test's hand (`tests/fakes/hand_router.py`): nodes know adapters by digest alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from baton.adapters.files import adapter_digest
from baton.api.sampling_params import SamplingParams
from baton.link.words import ADAPTER_MISSING, NodeRole, RequestError
from baton.v1 import admin_pb2
from engine import LLM
from tests.fakes.adapter_files import cache, install
from tests.fakes.hand_router import HandRouter, until
from tests.numerics.family_checkpoints import FAMILIES
from tests.numerics.peft_adapters import certain_prompts, make_adapter
from tests.numerics.tiny_models import make_hugging_face_model, save

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(200)]

VOCAB_SIZE = 61
NUM_OUTPUTS = 8
NUM_TOKENS = 30
GREEDY = SamplingParams(max_tokens=NUM_OUTPUTS, temperature=0, ignore_eos=True, seed=1)
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
# Target modules of each family's adapters.
FAMILIES_HERE = {
    "LlamaForCausalLM": ALL,
    "Qwen3ForCausalLM": ALL,
    "Qwen3MoeForCausalLM": ATTENTION,
    "Qwen3NextForCausalLM": ATTENTION,
}
OPTIONS = {"dtype": "float32", "block_size": 4, "long_prefill_token_threshold": 8}


def make_scene(architecture: str, root: Path) -> tuple[Any, dict[str, Any]]:
    """Make a model with two adapters below ``root``."""
    variants = FAMILIES[architecture].variants if architecture in FAMILIES else {"plain": {}}
    shape = {"vocab_size": VOCAB_SIZE, "initializer_range": 0.4, "max_position_embeddings": 128}
    theirs = make_hugging_face_model(architecture, **(shape | dict(next(iter(variants.values())))))
    save(theirs, root / "model")
    targets = FAMILIES_HERE[architecture]
    made = {
        name: make_adapter(theirs, root / "adapters" / name, seed, target_modules=targets, **config)
        for seed, (name, config) in enumerate(
            {
                "one": {"r": 8, "lora_alpha": 16},
                "two": {"r": 4, "lora_alpha": 4, "use_dora": True, "use_rslora": True},
            }.items()
        )
    }
    return theirs, made


def start_nodes(options: Sequence[str]) -> list[subprocess.Popen[bytes]]:
    """Start a node of each role."""
    return [
        subprocess.Popen([sys.executable, "-m", "baton", role, *options])
        for role in ("prefill", "decode")
    ]


@contextlib.asynccontextmanager
async def running_pair(root: Path, adapters: Sequence[str]) -> AsyncIterator[HandRouter]:
    """Run a prefill and a decode node that load these adapters at start."""
    router = HandRouter()
    await router.start()
    options = [
        "--model", str(root / "model"), "--router", router.address, "--dtype", "float32",
        "--block-size", "4", "--long-prefill-token-threshold", "8", "--kv-cache-memory", "16M",
        "--max-adapters", "2", "--adapter-root", str(root / "adapters"), "--num-threads", "1",
        "--drain-timeout-s", "0",
    ]  # fmt: skip
    for name in adapters:
        options += ["--adapter", name]
    nodes = start_nodes(options)
    try:
        await router.wait_for_pair()
        yield router
    finally:
        for node in nodes:
            node.terminate()
        for node in nodes:
            await asyncio.to_thread(node.wait, 30)
        await router.stop()


@pytest.mark.parametrize("architecture", FAMILIES_HERE)
def test_split_equals_one_process_and_peft(architecture: str, tmp_path: Path) -> None:
    theirs, made = make_scene(architecture, tmp_path)
    digests = {name: adapter_digest(one.folder) for name, one in made.items()} | {"": ""}
    models = {"": theirs, **{name: one.model for name, one in made.items()}}
    expected = {
        name: certain_prompts(model, 2, NUM_TOKENS, NUM_OUTPUTS, VOCAB_SIZE, seed=len(name))
        for name, model in models.items()
    }
    rows = [(name, *one) for name, both in expected.items() for one in both]
    llm = LLM(
        str(tmp_path / "model"),
        num_blocks=400,
        adapters={name: one.folder for name, one in made.items()},
        **OPTIONS,
    )
    alone = llm.generate([row[1] for row in rows], GREEDY, adapter=[row[0] for row in rows])
    assert [list(one.token_ids) for one in alone] == [output for _, _, output in rows]

    crossed = expected[""][0][0]  # a prompt that was the base model's
    [expected_crossed] = llm.generate([crossed], GREEDY, adapter="one")

    async def check() -> None:
        async with running_pair(tmp_path, list(made)) as router:
            await until_reported(router, {digests[name] for name in made})
            for _ in range(2):  # the second time the nodes know the prompts
                answers = await asyncio.gather(
                    *(router.ask(prompt, GREEDY, digests[name]) for name, prompt, _ in rows)
                )
                for (name, _, output), answer in zip(rows, answers, strict=True):
                    assert answer.errors == []
                    assert answer.output == output, name
            answer = await router.ask(crossed, GREEDY, digests["one"])
            assert answer.num_cached_tokens == 0, "the base model's KV is of no use"
            assert answer.output == list(expected_crossed.token_ids)

    asyncio.run(check())


async def until_reported(router: HandRouter, digests: set[str]) -> None:
    """Wait until both nodes report these adapters in their beats."""
    nodes = router.nodes.values()
    await until(lambda: all(set(node.beat.adapters) == digests for node in nodes))


def test_operators_load_and_unload_while_nodes_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, made = make_scene("LlamaForCausalLM", tmp_path)
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
        for role in NodeRole:
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
            for role in NodeRole:
                found = await router.admin(role, unload_adapter=unload)
                assert not isinstance(found, RequestError)
                assert list(found.adapters) == []
            answer = await router.ask(adapted[0], GREEDY, one)
            assert answer.output == adapted[1], "it comes back; the base model never answers"
            for role in NodeRole:
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
    make_scene("LlamaForCausalLM", tmp_path)
    other = make_hugging_face_model("LlamaForCausalLM", hidden_size=48)
    save(other, tmp_path / "other")
    for options, problem in (
        (["--adapter", "one"], "max-adapters: must be 1 or more with --adapter-root, got 0"),
        (
            ["--max-adapters", "1", "--adapter", "one", "--adapter", "two"],
            "max-adapters: must be at least 2 for that many --adapter, got 1",
        ),
        (["--max-adapters", "1", "--adapter", "none"], "'none': no such folder or file below --adapter-root"),
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
