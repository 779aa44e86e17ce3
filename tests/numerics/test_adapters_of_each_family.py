"""LoRA adapters equal PEFT over transformers: every linear layer of every family, in float32."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from baton.adapters.digest import AdapterError
from baton.api.sampling_params import SamplingParams
from baton_kernels.dispatch import native_ops
from engine import LLM
from models.adapters.targets import Targets
from models.config import ModelConfig
from models.family import TextPart
from models.registry import MODELS
from tests.numerics.family_checkpoints import FAMILIES, richest_variants
from tests.numerics.peft_adapters import (
    PeftAdapter,
    certain_prompts,
    logits_of,
    logprob_of,
    make_adapter,
)
from tests.numerics.tiny_models import make_hugging_face_model, save

pytestmark = pytest.mark.medium

VOCAB_SIZE = 61
NUM_OUTPUTS = 6
# One of each way to store and to join layers; `make test-thorough` has the others.
FIRST = (
    "LlamaForCausalLM", "Qwen3ForCausalLM", "Phi3ForCausalLM", "Qwen2MoeForCausalLM",
    "Qwen3NextForCausalLM", "DeepseekV3ForCausalLM", "GraniteMoeHybridForCausalLM",
)  # fmt: skip
CASES = [
    pytest.param(
        architecture,
        variant,
        id=f"{architecture}, {variant}",
        marks=() if architecture in FIRST else pytest.mark.thorough,
    )
    for architecture, variant in richest_variants()
]
OF_IMAGES = ("visual", "vision_tower", "multi_modal_projector", "embed_vision")
# Architectures that also see images.
BESIDE_IMAGES = [
    name
    for name in MODELS.names()
    if isinstance(MODELS.load(name), TextPart) or "ForConditional" in name
]
# Names of layers that transformers wrote before 4.52, and Qwen's of that time.
OLDER = {"model.language_model.": "language_model.model.", "lm_head": "language_model.lm_head"}
QWENS = {"model.language_model.": "model."}


def assert_several_outputs(
    llm: LLM, name: str, model: Any, prompt: list[int], output: list[int]
) -> None:
    """Compare equal outputs of one request, and a beam search, with PEFT."""
    twice = SamplingParams(max_tokens=len(output), temperature=0, ignore_eos=True, n=2)
    completions = llm.generate([prompt], twice, adapter=name)
    assert [list(one.token_ids) for one in completions] == [output, output]
    [[best, other]] = llm.beam_search([prompt], beam_width=2, max_tokens=3, adapter=name)
    for beam in (best, other):
        expected = logprob_of(model, prompt, beam.token_ids)
        assert beam.logprob == pytest.approx(expected, abs=5e-3), name
    if not llm.engine.eos_token_ids & set(output[:3]):  # or the search ends there
        assert best.logprob >= logprob_of(model, prompt, output[:3]) - 5e-3


OF_EXPERTS = (".gate_proj", ".up_proj", ".down_proj", ".gate", ".w1", ".w2", ".w3")


def make_model(architecture: str, variant: str) -> Any:
    shape: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,
        "attn_implementation": "eager",
    }
    overrides = dict(FAMILIES[architecture].variants[variant])
    return make_hugging_face_model(architecture, **(shape | overrides))


def is_of_experts(name: str, parameter: nn.Parameter) -> bool:
    """Return whether a parameter has the weights of all experts, or of their router."""
    is_router = name.endswith((".gate.weight", ".router.weight")) and "shared" not in name
    return is_router or (parameter.dim() == 3 and ".experts." in name)


def linears_of(theirs: Any) -> set[str]:
    every = {name for name, one in theirs.named_modules() if isinstance(one, nn.Linear)}
    return {name for name in every if not set(name.split(".")) & set(OF_IMAGES)}


def names_of_targets(architecture: str, theirs: Any) -> tuple[list[str], list[str]]:
    """Return the linear layers and the parameters of experts that PEFT can adapt."""
    names = sorted(linears_of(theirs) - {"lm_head"})
    stacked = [name for name, one in theirs.named_parameters() if is_of_experts(name, one)]
    if stacked:  # PEFT takes these names for parameters of experts, wherever they are
        names = [name for name in names if not name.endswith(OF_EXPERTS)]
    if architecture == "NemotronHForCausalLM":  # PEFT refuses these, for the sake of CUDA kernels
        names = [name for name in names if not name.endswith(".out_proj")]
    assert len({name.rpartition(".")[2] for name in names}) >= 2
    return names, stacked


def adapt_all(architecture: str, theirs: Any, root: Path) -> dict[str, PeftAdapter]:
    """Make adapters of all targets: one of LoRA, and one of DoRA where PEFT has DoRA."""
    names, stacked = names_of_targets(architecture, theirs)
    plain = {"r": 3, "lora_alpha": 5, "target_modules": names}
    return {  # PEFT has no DoRA for parameters
        "lora": make_adapter(theirs, root / "lora", 1, **plain, target_parameters=stacked),
        "dora": make_adapter(theirs, root / "dora", 2, use_dora=True, **plain),
    }


@pytest.mark.parametrize(("architecture", "variant"), CASES)
def test_all_targets_together_and_one_by_one(
    architecture: str, variant: str, tmp_path: Path
) -> None:
    theirs = make_model(architecture, variant)
    folder = save(theirs, tmp_path / "model")
    targets = Targets.of(ModelConfig.from_folder(folder))
    assert all(map(targets.find, linears_of(theirs)))
    made = adapt_all(architecture, theirs, tmp_path)
    llm = LLM(
        str(folder),
        dtype="float32",
        num_blocks=400,
        adapters={name: one.folder for name, one in made.items()},
    )
    expected = {
        name: certain_prompts(model, 2, 14, NUM_OUTPUTS, VOCAB_SIZE, seed=len(name))
        for name, model in {"": theirs, **{n: one.model for n, one in made.items()}}.items()
    }
    rows = [(name, *one) for name, both in expected.items() for one in both]
    rows = rows[::2] + rows[1::2]  # adapters alternate
    params = SamplingParams(max_tokens=NUM_OUTPUTS, temperature=0, ignore_eos=True)
    completions = llm.generate(
        [prompt for _, prompt, _ in rows], params, adapter=[name for name, _, _ in rows]
    )
    for (name, _, output), completion in zip(rows, completions, strict=True):
        assert list(completion.token_ids) == output, name
    for name in made:
        [(prompt, _), _] = expected[name]
        scored = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
        [completion] = llm.generate([prompt], scored, adapter=name)
        ours = torch.tensor([one.logprob for one in completion.prompt_logprobs if one is not None])
        theirs_all = logits_of(made[name].model, prompt).log_softmax(-1)
        chosen = theirs_all[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:])]
        assert float((ours - chosen).abs().max()) < 2e-3, name
        assert_several_outputs(llm, name, made[name].model, *expected[name][0])


def rename(folder: Path, prefixes: Mapping[str, str]) -> None:
    """Give the layers of an adapter's file other names."""
    path, of_peft = folder / "adapter_model.safetensors", "base_model.model."
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(path).items():
        plain = name.removeprefix(of_peft)
        before = next((one for one in prefixes if plain.startswith(one)), "")
        tensors[of_peft + prefixes.get(before, "") + plain.removeprefix(before)] = tensor
    assert tensors.keys() != load_file(path).keys()
    save_file(tensors, path)


