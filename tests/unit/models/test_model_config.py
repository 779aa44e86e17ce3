"""Unit tests of models.config: both dialects of config.json, and one clear line per mistake."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from baton.api.errors import ModelLoadError
from models.config import ModelConfig
from models.quantization import QuantizationConfig

MINIMAL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}


def config_of(**changes: Any) -> ModelConfig:
    return ModelConfig.from_dict(MINIMAL | changes)


def write(folder: Path, name: str, values: object) -> None:
    (folder / name).write_text(json.dumps(values), encoding="utf-8")


def test_defaults() -> None:
    config = config_of()
    assert (config.head_dim, config.num_kv_heads) == (16, 4)
    assert config.rope.rope_type == "default"
    assert config.rope.theta == 10_000.0
    assert config.max_model_len == 512
    assert not config.tie_word_embeddings
    assert config.dtype == "float32"
    assert config.eos_token_ids == frozenset()


def test_explicit_head_dim_wins() -> None:
    assert config_of(head_dim=24).head_dim == 24


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_both_names_of_the_dtype(name: str) -> None:
    assert config_of(**{name: "bfloat16"}).dtype == "bfloat16"


def test_both_dialects_of_rope_read_the_same() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 128
    old = config_of(rope_theta=5e5, rope_scaling={"type": "llama3", **scaling})
    new = config_of(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **scaling})
    assert old.rope == new.rope
    assert old.rope.theta == 5e5


def test_end_tokens_are_the_union_of_both_files(tmp_path: Path) -> None:
    write(tmp_path, "config.json", MINIMAL | {"eos_token_id": 7})
    write(tmp_path, "generation_config.json", {"eos_token_id": [7, 9]})
    config = ModelConfig.from_folder(tmp_path)
    assert config.eos_token_ids == {7, 9}


def test_dynamic_and_longrope_limit_the_length() -> None:
    dynamic = {"rope_type": "dynamic", "factor": 2.0}
    assert config_of(rope_parameters=dynamic).max_model_len == 512
    longrope = {
        "rope_type": "longrope",
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
        "original_max_position_embeddings": 64,
    }
    values = MINIMAL | {"rope_parameters": longrope}
    assert ModelConfig.from_dict(values).max_model_len == 64
    long = ModelConfig.from_dict(values, max_model_len=200)
    assert long.max_model_len == 200
    assert long.rope.use_long_factors


def test_max_model_len_beyond_the_model_is_refused() -> None:
    with pytest.raises(ModelLoadError, match="max_model_len 513, but max_position_embeddings"):
        ModelConfig.from_dict(MINIMAL, max_model_len=513)


@pytest.mark.parametrize("name", list(MINIMAL))
def test_missing_field_is_named(name: str) -> None:
    values = {key: value for key, value in MINIMAL.items() if key != name}
    with pytest.raises(ModelLoadError, match=rf"^config\.json: {name}: "):
        ModelConfig.from_dict(values)


KV_ONLY: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "config_groups": {},
    "kv_cache_scheme": {
        "num_bits": 8,
        "type": "float",
        "strategy": "tensor",
        "symmetric": True,
        "dynamic": False,
    },
}


def with_group(group: dict[str, Any]) -> dict[str, Any]:
    return KV_ONLY | {"config_groups": {"group_0": {"targets": [], **group}}}


def compressed(weights: dict[str, Any], **others: Any) -> dict[str, Any]:
    """The configuration of a checkpoint that compressed-tensors has made."""
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    made = {"quant_method": "compressed-tensors", "config_groups": groups, **others}
    return {"quantization_config": made}


@pytest.mark.parametrize(
    ("quantization", "expected"),
    [
        (
            compressed({"num_bits": 8, "type": "float", "block_structure": [128, 64]}),
            QuantizationConfig("compressed-tensors", block_shape=(128, 64)),
        ),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
            QuantizationConfig("fp8", block_shape=(128, 128), rounds_inputs=True),
        ),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            QuantizationConfig("gptq", zero_point_offset=1),
        ),
        (
            {
                "quantization_config": with_group(
                    {"weights": {"num_bits": 8}, "input_activations": {"num_bits": 8}}
                )
            },
            QuantizationConfig("compressed-tensors", rounds_inputs=True),
        ),
        (  # which layers are of which group is not read
            {
                "quantization_config": KV_ONLY
                | {
                    "config_groups": {
                        "a": {"weights": {"num_bits": 8}, "input_activations": {"num_bits": 8}},
                        "b": {"weights": {"num_bits": 8}, "input_activations": None},
                    }
                }
            },
            QuantizationConfig("compressed-tensors"),
        ),
        (
            {"compression_config": {"quant_method": "awq", "bits": 4}},
            QuantizationConfig("awq"),
        ),
    ],
)
def test_how_weights_are_stored_is_read(
    quantization: dict[str, Any], expected: QuantizationConfig
) -> None:
    assert config_of(**quantization).quantization == expected


@pytest.mark.parametrize("quantization", [KV_ONLY, with_group({"weights": None})])
def test_a_quantized_kv_cache_is_all_that_may_be_quantized(quantization: dict[str, Any]) -> None:
    assert config_of(quantization_config=quantization) == config_of()


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"vocab_size": "100"}, "vocab_size: expected an integer >= 1, found '100'"),
    ({"vocab_size": True}, "vocab_size: expected an integer"),
    ({"num_hidden_layers": 0}, "num_hidden_layers: expected an integer >= 1, found 0"),
    ({"num_hidden_layers": 2**14 + 1}, "num_hidden_layers: expected an integer <= 16384"),
    ({"vocab_size": 10**400}, "vocab_size: expected an integer <= 2147483647"),
    ({"rms_norm_eps": 10**400}, "rms_norm_eps: expected a number > 0"),
    ({"num_key_value_heads": 3}, "num_key_value_heads: 3 does not divide 4"),
    ({"num_attention_heads": 5}, "hidden_size: 64 is no multiple of 5 heads"),
    ({"head_dim": 5}, "head_dim: 5 is odd"),
    ({"rms_norm_eps": "small"}, "rms_norm_eps: expected a number > 0"),
    ({"tie_word_embeddings": 1}, "tie_word_embeddings: expected true or false"),
    (
        {"architectures": ["GPT2LMHeadModel"]},
        "GPT2LMHeadModel is not supported; .*Qwen3ForCausalLM",
    ),
    ({"architectures": "LlamaForCausalLM"}, "architectures: expected a list of strings"),
    ({"hidden_act": "tanh"}, "hidden_act: 'tanh' is not supported"),
    ({"final_logit_softcapping": 30.0}, "final_logit_softcapping: is not supported"),
    (
        {"quantization_config": {"quant_method": "hqq"}},
        r"quantization_config\.quant_method: 'hqq' is not supported; supported: compressed-t",
    ),
    ({"quantization_config": {"bits": 4}}, "quant_method: '' is not supported"),
    (
        {"quantization_config": KV_ONLY | {"kv_cache_scheme": {"num_bits": 4}}},
        "quantization_config.kv_cache_scheme: not supported",
    ),
    (compressed({"num_bits": 16}), r"group_0\.weights\.num_bits: 16 is not supported for type i"),
    (compressed({"num_bits": 6, "type": "float"}), "num_bits: 6 is not supported for type float"),
    (compressed({"num_bits": 8, "type": "complex"}), "weights.type: 'complex' is not supported"),
    (compressed({"num_bits": 8}, sparsity_config={"format": "2of4"}), "sparsity_config: not"),
    (compressed({"num_bits": 8}, transform_config={"config_groups": {}}), "transform_config: not"),
    ({"quantization_config": {"quant_method": "gptq", "bits": 5}}, "bits: 5 is not supported"),
    (
        {"quantization_config": {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}},
        "checkpoint_format: 'marlin' is not supported",
    ),
    (
        {"quantization_config": {"quant_method": "awq", "bits": 4, "version": "gemv"}},
        "version: 'gemv' is not supported; supported: gemm",
    ),
    (
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}},
        "weight_block_size: expected 2 numbers",
    ),
    ({"dtype": "int8"}, "dtype: 'int8' is not supported"),
    ({"eos_token_id": "</s>"}, "eos_token_id: expected token ids"),
    ({"layer_types": ["full_attention"]}, "layer_types: 1 entries for 3 layers"),
    ({"layer_types": ["mamba"] * 3}, "layer_types: 'mamba' is not supported"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5 is not supported"),
    ({"rope_scaling": {"type": "mrope"}}, "rope_scaling.type: 'mrope' is not supported"),
    ({"rope_parameters": {"rope_type": "new"}}, "rope_parameters.rope_type: 'new' is not"),
    ({"rope_parameters": {"full_attention": {}}}, "rope_parameters.full_attention: RoPE per layer"),
    ({"rope_parameters": {"rope_type": "linear"}}, "rope_parameters.factor: missing"),
    ({"rope_parameters": LLAMA3 | {"high_freq_factor": 1.0}}, "high_freq_factor: must exceed"),
    (
        {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
        "short_factor: expected 8 numbers, found 1",
    ),
]


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_wrong_field_is_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message) as caught:
        config_of(**changes)
    assert "\n" not in str(caught.value)


def test_folder_mistakes_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="nowhere: no such model folder"):
        ModelConfig.from_folder(tmp_path / "nowhere")
    with pytest.raises(ModelLoadError, match=r"config\.json: cannot be read: No such file"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelLoadError, match=r"config\.json: not valid JSON"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("[" * 100_000, encoding="utf-8")
    with pytest.raises(ModelLoadError, match=r"config\.json: not valid JSON: more than 64 levels"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ModelLoadError, match=r"config\.json: expected a JSON object, found list"):
        ModelConfig.from_folder(tmp_path)
    write(tmp_path, "config.json", MINIMAL)
    (tmp_path / "generation_config.json").write_bytes(b"\xff")
    with pytest.raises(ModelLoadError, match=r"generation_config\.json: not valid JSON"):
        ModelConfig.from_folder(tmp_path)


def test_what_a_field_says_at_length_is_not_repeated() -> None:
    with pytest.raises(ModelLoadError, match="rope_type") as caught:
        config_of(rope_parameters={"rope_type": "x" * 10**6})
    assert len(str(caught.value)) < 3000


@pytest.mark.medium
def test_reading_a_config_imports_no_torch() -> None:
    program = "import sys, models, models.config; sys.exit('torch' in sys.modules)"
    root = Path(__file__).parents[3]
    subprocess.run([sys.executable, "-c", program], cwd=root, check=True)
