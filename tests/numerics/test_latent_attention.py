"""Models with latent attention beyond tests/numerics/test_families.py: bits, tapes, checkpoints.

Refuses to know: kernels (``test_latent_ops.py``).
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from baton.api.errors import ConfigError, ModelLoadError
from baton.api.outputs import Completion
from baton.api.sampling_params import SamplingParams
from baton_kernels import dispatch
from baton_kernels.native.tape import Tape
from engine import LLM
from models import load_model
from models.config import ModelConfig
from models.cpu.packing import CpuPacker
from models.memory_needs import memory_needs
from models.recipe import LatentSpec
from tests.numerics.family_checkpoints import FAMILIES
from tests.numerics.tiny_models import make_hugging_face_model, save

ARCHITECTURE = "DeepseekV3ForCausalLM"
# Some texts are longer than the tiles (192 keys) and spans (576) by which attention sums.
LENGTHS, MAX_MODEL_LEN = (1, 17, 190, 250, 590), 640
FP8 = torch.float8_e4m3fn

needs_native = pytest.mark.skipif(dispatch.native_ops() is None, reason="no native kernels here")


def make_folder(folder: Path, variant: str = "groups, YaRN", **overrides: Any) -> Path:
    shape = dict(FAMILIES[ARCHITECTURE].variants[variant])
    shape |= {"max_position_embeddings": MAX_MODEL_LEN, **overrides}
    return save(make_hugging_face_model(ARCHITECTURE, **shape), folder)


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], None], **config: object) -> None:
    """Change the tensors of a checkpoint, and fields of its config.json."""
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))


PARAMS = SamplingParams(
    max_tokens=20, temperature=0, ignore_eos=True, logprobs=2, prompt_logprobs=1
)


def make_llm(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), **({"block_size": 16, "num_blocks": 120} | options))


def generate(folder: Path, prompts: list[list[int]], **options: Any) -> list[Completion]:
    return make_llm(folder, **options).generate(prompts, PARAMS)


@needs_native
@pytest.mark.parametrize(
    ("dtype", "heads"),
    [
        ("float32", 4),
        ("bfloat16", 16),
        ("float16", 4),
        pytest.param("float32", 16, marks=pytest.mark.thorough),
        pytest.param("bfloat16", 4, marks=pytest.mark.thorough),
        pytest.param("float16", 16, marks=pytest.mark.thorough),
    ],
)
def test_bits_are_the_same_alone_and_in_company(dtype: str, heads: int, tmp_path: Path) -> None:
    folder = make_folder(tmp_path, num_attention_heads=heads, num_key_value_heads=heads)
    draw = random.Random(0)
    prompts = [draw.choices(range(3, 61), k=length) for length in LENGTHS]
    prompts.append(prompts[-1][:200] + prompts[2])  # finds a prefix
    by_itself = make_llm(folder, dtype=dtype, num_threads=1, prefix_cache=False)
    alone = [by_itself.generate([prompt], PARAMS)[0] for prompt in prompts]
    for num_threads in (1, 2):
        together = generate(
            folder,
            prompts,
            dtype=dtype,
            num_threads=num_threads,
            long_prefill_token_threshold=37,
            num_blocks=60,
        )
        for one, other in zip(alone, together, strict=True):
            assert one.token_ids == other.token_ids
            assert one.logprobs == other.logprobs
            assert one.prompt_logprobs[-20:] == other.prompt_logprobs[-20:]


@needs_native
@pytest.mark.parametrize("variant", ["no experts", "groups, YaRN"])
def test_decode_steps_run_from_tapes(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, run, num_runs = make_folder(tmp_path, variant), Tape.run, 0

    def counted(tape: Tape) -> None:
        nonlocal num_runs
        num_runs += 1
        run(tape)

    monkeypatch.setattr(Tape, "run", counted)
    [taped] = generate(folder, [[5, 6, 7]], dtype="float32")
    assert num_runs > 10
    monkeypatch.setattr(Tape, "run", run)
    monkeypatch.setattr("models.cpu.decode_tapes.MAX_ROWS_KEPT", 0)
    [eager] = generate(folder, [[5, 6, 7]], dtype="float32")
    assert (taped.token_ids, taped.logprobs) == (eager.token_ids, eager.logprobs)


def test_layers_that_predict_several_tokens_are_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_folder(tmp_path, "no experts", num_mtp_layers=0)
    [expected] = generate(folder, [[5, 6, 7]], dtype="float32")

    def add(weights: dict[str, Tensor]) -> None:
        weights["model.layers.2.eh_proj.weight"] = torch.ones(3)

    rewrite(folder, add)
    with pytest.raises(ModelLoadError, match=r"unknown to the model: model\.layers\.2\.eh_proj"):
        load_model(folder)
    rewrite(folder, lambda weights: None, num_nextn_predict_layers=1)
    with caplog.at_level(logging.INFO, logger="models.loading.loader"):
        [found] = generate(folder, [[5, 6, 7]], dtype="float32")
    assert found.logprobs == expected.logprobs
    assert "not loaded, as nothing reads them: model.layers.2.eh_proj.weight" in caplog.text


def test_projections_stored_as_float8_in_blocks(tmp_path: Path) -> None:
    plain, quantized = make_folder(tmp_path / "plain"), make_folder(tmp_path / "fp8")
    block = 16
    quantization = {"quant_method": "fp8", "weight_block_size": [block, block]}

    def halve(weights: dict[str, Tensor], *, stored: bool) -> None:
        for name in [name for name in weights if name.endswith("kv_b_proj.weight")]:
            numbers = weights[name].to(FP8)
            shape = [-(-size // block) for size in numbers.shape]
            scale = torch.linspace(0.5, 2.0, shape[0] * shape[1]).view(shape)
            if stored:
                weights[name], weights[f"{name}_scale_inv"] = numbers, scale
            else:
                wide = scale.repeat_interleave(block, 0).repeat_interleave(block, 1)
                weights[name] = numbers.float() * wide[: len(numbers), : numbers.shape[1]]

    rewrite(plain, lambda weights: halve(weights, stored=False))
    rewrite(
        quantized, lambda weights: halve(weights, stored=True), quantization_config=quantization
    )
    [expected] = generate(plain, [[5, 6, 7]], dtype="float32")
    [found] = generate(quantized, [[5, 6, 7]], dtype="float32")
    assert (found.token_ids, found.logprobs) == (expected.token_ids, expected.logprobs)


@pytest.mark.parametrize("option", [{"kv_cache_dtype": "fp8"}, {"attention_backend": "flash_attn"}])
def test_what_does_not_take_latents_is_refused(option: dict[str, Any], tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "no experts")
    with pytest.raises(ConfigError, match=next(iter(option))):
        generate(folder, [[5, 6, 7]], **option)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_key_value_heads", 2),
        ("kv_lora_rank", 0),
        ("qk_rope_head_dim", 7),
        ("v_head_dim", None),
        ("moe_layer_freq", 2),
        ("scoring_func", "softmax"),
    ],
)
def test_a_field_that_is_not_supported_is_named(field: str, value: object, tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "no experts")
    rewrite(folder, lambda weights: None, **{field: value})
    with pytest.raises(ModelLoadError, match=field):
        ModelConfig.from_folder(folder)


@pytest.mark.parametrize("variant", ["no experts", "groups, YaRN"])
def test_memory_needs_are_those_of_the_loaded_model(variant: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path, variant)
    config = ModelConfig.from_folder(folder)
    needs = memory_needs(config)
    assert isinstance(config.attention, LatentSpec)
    assert needs.kv_token_bytes == (32 + 8) * config.num_layers * 4
    packer = CpuPacker.choose(torch.float32, "fp32")
    model = load_model(folder, dtype=torch.float32, packer=packer)
    assert isinstance(model, torch.nn.Module)
    own = sum(one.numel() * one.itemsize for one in model.parameters())
    assert needs.weights["fp32"] == pytest.approx(own, rel=0.1)