@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(name, marks=() if name.startswith("Gemma") else pytest.mark.thorough)
        for name in BESIDE_IMAGES
    ],
)
def test_adapters_trained_beside_images_in_old_and_new_names(
    architecture: str, tmp_path: Path
) -> None:
    theirs = make_model(architecture, next(iter(FAMILIES[architecture].variants)))
    folder = save(theirs, tmp_path / "model")
    texts, settings = ["q_proj", "down_proj"], {"r": 3, "lora_alpha": 5}
    if not theirs.config.get_text_config().tie_word_embeddings:
        texts.append("lm_head")
    of_text = [name for name in linears_of(theirs) if name.endswith(tuple(texts))]
    made = make_adapter(theirs, tmp_path / "new", target_modules=of_text, **settings)
    shutil.copytree(made.folder, tmp_path / "old")
    if not architecture.startswith(("Qwen3_5", "Qwen3VLMoe")):  # which had no older names
        rename(tmp_path / "old", QWENS if "Qwen" in architecture else OLDER)
    llm = LLM(
        str(folder),
        dtype="float32",
        num_blocks=100,
        adapters={name: tmp_path / name for name in ("new", "old")},
    )
    [(prompt, output)] = certain_prompts(made.model, 1, 14, NUM_OUTPUTS, VOCAB_SIZE)
    params = SamplingParams(max_tokens=NUM_OUTPUTS, temperature=0, ignore_eos=True)
    both = llm.generate([prompt, prompt], params, adapter=["new", "old"])
    assert [list(one.token_ids) for one in both] == [output, output]
    every = [name for name, one in theirs.named_modules() if isinstance(one, nn.Linear)]
    image = next(name for name in every if name not in linears_of(theirs))
    make_adapter(theirs, tmp_path / "image", target_modules=[*of_text, image], **settings)
    problem = f"{image.removeprefix('model.')}.lora_A.weight: adapts the image part"
    for shorter in (image, image.removeprefix("model.")):  # new and old names
        if shorter != image:
            rename(tmp_path / "image", {image: shorter})
        with pytest.raises(AdapterError, match=problem):
            llm.load_adapter("image", tmp_path / "image")


