"""Unit tests of experts in config.json: each way to write them, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from baton.api.errors import ModelLoadError
from models.config import ModelConfig
from models.recipe import ExpertsSpec

DEEPSEEK: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 3,
}
QWEN: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "num_hidden_layers": 6,
}


SHAPE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "kv_lora_rank": 16,
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8),
}


def read(architecture: str, values: dict[str, Any]) -> ModelConfig:
    return ModelConfig.from_dict({**SHAPE, "architectures": [architecture], **values})


def parse(architecture: str, values: dict[str, Any]) -> ExpertsSpec:
    found = read(architecture, values).experts
    assert found is not None
    return found


def dense_layers(architecture: str, values: dict[str, Any]) -> list[int]:
    layers = enumerate(read(architecture, values).layers)
    return [index for index, layer in layers if not isinstance(layer.feed_forward, ExpertsSpec)]


def test_a_dense_architecture_has_no_experts() -> None:
    assert read("Qwen3ForCausalLM", QWEN).experts is None


def test_qwen_names_the_layers_without_experts() -> None:
    values = QWEN | {"decoder_sparse_step": 2, "mlp_only_layers": [3], "norm_topk_prob": True}
    found = parse("Qwen3MoeForCausalLM", values)
    assert found == ExpertsSpec(8, 32, 2, normalize=True)
    assert dense_layers("Qwen3MoeForCausalLM", values) == [0, 2, 3, 4]
    shared = parse("Qwen2MoeForCausalLM", QWEN)
    assert shared == ExpertsSpec(8, 32, 2, shared_size=48, has_shared_gate=True)


def test_deepseek_routes_in_two_ways() -> None:
    groups = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 16.0}
    common: dict[str, Any] = {"shared_size": 64}
    greedy = DEEPSEEK | groups | {"topk_method": "greedy"}
    assert parse("DeepseekV2ForCausalLM", greedy) == ExpertsSpec(8, 32, 3, scale=16.0, **common)
    limited = DEEPSEEK | groups | {"topk_method": "group_limited_greedy"}
    common |= {"num_groups": 4, "top_groups": 2, "scale": 16.0}
    assert parse("DeepseekV2ForCausalLM", limited) == ExpertsSpec(8, 32, 3, **common)
    common |= {"scoring": "sigmoid", "normalize": True, "group_best": 2, "has_bias": True}
    for architecture in ("DeepseekV3ForCausalLM", "Glm4MoeForCausalLM"):
        values = DEEPSEEK | groups | {"topk_method": "noaux_tc"}
        assert parse(architecture, values) == ExpertsSpec(8, 32, 3, **common)
        assert dense_layers(architecture, values) == [0]


def test_gpt_oss_routes_by_logits() -> None:
    values = {"num_local_experts": 32, "num_experts_per_tok": 4, "intermediate_size": 2880}
    assert parse("GptOssForCausalLM", values | {"swiglu_limit": 7.0}) == ExpertsSpec(
        32,
        2880,
        4,
        scoring="softmax of the chosen",
        activation="clamped_swiglu",
        has_biases=True,
        stored_by_turns=True,
    )
    for name in ("swiglu_limit", "swiglu_alpha"):
        with pytest.raises(ModelLoadError, match=f"^config.json: {name}: 6.0 is not supported"):
            parse("GptOssForCausalLM", values | {name: 6.0})


@pytest.mark.parametrize(
    ("architecture", "field", "value"),
    [
        ("DeepseekV2ForCausalLM", "topk_method", "noaux_tc"),
        ("DeepseekV2ForCausalLM", "scoring_func", "sigmoid"),
        ("DeepseekV2ForCausalLM", "norm_topk_prob", True),
        ("DeepseekV3ForCausalLM", "topk_method", "greedy"),
        ("DeepseekV3ForCausalLM", "scoring_func", "softmax"),
        ("DeepseekV3ForCausalLM", "moe_layer_freq", 2),
        ("DeepseekV3ForCausalLM", "n_group", 3),
        ("DeepseekV3ForCausalLM", "topk_group", 2),
        ("Glm4MoeForCausalLM", "num_experts_per_tok", 9),
        ("Glm4MoeForCausalLM", "first_k_dense_replace", None),
        ("Glm4MoeForCausalLM", "n_shared_experts", None),
    ],
)
def test_what_is_refused_is_named(architecture: str, field: str, value: object) -> None:
    with pytest.raises(ModelLoadError, match=f"^config.json: {field}: "):
        parse(architecture, DEEPSEEK | {field: value})


@pytest.mark.parametrize("name", ["first_k_dense_replace", "n_routed_experts"])
def test_no_more_parts_than_a_model_can_have_are_counted(name: str) -> None:
    with pytest.raises(ModelLoadError, match=f"{name}: expected an integer <= 16384"):
        parse("DeepseekV3ForCausalLM", {**DEEPSEEK, name: 2**31 - 1})
