"""Adapters over several ranks, each of them a process of its own, equal PEFT over transformers."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.adapters.digest import AdapterError
from baton.api.sampling_params import SamplingParams
from engine import LLM
from tests.numerics.family_checkpoints import richest_variants
from tests.numerics.peft_adapters import PeftAdapter, certain_prompts, logits_of, make_adapter
from tests.numerics.test_adapters_of_each_family import (
    NUM_OUTPUTS,
    VOCAB_SIZE,
    adapt_all,
    assert_several_outputs,
    make_model,
)
from tests.numerics.tiny_models import save

pytestmark = pytest.mark.medium

NUM_TOKENS = 14
GREEDY = SamplingParams(max_tokens=NUM_OUTPUTS, temperature=0, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Scene:
    """A model, its adapters, and rows of (adapter, prompt, output by PEFT)."""

    folder: Path
    theirs: Any
    made: dict[str, PeftAdapter]
    rows: list[tuple[str, list[int], list[int]]]

    @contextlib.contextmanager
    def llm(self, shape: tuple[int, int], **options: Any) -> Iterator[LLM]:
        """Start as many ranks of a stage, and stages, as ``shape`` says."""
        llm = LLM(
            str(self.folder),
            dtype="float32",
            block_size=4,
            num_blocks=200,
            num_threads=1,
            max_adapters=4,
            long_prefill_token_threshold=6,
            tensor_parallel_size=shape[0],
            pipeline_parallel_size=shape[1],
            adapters={name: one.folder for name, one in self.made.items()},
            **options,
        )
        try:
            yield llm
        finally:
            llm.engine.close()

    def assert_right(self, llm: LLM) -> None:
        """Compare tokens of mixed rows, computed in chunks, and logprobs of prompts."""
        prompts, names = [row[1] for row in self.rows], [row[0] for row in self.rows]
        for _ in range(2):  # prefixes are known the second time
            completions = llm.generate(prompts, GREEDY, adapter=names)
            for (name, _, output), completion in zip(self.rows, completions, strict=True):
                assert list(completion.token_ids) == output, name
        for name, one in self.made.items():
            prompt, output = next(row[1:] for row in self.rows if row[0] == name)
            scored = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
            [completion] = llm.generate([prompt], scored, adapter=name)
            ours = [one.logprob for one in completion.prompt_logprobs if one is not None]
            theirs = logits_of(one.model, prompt).log_softmax(-1)
            chosen = theirs[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:])]
            assert float((torch.tensor(ours) - chosen).abs().max()) < 2e-3, name
            assert_several_outputs(llm, name, one.model, prompt, output)


def make_scene(theirs: Any, root: Path, made: dict[str, PeftAdapter]) -> Scene:
    models = {"": theirs, **{name: one.model for name, one in made.items()}}
    rows = [
        (name, *one)
        for name, model in models.items()
        for one in certain_prompts(model, 2, NUM_TOKENS, NUM_OUTPUTS, VOCAB_SIZE, seed=len(name))
    ]
    return Scene(save(theirs, root / "model"), theirs, made, rows[::2] + rows[1::2])


SHAPES = [(2, 1), (1, 2), (3, 1), (2, 2)]  # ranks of a stage, and stages


Q_PROJ = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    """All linear layers with LoRA and DoRA; embedding and head with another adapter.

    The first and the last row of a weight are 0, so that DoRA needs these rows of B.
    """
    root = tmp_path_factory.mktemp("dense")
    theirs = make_model("LlamaForCausalLM", "plain")
    with torch.no_grad():
        theirs.model.layers[0].self_attn.q_proj.weight[[0, -1]] = 0
    outer: dict[str, Any] = {"target_modules": ["embed_tokens", "lm_head"], "r": 4}
    made = adapt_all("LlamaForCausalLM", theirs, root)
    made["outer"] = make_adapter(theirs, root / "outer", 3, **outer)
    return make_scene(theirs, root, made)


DRAFTS = {
    "speculative_method": "ngram",
    "ngram_min": 1,
    "num_speculative_tokens": 4,
    "adaptive_speculation": False,
}


@pytest.mark.parametrize(
    ("shape", "options"), [((2, 1), DRAFTS), ((1, 2), {})], ids=["two ranks", "two stages"]
)
def test_mixed_rows_equal_peft_over_ranks(
    dense: Scene, shape: tuple[int, int], options: dict[str, Any]
) -> None:
    with dense.llm(shape, **options) as llm:
        dense.assert_right(llm)
        assert llm.engine.metrics().drafts_total > 0 or not options
        assert llm.engine.metrics().cached_prompt_tokens_total > 0
        for row in (0, -1):  # with two ranks in a stage, the first or the second one has the row
            refuse_on_one_rank(llm, dense, row)
        for digest in llm.engine.adapters.digests:
            assert llm.engine.adapters.unload(digest)
            assert llm.engine.adapters.load_again(digest)
        dense.assert_right(llm)


def refuse_on_one_rank(llm: LLM, scene: Scene, row: int) -> None:
    """Load an adapter that only one rank finds to be wrong: no rank keeps the adapter."""
    folder = scene.folder.parent / "zero"
    shutil.copytree(scene.made["dora"].folder, folder, dirs_exist_ok=True)
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors[f"{Q_PROJ}.lora_B.weight"][row] = 0
    save_file(tensors, folder / "adapter_model.safetensors")
    before = llm.engine.adapters.views()
    with pytest.raises(AdapterError, match=f"^adapter: .*{Q_PROJ}.lora_B.weight: a row of the"):
        llm.load_adapter("zero", folder)
    assert llm.engine.adapters.views() == before


@pytest.mark.large
@pytest.mark.lengthy
@pytest.mark.parametrize(("architecture", "variant"), richest_variants())
def test_every_family_over_ranks(architecture: str, variant: str, tmp_path: Path) -> None:
    theirs = make_model(architecture, variant)
    scene = make_scene(theirs, tmp_path, adapt_all(architecture, theirs, tmp_path))
    for shape in SHAPES:
        with scene.llm(shape) as llm:
            scene.assert_right(llm)
