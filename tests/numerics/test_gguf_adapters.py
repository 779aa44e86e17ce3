"""LoRA adapters in GGUF files equal the same adapters in PEFT's layout, and so PEFT itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType
from safetensors.torch import load_file
from torch import nn

from baton.adapters.digest import AdapterError
from baton.api.sampling_params import SamplingParams
from baton.checkpoint.gguf import folder as gguf_folder
from engine import LLM
from tests.fakes.checkpoints.gguf_adapters import convert_adapter
from tests.fakes.checkpoints.gguf_conversion import converted, write_checkpoint
from tests.numerics.gguf_families import GGUF_FAMILIES, SHAPE, common_fields
from tests.numerics.peft_adapters import certain_prompts, make_adapter
from tests.numerics.tiny_models import make_hugging_face_model, save

pytestmark = pytest.mark.medium

NUM_OUTPUTS = 6
GATED = ("llama", "llama (Mistral)", "phi3", "qwen3moe", "qwen35", "gemma3")
# The converter cuts or joins these modules, so that a file has no LoRA of the whole.
CUT = ("in_proj_qkvz", "kv_b_proj", "shared_mlp", "shared_expert_gate", "input_linear")

# PEFT adapts little of these, or the converter cuts what it adapts; Bamba's files say Granite.
WITHOUT = ("nemotron_h", "nemotron_h_moe", "lfm2", "gpt-oss", "granitehybrid (Bamba)")
# PEFT takes these names for parameters of experts, wherever they are.
OF_EXPERTS = (".gate_proj", ".up_proj", ".down_proj")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folders").mkdir()
    monkeypatch.setattr(gguf_folder, "own_cache_folder", lambda name: tmp_path / "folders")


def targets_of(theirs: Any) -> dict[str, Any]:
    names = [name for name, one in theirs.named_modules() if isinstance(one, nn.Linear)]
    experts = [name for name, one in theirs.named_parameters() if one.dim() == 3]
    stacked = [one for one in experts if ".experts." in one]
    cut = (*CUT, *OF_EXPERTS) if stacked else CUT
    if theirs.config.tie_word_embeddings:  # a file has one tensor for both
        cut = (*cut, "lm_head")
    plain = [one for one in names if not any(word in one for word in cut)]
    return {"target_modules": [*plain, "embed_tokens"], "target_parameters": stacked}


def tokens(model: Path, prompts: list[list[int]], adapter: Path, **options: Any) -> list[list[int]]:
    llm = LLM(str(model), dtype="float32", num_blocks=100, adapters={"one": adapter}, **options)
    params = SamplingParams(max_tokens=NUM_OUTPUTS, temperature=0, ignore_eos=True)
    return [list(one.token_ids) for one in llm.generate(prompts, params, adapter="one")]


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in GATED else pytest.mark.thorough)
        for name, family in GGUF_FAMILIES.items()
        if name not in WITHOUT
    ],
)
def test_a_file_equals_its_adapter_in_pefts_layout(name: str, tmp_path: Path) -> None:
    family, architecture = GGUF_FAMILIES[name], name.partition(" ")[0]
    theirs = make_hugging_face_model(family.model, **{**SHAPE, **family.shape})
    folder = save(theirs, tmp_path / "model")
    made = make_adapter(theirs, tmp_path / "peft", r=4, lora_alpha=2, **targets_of(theirs))
    path = convert_adapter(made.folder, tmp_path / "one.gguf", architecture, theirs.config)
    expected = certain_prompts(made.model, 2, 10, NUM_OUTPUTS, SHAPE["vocab_size"])
    prompts, outputs = [prompt for prompt, _ in expected], [output for _, output in expected]
    assert tokens(folder, prompts, made.folder) == outputs
    assert tokens(folder, prompts, path) == outputs


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K"])
def test_both_forms_over_a_base_model_that_stays_packed(kind: str, tmp_path: Path) -> None:
    family = GGUF_FAMILIES["llama"]
    theirs = make_hugging_face_model(family.model, **{**SHAPE, **family.shape})
    folder = save(theirs, tmp_path / "model")
    stored = load_file(folder / "model.safetensors")
    base = write_checkpoint(
        tmp_path / "base.gguf",
        "llama",
        converted("llama", stored, theirs.config),
        GGMLQuantizationType[kind],
        common_fields(theirs.config) | family.fields(theirs.config),
        vocab_size=theirs.config.vocab_size,
    )
    made = make_adapter(theirs, tmp_path / "peft", r=4, lora_alpha=2, **targets_of(theirs))
    path = convert_adapter(made.folder, tmp_path / "one.gguf", "llama", theirs.config)
    prompts = [[3, 1, 4, 1, 5], [2, 7, 1, 8, 2, 8]]
    assert tokens(base, prompts, path) == tokens(base, prompts, made.folder)


def test_files_of_another_architecture_are_refused(tmp_path: Path) -> None:
    """Names and shapes fit, but the order of rows does not."""
    theirs = make_hugging_face_model("LlamaForCausalLM", **SHAPE)
    folder = save(theirs, tmp_path / "model")
    made = make_adapter(theirs, tmp_path / "peft", r=4, target_modules=["q_proj"])
    path = convert_adapter(made.folder, tmp_path / "one.gguf", "qwen2", theirs.config)
    with pytest.raises(
        AdapterError,
        match=r"general\.architecture: 'qwen2', but the base model is a LlamaForCausalLM",
    ):
        tokens(folder, [[1, 2, 3]], path)
