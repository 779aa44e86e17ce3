"""Gemma's rows in `gguf_families`: shapes of tiny models, and the metadata of their files.

The metadata is as llama.cpp's converters write it. Refuses to know: assertions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.numerics.family_checkpoints import layers
from tests.numerics.family_gemma4 import gemma4_layers

Fields = dict[str, Any]

GEMMA2: Fields = {
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 64,
    "sliding_window": 12,
    "num_hidden_layers": 3,
}
GEMMA3: Fields = {
    **layers("sssssfs"),
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 64,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    },
}
_HEADS: Fields = {
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "final_logit_softcapping": 4.0,
}
_SIZES: Fields = {"vocab_size_per_layer_input": 64, "global_head_dim": 128}
# As in 31B: layers with full attention have fewer KV heads, and make values from keys.
GEMMA4_LARGE = gemma4_layers("ssfsf", **_SIZES, **_HEADS, tie_word_embeddings=True)
# As in E2B: each token has a vector for each layer, and some layers read an earlier layer's keys.
GEMMA4_SMALL = gemma4_layers(
    "sfssfsf",
    **(_SIZES | {"hidden_size_per_layer_input": 128}),
    num_kv_shared_layers=3,
    use_double_wide_mlp=True,
    rope_parameters={
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.5,
            "rope_theta": 500_000.0,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 20_000.0},
    },
)
# As in 26B-A4B: experts.
GEMMA4_EXPERTS = gemma4_layers(
    "sfsf",
    **_SIZES,
    **_HEADS,
    enable_moe_block=True,
    num_experts=8,
    top_k_experts=3,
    moe_intermediate_size=256,
)


def gemma2(config: Any) -> Fields:
    """Return the metadata that only Gemma 2 has."""
    return {
        "attn_logit_softcapping": float(config.attn_logit_softcapping),
        "final_logit_softcapping": float(config.final_logit_softcapping),
        "attention.sliding_window": config.sliding_window,
    }


def gemma3(config: Any) -> Fields:
    """Return the metadata that only Gemma 3 has."""
    return {"attention.sliding_window": config.sliding_window}


def gemma4(config: Any) -> Fields:
    """Return the metadata that only Gemma 4 has."""
    slides = [name == "sliding_attention" for name in config.layer_types]
    full_size = config.per_layer_config[config.num_hidden_layers - 1].head_dim
    size, shared = config.head_dim, config.num_kv_shared_layers
    found: Fields = {
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": slides,
        "attention.shared_kv_layers": shared,
        "attention.key_length": full_size,
        "attention.value_length": full_size,
        "attention.key_length_swa": size,
        "attention.value_length_swa": size,
        "rope.dimension_count": full_size,
        "rope.dimension_count_swa": size,
        "rope.freq_base_swa": config.rope_parameters["sliding_attention"]["rope_theta"],
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
    }
    if config.attention_k_eq_v:
        found["attention.head_count_kv"] = [
            config.per_layer_config[layer].num_key_value_heads
            for layer in range(config.num_hidden_layers)
        ]
    if config.use_double_wide_mlp:
        own = config.num_hidden_layers - shared
        found["feed_forward_length"] = [config.intermediate_size] * own
        found["feed_forward_length"] += [2 * config.intermediate_size] * shared
    if config.final_logit_softcapping is not None:
        found["final_logit_softcapping"] = config.final_logit_softcapping
    if config.enable_moe_block:
        found["expert_count"] = config.num_experts
        found["expert_used_count"] = config.top_k_experts
        found["expert_feed_forward_length"] = config.moe_intermediate_size
    return found


def proportional_factors(config: Any) -> Tensor:
    """Return the factors that divide RoPE's frequencies in layers with full attention."""
    num_pairs = config.per_layer_config[config.num_hidden_layers - 1].head_dim // 2
    share = config.rope_parameters["full_attention"]["partial_rotary_factor"]
    factors = torch.full((num_pairs,), 1e30)
    factors[: int(num_pairs * share)] = 1
    return factors
