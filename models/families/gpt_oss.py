"""gpt-oss: experts with clamped gates, attention sinks, a sliding window in every second layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton.checkpoint.gguf.architecture import Architecture, Keys
from baton.checkpoint.gguf.rope import rope_scaling
from models.families.shared.experts import checked
from models.families.shared.gguf import expert_size, layer_types
from models.family import Family
from models.fields import MAX_PARTS, Fields
from models.model_fields import ModelFields
from models.recipe import ExpertsSpec, NormWeight, Recipe

_WINDOW_INTERVAL = 2  # without layer types, every second layer has full attention


def _experts(fields: Fields) -> ExpertsSpec:
    for name, only in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)):
        if fields.number(name, only) != only:
            raise fields.wrong(name, f"{fields.get(name)} is not supported; supported: {only}")
    experts = ExpertsSpec(
        num_experts=fields.integer("num_local_experts", maximum=MAX_PARTS),
        inner_size=fields.integer("intermediate_size"),
        top_k=fields.integer("num_experts_per_tok"),
        scoring="softmax of the chosen",
        activation="clamped_swiglu",
        has_biases=True,
        stored_by_turns=True,
    )
    return checked(fields, experts)


def _recipe(model: ModelFields) -> Recipe:
    bias = model.attention_bias
    mixers = model.attention_layers(
        model.windows_by_pattern(), qkv_bias=bias, output_bias=bias, sinks=True
    )
    return model.recipe(
        mixers,
        _experts(model.fields),
        norm_weight=NormWeight.WIDE,
        stored_names={".mlp.gate.": ".mlp.router."},
    )


# OpenAI, arXiv:2508.10925.
GptOssForCausalLM = Family(
    recipe=_recipe,
    defaults={
        "torch_dtype": "bfloat16",
        "attention_bias": True,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "sliding_window": 128,
        "rope_theta": 150_000.0,
    },
    defaults_for_null={
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    sliding_window_pattern=_WINDOW_INTERVAL,
)


# ---------------------------------------------------------------------------- GGUF files


def _gguf(keys: Keys) -> Mapping[str, Any]:
    scaling = rope_scaling(keys)
    if scaling is not None and scaling["rope_type"] == "yarn":
        scaling = {**scaling, "truncate": False}  # true of all models, but missing in files
    return {
        "num_local_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "intermediate_size": expert_size(keys),
        "layer_types": layer_types(keys, _WINDOW_INTERVAL),
        "sliding_window": keys.integer("attention.sliding_window"),
        "rope_scaling": scaling or {"rope_type": "default"},
    }


GGUF = {
    "gpt-oss": Architecture(
        "GptOssForCausalLM",
        _gguf,
        names={
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks.weight": "self_attn.sinks",
            "ffn_gate_inp": "mlp.router",
        },
        may_have_experts=True,
    )
}