SINGLE = ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj", "mlp.experts.{}.down_proj")
SHARED = ("mlp.shared_expert.gate_proj", "mlp.shared_expert.down_proj", "mlp.shared_expert_gate")


@pytest.mark.parametrize("options", [{}, {"native_kernels": False}], ids=["native", "torch"])
def test_single_experts_and_shared_ones_equal_a_merged_model(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """PEFT cannot adapt these in this version of transformers; older adapters have them."""
    theirs = make_model("Qwen2MoeForCausalLM", "plain")
    folder = save(theirs, tmp_path / "model")
    mlp = theirs.model.layers[0].mlp
    num_experts, size = mlp.experts.num_experts, mlp.experts.intermediate_dim
    torch.manual_seed(3)
    tensors: dict[str, torch.Tensor] = {}

    def add(name: str, weight: torch.Tensor) -> None:
        """Draw a product of rank 2 and scale 2, and merge it."""
        a, b = torch.empty(2, weight.shape[1]), torch.empty(weight.shape[0], 2)
        for tensor, kind in ((a, "A"), (b, "B")):
            tensor.uniform_(-0.3, 0.3)
            tensors[f"base_model.model.model.layers.0.{name}.lora_{kind}.weight"] = tensor
        weight.data += 2 * b @ a

    with torch.no_grad():
        for expert in range(0, num_experts, 2):
            gate_up, down = mlp.experts.gate_up_proj[expert], mlp.experts.down_proj[expert]
            for name, weight in zip(SINGLE, (gate_up[:size], gate_up[size:], down), strict=True):
                add(name.format(expert), weight)
        for name in SHARED:
            add(name, theirs.get_submodule(f"model.layers.0.{name}").weight)
        add("mlp.gate", mlp.gate.weight)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    save_file(tensors, adapter / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    expected = certain_prompts(theirs, 4, 14, NUM_OUTPUTS, VOCAB_SIZE)
    llm = LLM(str(folder), dtype="float32", num_blocks=100, adapters={"it": adapter}, **options)
    params = SamplingParams(max_tokens=NUM_OUTPUTS, temperature=0, ignore_eos=True)
    prompts = [prompt for prompt, _ in expected]
    plain = llm.generate(prompts, params)
    mixed = llm.generate([*prompts, *prompts], params, adapter=[*["it"] * 4, *[""] * 4])
    assert [list(one.token_ids) for one in mixed[:4]] == [output for _, output in expected]
    assert [one.token_ids for one in mixed[4:]] == [one.token_ids for one in plain]


# With variants whose blocks run out below.
DENSE = (
    ("LlamaForCausalLM", "plain"), ("Qwen2ForCausalLM", "plain"),
    ("Gemma3ForCausalLM", "windows 2:1, two RoPEs, a soft cap"), ("MistralForCausalLM", "plain"),
    ("Phi3ForCausalLM", "plain"), ("SmolLM3ForCausalLM", "plain"),
)  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"r": 8, "lora_alpha": 8},
    "rslora": {"r": 16, "lora_alpha": 8, "use_rslora": True},
    "patterns": {
        "r": 64, "lora_alpha": 16,
        "rank_pattern": {"o_proj": 5, "^model.layers.1.mlp.down_proj": 32},
        "alpha_pattern": {"layers.0.self_attn.o_proj": 9},
    },
    "dora": {"r": 256, "lora_alpha": 16, "use_dora": True},
}  # fmt: skip


