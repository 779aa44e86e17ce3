"""The table of architectures of GGUF files under test: a tiny model of each, and its metadata.

Metadata is what llama.cpp's converters write of a config. Refuses to know: what is asserted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.numerics import gguf_gemma as gemma
from tests.numerics.family_checkpoints import DEEPSEEK_EXPERTS, LATENTS, layers
from tests.numerics.family_hybrids import GRANITE, MAMBA, NEMOTRON, delta_nets, mamba_layers

Fields = dict[str, Any]

# K kinds have blocks of 256 values.
SHAPE: Fields = {
    "vocab_size": 64,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
}
_WINDOW = 12
_YARN: Fields = {
    "rope_type": "yarn",
    "rope_theta": 50_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}


def no_fields(config: Any) -> Fields:
    """Write no fields beyond those of all architectures."""
    return {}


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """One architecture of GGUF files.

    Attributes:
        model: name of a class of transformers.
        shape: fields of its config beyond `SHAPE`.
        fields: returns the metadata that its converter adds to `common_fields`.
    """

    model: str
    shape: Mapping[str, Any] = field(default_factory=dict)
    fields: Callable[[Any], Fields] = no_fields


def common_fields(config: Any) -> Fields:
    """Write the fields that converters write for every config."""
    ropes = getattr(config, "rope_parameters", None) or {}
    rope = ropes.get("full_attention", ropes)
    eps = ("rms_norm_eps", "layer_norm_epsilon", "norm_eps")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    found: Fields = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(
            next(getattr(config, name) for name in eps if hasattr(config, name))
        ),
        "rope.freq_base": float(rope.get("rope_theta", 10_000.0)),
    }
    if rope.get("rope_type") in ("yarn", "linear"):
        found["rope.scaling.type"] = rope["rope_type"]
        found["rope.scaling.factor"] = float(rope["factor"])
    if rope.get("rope_type") == "yarn":
        original = rope["original_max_position_embeddings"]
        found["rope.scaling.original_context_length"] = original
        for name in ("beta_fast", "beta_slow"):
            if rope.get(name) is not None:
                found[f"rope.scaling.yarn_{name}"] = float(rope[name])
    return found


def _turning(config: Any) -> int:
    ropes = config.rope_parameters
    return int(config.head_dim * ropes.get("partial_rotary_factor", 1.0))


def _partial(config: Any) -> Fields:
    return {"rope.dimension_count": _turning(config)}


def _whole(config: Any) -> Fields:
    return {"rope.dimension_count": config.head_dim}


def _granite(config: Any) -> Fields:
    return {
        "attention.scale": float(config.attention_multiplier),
        "embedding_scale": float(config.embedding_multiplier),
        "residual_scale": float(config.residual_multiplier),
        "logit_scale": float(config.logits_scaling),
        "vocab_size": config.vocab_size,
        **_granite_experts(config),
    }


def _granite_experts(config: Any) -> Fields:
    if config.model_type != "granitemoehybrid" or not config.num_local_experts:
        return {}
    return {
        "expert_count": config.num_local_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_shared_feed_forward_length": config.shared_intermediate_size,
    }


def _olmo3(config: Any) -> Fields:
    return {
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": [
            name == "sliding_attention" for name in config.layer_types
        ],
    }


def _phi3(config: Any) -> Fields:
    original = config.original_max_position_embeddings
    return {
        **_partial(config),
        "attention.sliding_window": config.sliding_window or 0,
        "rope.scaling.original_context_length": original,
    }


def _mistral(config: Any) -> Fields:
    return {**_whole(config), "attention.sliding_window": config.sliding_window}


def _experts(config: Any) -> Fields:
    name = "num_local_experts" if hasattr(config, "num_local_experts") else "num_experts"
    count = getattr(config, name)
    return {"expert_count": count, "expert_used_count": config.num_experts_per_tok}


def _mixtral(config: Any) -> Fields:
    return {**_whole(config), **_experts(config)}


def _qwen3moe(config: Any) -> Fields:
    return {**_experts(config), "expert_feed_forward_length": config.moe_intermediate_size}


def _axes(config: Any) -> Fields:
    return {"rope.dimension_sections": [8, 12, 12, 0]}


def _qwen2moe(config: Any) -> Fields:
    shared = config.shared_expert_intermediate_size
    return {**_qwen3moe(config), "expert_shared_feed_forward_length": shared}


def _deepseek_experts(config: Any) -> Fields:
    found: Fields = {
        "leading_dense_block_count": config.first_k_dense_replace,
        "expert_count": config.n_routed_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_shared_count": config.n_shared_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_weights_scale": float(config.routed_scaling_factor),
        "expert_weights_norm": bool(config.norm_topk_prob),
    }
    if getattr(config, "n_group", None):
        found |= {"expert_group_count": config.n_group}
        found |= {"expert_group_used_count": config.topk_group}
    return found


def _glm4moe(config: Any) -> Fields:
    return {**_partial(config), **_deepseek_experts(config), "expert_gating_func": 2}


def _deepseek(config: Any) -> Fields:
    rank, turning = config.kv_lora_rank, config.qk_rope_head_dim
    found: Fields = {
        **_deepseek_experts(config),
        "expert_gating_func": 2 if config.model_type == "deepseek_v3" else 1,
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + turning,
        "attention.value_length": rank,
        "attention.key_length_mla": config.qk_nope_head_dim + turning,
        "attention.value_length_mla": config.v_head_dim,
        "rope.dimension_count": turning,
        "vocab_size": config.vocab_size,
    }
    if config.q_lora_rank is not None:
        found["attention.q_lora_rank"] = config.q_lora_rank
    if "mscale_all_dim" in config.rope_parameters:
        found["rope.scaling.yarn_log_multiplier"] = 0.1 * config.rope_parameters["mscale_all_dim"]
    return found


def _gpt_oss(config: Any) -> Fields:
    return {
        **_experts(config),
        "attention.sliding_window": config.sliding_window,
        "expert_feed_forward_length": config.intermediate_size,
    }


def _mamba2(config: Any) -> Fields:
    types = getattr(config, "layer_types", None)
    attends = [
        index in config.attn_layer_indices if types is None else types[index] == "full_attention"
        for index in range(config.num_hidden_layers)
    ]
    kv_heads = config.num_key_value_heads
    return {
        "attention.head_count_kv": [kv_heads if one else 0 for one in attends],
        "ssm.conv_kernel": config.mamba_d_conv,
        "ssm.state_size": config.mamba_d_state,
        "ssm.group_count": config.mamba_n_groups,
        "ssm.inner_size": config.mamba_expand * config.hidden_size,
        "ssm.time_step_rank": config.mamba_n_heads,
    }


def _granite_hybrid(config: Any) -> Fields:
    turns = config.position_embedding_type == "rope"
    return {**_granite(config), **_mamba2(config), "rope.scaling.finetuned": turns}


def _bamba(config: Any) -> Fields:
    turning = {"rope.dimension_count": config.head_dim // 2}
    return {**_mamba2(config), **turning, "rope.scaling.finetuned": True}


def _nemotron(config: Any) -> Fields:
    kinds = config.layers_block_type
    attends = [one in ("attention", "full_attention") for one in kinds]
    kv_heads, size = config.num_key_value_heads, config.intermediate_size
    found: Fields = {
        "attention.head_count_kv": [kv_heads if one else 0 for one in attends],
        "feed_forward_length": [size if one in ("mlp", "moe") else 0 for one in kinds],
        "ssm.conv_kernel": config.conv_kernel,
        "ssm.state_size": config.ssm_state_size,
        "ssm.group_count": config.n_groups,
        "ssm.inner_size": config.mamba_num_heads * config.mamba_head_dim,
        "ssm.time_step_rank": config.mamba_num_heads,
    }
    if "moe" in kinds:
        found |= {
            "expert_count": config.n_routed_experts,
            "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.moe_intermediate_size,
            "expert_shared_feed_forward_length": config.moe_shared_expert_intermediate_size,
            "expert_shared_count": 1,
            "expert_weights_norm": config.norm_topk_prob,
            "expert_weights_scale": float(config.routed_scaling_factor),
            "expert_group_count": config.n_group,
            "expert_group_used_count": config.topk_group,
        }
        if config.moe_latent_size is not None:
            found["moe_latent_size"] = config.moe_latent_size
    return found


def _delta_nets(config: Any) -> Fields:
    return {
        **_partial(config),
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_value_head_dim * config.linear_num_value_heads,
        "full_attention_interval": 4,
    }


def _qwen3next(config: Any) -> Fields:
    return {**_delta_nets(config), **_qwen2moe(config)}


def _lfm2(config: Any) -> Fields:
    kv_heads = config.num_key_value_heads
    attends = [name == "full_attention" for name in config.layer_types]
    return {
        "attention.head_count_kv": [kv_heads if one else 0 for one in attends],
        "shortconv.l_cache": config.conv_L_cache,
        "vocab_size": config.vocab_size,
    }


_OF_DEEPSEEK: Fields = {
    **LATENTS,
    "num_hidden_layers": 3,
    "initializer_range": 0.1,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "moe_intermediate_size": 256,
    "head_dim": 32,
}
_OF_GRANITE: Fields = {
    **GRANITE,
    "intermediate_size": 256,
    "shared_intermediate_size": 256,
    "head_dim": 64,
    "initializer_range": 0.1,
}
_OF_NEMOTRON: Fields = {
    **NEMOTRON,
    "mamba_head_dim": 32,
    "intermediate_size": 256,
    "head_dim": 64,
    "moe_intermediate_size": 256,
    "moe_shared_expert_intermediate_size": 256,
    "initializer_range": 0.1,
}
_OF_DELTA_NETS: Fields = {
    **delta_nets("ddfd"),
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 64,
    "head_dim": 64,
    "initializer_range": 0.1,
}

# Names: the architecture of the file, and where there are several models of it, which.
GGUF_FAMILIES: dict[str, GgufFamily] = {
    "chatglm": GgufFamily("GlmForCausalLM", fields=_partial),
    "deepseek2 (V2)": GgufFamily(
        "DeepseekV2ForCausalLM",
        _OF_DEEPSEEK | {"topk_method": "greedy", "n_group": None},
        _deepseek,
    ),
    "deepseek2 (V3)": GgufFamily(
        "DeepseekV3ForCausalLM",
        _OF_DEEPSEEK
        | {
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": _YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        },
        _deepseek,
    ),
    "gemma2": GgufFamily("Gemma2ForCausalLM", gemma.GEMMA2, gemma.gemma2),
    "gemma3": GgufFamily("Gemma3ForCausalLM", gemma.GEMMA3, gemma.gemma3),
    "gemma4": GgufFamily("Gemma4ForCausalLM", gemma.GEMMA4_LARGE, gemma.gemma4),
    "gemma4 (E2B)": GgufFamily("Gemma4ForCausalLM", gemma.GEMMA4_SMALL, gemma.gemma4),
    "gemma4 (experts)": GgufFamily("Gemma4ForCausalLM", gemma.GEMMA4_EXPERTS, gemma.gemma4),
    "glm4": GgufFamily("Glm4ForCausalLM", fields=_partial),
    "glm4moe": GgufFamily(
        "Glm4MoeForCausalLM",
        DEEPSEEK_EXPERTS
        | {"moe_intermediate_size": 256, "use_qk_norm": True, "attention_bias": True}
        | {"n_group": 4, "topk_group": 2},
        _glm4moe,
    ),
    "gpt-oss": GgufFamily(
        "GptOssForCausalLM",
        layers("sfsf") | {"rope_parameters": _YARN | {"truncate": False}},
        _gpt_oss,
    ),
    "granite": GgufFamily("GraniteForCausalLM", {}, _granite),
    "granitehybrid": GgufFamily(
        "GraniteMoeHybridForCausalLM",
        _OF_GRANITE | mamba_layers("mfm") | {"num_local_experts": 0},
        _granite_hybrid,
    ),
    "granitehybrid (experts)": GgufFamily(
        "GraniteMoeHybridForCausalLM",
        _OF_GRANITE | mamba_layers("mfm") | {"num_local_experts": 8, "num_experts_per_tok": 3},
        _granite_hybrid,
    ),
    "granitehybrid (Bamba)": GgufFamily(
        "BambaForCausalLM",
        MAMBA | {"attn_layer_indices": [1], "num_hidden_layers": 3, "head_dim": 64},
        _bamba,
    ),
    "granitemoe": GgufFamily(
        "GraniteMoeHybridForCausalLM",
        _OF_GRANITE
        | mamba_layers("ff")
        | {"num_local_experts": 8, "num_experts_per_tok": 3, "position_embedding_type": "rope"},
        _granite,
    ),
    "lfm2": GgufFamily(
        "Lfm2ForCausalLM",
        {
            "layer_types": ["conv", "full_attention", "conv"],
            "num_hidden_layers": 3,
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": True,
        },
        _lfm2,
    ),
    "llama": GgufFamily("LlamaForCausalLM", fields=_whole),
    "llama (Mistral)": GgufFamily("MistralForCausalLM", {"sliding_window": _WINDOW}, _mistral),
    "llama (Mixtral)": GgufFamily("MixtralForCausalLM", {}, _mixtral),
    "mistral3": GgufFamily("MistralForCausalLM", {}, _whole),
    "nemotron_h": GgufFamily(
        "NemotronHForCausalLM",
        _OF_NEMOTRON | {"layers_block_type": ["mamba", "mlp", "attention", "mlp"]},
        _nemotron,
    ),
    "nemotron_h_moe": GgufFamily(
        "NemotronHForCausalLM",
        _OF_NEMOTRON
        | {
            "layers_block_type": ["mamba", "moe", "mamba", "attention", "moe"],
            "moe_latent_size": 256,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
        },
        _nemotron,
    ),
    "olmo2": GgufFamily("Olmo2ForCausalLM"),
    "olmo2 (3)": GgufFamily("Olmo3ForCausalLM", layers("sssfs"), _olmo3),
    "phi3": GgufFamily(
        "Phi3ForCausalLM",
        {
            "sliding_window": _WINDOW,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5000.0,
                "partial_rotary_factor": 0.5,
            },
            "original_max_position_embeddings": 128,
        },
        _phi3,
    ),
    "phi3 (long)": GgufFamily(
        "Phi3ForCausalLM",
        {
            "sliding_window": None,
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 5000.0,
                "short_factor": [1.0 + index / 32 for index in range(32)],
                "long_factor": [2.0 + index / 8 for index in range(32)],
            },
        },
        _phi3,
    ),
    "qwen2": GgufFamily("Qwen2ForCausalLM"),
    "qwen2moe": GgufFamily("Qwen2MoeForCausalLM", {}, _qwen2moe),
    "qwen2vl": GgufFamily("Qwen2ForCausalLM", fields=_axes),
    "qwen3": GgufFamily("Qwen3ForCausalLM"),
    "qwen35": GgufFamily("Qwen3_5ForCausalLM", _OF_DELTA_NETS, _delta_nets),
    "qwen35moe": GgufFamily("Qwen3_5MoeForCausalLM", _OF_DELTA_NETS, _qwen3next),
    "qwen3moe": GgufFamily("Qwen3MoeForCausalLM", {"norm_topk_prob": True}, _qwen3moe),
    "qwen3next": GgufFamily("Qwen3NextForCausalLM", _OF_DELTA_NETS, _qwen3next),
    "qwen3vl": GgufFamily("Qwen3ForCausalLM", fields=_axes),
    "qwen3vlmoe": GgufFamily(
        "Qwen3MoeForCausalLM",
        {"norm_topk_prob": True},
        lambda config: {**_axes(config), **_qwen3moe(config)},
    ),
    "seed_oss": GgufFamily("SeedOssForCausalLM", {"attention_bias": True}),
    "smollm3": GgufFamily(
        "SmolLM3ForCausalLM", {"num_hidden_layers": 5, "no_rope_layers": None}, _whole
    ),
}
