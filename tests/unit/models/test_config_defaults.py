"""Unit tests of each architecture's defaults for config.json fields that are absent or null.

tests/numerics/test_config_fields.py compares every field of every architecture with transformers.
"""

from __future__ import annotations

from typing import Any

import pytest

from baton.api.errors import ModelLoadError
from models.config import ModelConfig
from models.recipe import AttentionSpec

# Enough of a config.json for every architecture.
VALUES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 16),
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    "kv_lora_rank": 16,
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8),
}
NEMOTRON: dict[str, Any] = {"hybrid_override_pattern": "M-*-", "mamba_num_heads": 8}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}


def parse(architecture: str, *left_out: str, **changes: Any) -> ModelConfig:
    values = {name: value for name, value in VALUES.items() if name not in left_out}
    return ModelConfig.from_dict(values | {"architectures": [architecture]} | changes)


def windows(architecture: str, **changes: Any) -> str:
    """Return a letter for each layer: s has a window, f has full attention."""
    kept = parse(architecture, **changes).kept_kv
    return "".join("f" if kv.retained_tokens is None else "s" for kv in kept)


@pytest.mark.parametrize(
    ("architecture", "theta"),
    [
        ("LlamaForCausalLM", 1e4),
        ("MixtralForCausalLM", 1e6),
        ("Olmo3ForCausalLM", 5e5),
        ("SmolLM3ForCausalLM", 2e6),
    ],
)
def test_the_base_of_rope(architecture: str, theta: float) -> None:
    assert parse(architecture).rope.theta == theta


@pytest.mark.parametrize("changes", [{}, {"rope_parameters": None}])
def test_cwm_scales_rope_unless_its_file_says_how(changes: dict[str, Any]) -> None:
    rope = parse("CwmForCausalLM", **changes).rope
    assert (rope.rope_type, rope.factor, rope.theta) == ("llama3", 16.0, 1e6)
    assert parse("CwmForCausalLM", rope_parameters={"rope_theta": 5.0}).rope.rope_type == "default"


@pytest.mark.parametrize(
    "ropes", [{"rope_scaling": YARN}, {"rope_parameters": {"full_attention": YARN}}]
)
@pytest.mark.parametrize("architecture", ["Gemma3ForCausalLM", "Olmo3ForCausalLM"])
def test_the_original_length_of_each_layer_type(architecture: str, ropes: dict[str, Any]) -> None:
    rope = parse(architecture, original_max_position_embeddings=32, **ropes).rope
    assert rope.original_max_position_embeddings == YARN["original_max_position_embeddings"]
    rope = parse("LlamaForCausalLM", original_max_position_embeddings=32, rope_scaling=YARN).rope
    assert rope.original_max_position_embeddings == 32


def test_deepseek_v3_chooses_among_groups_of_experts() -> None:
    moe = parse("DeepseekV3ForCausalLM").experts
    assert moe is not None
    assert (moe.scale, moe.num_groups, moe.top_groups) == (2.5, 8, 4)


@pytest.mark.parametrize(
    ("architecture", "changes", "expected"),
    [
        ("CwmForCausalLM", {}, "fsssfsss"),
        ("Olmo3ForCausalLM", {}, "sssfsssf"),
        ("Olmo3ForCausalLM", {"sliding_window_pattern": 2}, "sssfsssf"),
        ("Gemma3ForCausalLM", {"sliding_window_pattern": 2}, "sfsfsfsf"),
        ("MistralForCausalLM", {}, "ssssssss"),
        ("MistralForCausalLM", {"sliding_window": None}, "ffffffff"),
        ("Qwen2MoeForCausalLM", {}, "ffffffff"),
        ("Qwen2MoeForCausalLM", {"use_sliding_window": True}, "sfsfsfsf"),
        ("Qwen2MoeForCausalLM", {"use_sliding_window": True, "max_window_layers": 3}, "sfsfffff"),
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "max_window_layers": 3}, "fffsssss"),
    ],
)
def test_windows(architecture: str, changes: dict[str, Any], expected: str) -> None:
    assert windows(architecture, **changes) == expected


@pytest.mark.parametrize(
    ("architecture", "head_dim", "num_kv_heads"),
    [("LlamaForCausalLM", 8, 4), ("Qwen3MoeForCausalLM", 8, 4), ("Gemma2ForCausalLM", 256, 4)],
)
def test_heads(architecture: str, head_dim: int, num_kv_heads: int) -> None:
    config = parse(architecture, "head_dim", "num_key_value_heads")
    assert (config.head_dim, config.num_kv_heads) == (head_dim, num_kv_heads)


def test_null_is_false_where_a_field_is_true_or_false() -> None:
    for changes, expected in (({}, True), ({"attention_bias": None}, False)):
        attention = parse("SeedOssForCausalLM", **changes).attention
        assert isinstance(attention, AttentionSpec)
        assert attention.qkv_bias is expected
    moe = parse("DeepseekV3ForCausalLM", norm_topk_prob=None).experts
    assert moe is not None
    assert not moe.normalize


@pytest.mark.parametrize("step", [0.0, 0.001])
def test_time_steps_that_nothing_bounds(step: float) -> None:
    parse("NemotronHForCausalLM", time_step_min=step, **NEMOTRON)


@pytest.mark.parametrize(
    ("architecture", "name", "changes"),
    [
        ("NemotronHForCausalLM", "time_step_min", NEMOTRON | {"time_step_min": 0.1}),
        ("NemotronHForCausalLM", "time_step_min", NEMOTRON | {"mamba_dt_min": 0.1}),
        ("LlamaForCausalLM", "is_causal", {"is_causal": None}),
        ("LlamaForCausalLM", "per_layer_config", {"per_layer_config": {"0": {"head_dim": 4}}}),
        ("MistralForCausalLM", "sliding_window", {"sliding_window": 0}),
        ("Qwen3ForCausalLM", "num_key_value_heads", {"num_key_value_heads": 32}),
        ("DeepseekV3ForCausalLM", "head_dim", {"head_dim": 2}),
        ("DeepseekV2ForCausalLM", "mlp_bias", {"mlp_bias": True}),
        ("Gemma3ForCausalLM", "type", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
        ("Gemma3ForCausalLM", "truncate", {"rope_scaling": YARN | {"truncate": False}}),
        ("Gemma3ForCausalLM", "truncate", {"rope_scaling": YARN | {"truncate": None}}),
        (
            "Olmo3ForCausalLM",
            "truncate",
            {"rope_parameters": {"full_attention": YARN | {"truncate": False}}},
        ),
        (
            "Olmo3ForCausalLM",
            "truncate",
            {"rope_parameters": {"full_attention": YARN, "truncate": False}},
        ),
    ],
)
def test_what_is_refused(architecture: str, name: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ModelLoadError, match=rf"^config\.json: \S*\b{name}: "):
        parse(architecture, **changes)