@pytest.mark.parametrize(("architecture", "variant"), DENSE)
def test_ranks_and_variants_mixed_with_the_base_model(
    architecture: str, variant: str, tmp_path: Path
) -> None:
    """Chunked, preempted, and with prefix hits the second time."""
    theirs = make_model(architecture, variant)
    folder = save(theirs, tmp_path / "model")
    names = [name for name, one in theirs.named_modules() if isinstance(one, nn.Linear)]
    targets = [name for name in names if name != "lm_head"]
    made = {
        name: make_adapter(theirs, tmp_path / name, seed, target_modules=targets, **kind)
        for seed, (name, kind) in enumerate(KINDS.items())
    }
    models = {"": theirs, **{name: one.model for name, one in made.items()}}
    rows = [
        (name, *one)
        for name, model in models.items()
        for one in certain_prompts(model, 2, 20, NUM_OUTPUTS, VOCAB_SIZE, seed=len(name))
    ]
    rows = rows[::2] + rows[1::2]
    llm = LLM(
        str(folder),
        dtype="float32",
        block_size=4,
        num_blocks=30,
        max_num_batched_tokens=16,
        long_prefill_token_threshold=7,
        adapters={name: one.folder for name, one in made.items()},
    )
    params = SamplingParams(max_tokens=NUM_OUTPUTS, temperature=0, ignore_eos=True)
    for _ in range(2):
        completions = llm.generate(
            [prompt for _, prompt, _ in rows], params, adapter=[name for name, _, _ in rows]
        )
        for (name, _, output), completion in zip(rows, completions, strict=True):
            assert list(completion.token_ids) == output, name
    assert llm.engine.metrics().preemptions_total > 0
    again = rows[0]
    before = llm.engine.metrics().cached_prompt_tokens_total
    for _ in range(2):
        [completion] = llm.generate([again[1]], params, adapter=again[0])
        assert list(completion.token_ids) == again[2]
    assert llm.engine.metrics().cached_prompt_tokens_total > before


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Gemma3ForCausalLM"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("options", [{}, {"native_kernels": False}], ids=["native", "torch"])
def test_embeddings_and_heads(
    architecture: str, tied: bool, options: dict[str, Any], tmp_path: Path
) -> None:
    """Also where prompts' logprobs and drafts need logits of more than the last token."""
    theirs = make_hugging_face_model(
        architecture,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=64,
        initializer_range=0.1 if architecture.startswith("Gemma") else 0.3,
        attn_implementation="eager",
        tie_word_embeddings=tied,
    )
    folder = save(theirs, tmp_path / "model")
    plain = {"r": 3, "lora_alpha": 5}
    made = {
        "both": make_adapter(
            theirs, tmp_path / "both", 1, target_modules=["embed_tokens", "lm_head"], **plain
        ),
        "head": make_adapter(
            theirs,
            tmp_path / "head",
            2,
            target_modules=["lm_head", "q_proj"],
            use_dora=True,
            **plain,
        ),
    }
    models = {"": theirs, **{name: one.model for name, one in made.items()}}
    rows = [
        (name, *one)
        for name, model in models.items()
        for one in certain_prompts(model, 2, 14, NUM_OUTPUTS, VOCAB_SIZE, seed=len(name))
    ]
    rows = rows[::2] + rows[1::2]
    llm = LLM(
        str(folder),
        dtype="float32",
        num_blocks=400,
        speculative_method="ngram",
        ngram_min=1,
        adapters={name: one.folder for name, one in made.items()},
        **options,
    )
    params = SamplingParams(
        max_tokens=NUM_OUTPUTS, temperature=0, ignore_eos=True, prompt_logprobs=0
    )
    completions = llm.generate(
        [prompt for _, prompt, _ in rows], params, adapter=[name for name, _, _ in rows]
    )
    for (name, prompt, output), completion in zip(rows, completions, strict=True):
        assert list(completion.token_ids) == output, name
        ours = torch.tensor([one.logprob for one in completion.prompt_logprobs if one is not None])
        of_theirs = logits_of(models[name], prompt).log_softmax(-1)
        chosen = of_theirs[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:])]
        assert float((ours - chosen).abs().max()) < 2e-3, name


@pytest.mark.skipif(native_ops() is None, reason="needs the native kernels")
@pytest.mark.parametrize("architecture", ["Qwen2MoeForCausalLM", "DeepseekV3ForCausalLM"])
@pytest.mark.parametrize("weights", ["auto", "int8"])
def test_bits_of_experts_and_latents_do_not_depend_on_the_step(
    architecture: str, weights: str, tmp_path: Path
) -> None:
    theirs = make_model(architecture, list(FAMILIES[architecture].variants)[-1])
    folder = save(theirs, tmp_path / "model")
    linears = [name for name, one in theirs.named_modules() if isinstance(one, nn.Linear)]
    made = make_adapter(
        theirs,
        tmp_path / "adapter",
        target_modules=[name for name in linears if not name.endswith(OF_EXPERTS)],
        target_parameters=["experts.gate_up_proj", "experts.down_proj"],
        r=3,
    )
    llm = LLM(
        str(folder),
        dtype="float32",
        weights=weights,
        num_blocks=100,
        prefix_cache=False,
        adapters={"it": made.folder},
    )
    params = SamplingParams(max_tokens=NUM_OUTPUTS, temperature=0, ignore_eos=True, logprobs=2)
    draw = random.Random(1)
    rows = [(name, draw.choices(range(VOCAB_SIZE), k=9)) for name in ("it", "", "it", "", "it")]
    prompts, names = [prompt for _, prompt in rows], [name for name, _ in rows]
    together = llm.generate(prompts, params, adapter=names)
    for (name, prompt), found in zip(rows, together, strict=True):
        [alone] = llm.generate([prompt], params, adapter=name)
        assert [one.top for one in alone.logprobs] == [one.top for one in found.logprobs], name
