"""GGUF architectures that may have experts, with attention in every layer.

Knows no tensor's content.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton.checkpoint.gguf.architecture import Architecture, Change, Keys, Names
from baton.checkpoint.gguf.architecture import partly_turning_heads as partly
from baton.checkpoint.gguf.dense import MISTRAL, PAIRS, granite_scales, layer_types
from baton.checkpoint.gguf.rope import latent_yarn, rope_scaling

_EXPERTS = ("ffn_up_exps.weight", "ffn_gate_up_exps.weight")
_SIGMOID = 2  # value of `expert_gating_func`
_GPT_OSS_INTERVAL = 2


def expert_counts(keys: Keys) -> Mapping[str, Any]:
    """Return the numbers of experts and of experts per token, under the most common names."""
    return {
        "num_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
    }


def expert_size(keys: Keys) -> int:
    """Return an expert's intermediate size; old files have it only in tensor shapes."""
    if keys.get("expert_feed_forward_length") is not None:
        return keys.integer("expert_feed_forward_length")
    return keys.rows("ffn_up_exps.weight")


def qwen_experts(keys: Keys, *, normalized: bool) -> Mapping[str, Any]:
    """Return the expert fields of Qwen's models.

    Args:
        keys: the file's metadata.
        normalized: default for whether expert weights sum to 1.
    """
    with_experts = keys.layers_with(*_EXPERTS)
    dense = sorted(set(keys.layers_with("ffn_up.weight")) - set(with_experts))
    return {
        **expert_counts(keys),
        "moe_intermediate_size": expert_size(keys),
        "norm_topk_prob": keys.boolean("expert_weights_norm", normalized),
        "decoder_sparse_step": 1,
        "mlp_only_layers": dense,
    }


def qwen_shared(keys: Keys) -> Mapping[str, Any]:
    """Return the size of the shared expert of Qwen's models."""
    name = "expert_shared_feed_forward_length"
    size = keys.integer(name) if keys.get(name) is not None else keys.rows("ffn_up_shexp.weight")
    return {"shared_expert_intermediate_size": size}


def _qwen2moe(keys: Keys) -> Mapping[str, Any]:
    biases = {"qkv_bias": keys.has("attn_q.bias"), "attention_bias": False}
    return {**qwen_experts(keys, normalized=False), **qwen_shared(keys), **biases}


def _qwen3moe(keys: Keys) -> Mapping[str, Any]:
    return qwen_experts(keys, normalized=True)


def _of_llama(keys: Keys) -> Architecture | None:
    """Choose Mistral or Mixtral for their files, which say llama, by window or experts."""
    if keys.get("expert_count"):
        return _MIXTRAL
    return MISTRAL if keys.get("attention.sliding_window") else None


def _mixtral(keys: Keys) -> Mapping[str, Any]:
    if keys.get("expert_shared_count"):
        raise keys.wrong("expert_shared_count", "shared experts are not supported")
    window = keys.integer("attention.sliding_window", 0, minimum=0)
    return {
        "num_local_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "sliding_window": window or None,
    }


def deepseek_experts(keys: Keys) -> Mapping[str, Any]:
    """Return the expert fields of DeepSeek's models and later ones like them."""
    return {
        "n_routed_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "moe_intermediate_size": expert_size(keys),
        "n_shared_experts": keys.integer("expert_shared_count", 0, minimum=0),
        "first_k_dense_replace": keys.integer("leading_dense_block_count", 0, minimum=0),
        "norm_topk_prob": keys.boolean("expert_weights_norm", False),
        "routed_scaling_factor": keys.decimal("expert_weights_scale", 1.0),
        "n_group": keys.integer("expert_group_count", 1),
        "topk_group": keys.integer("expert_group_used_count", 1),
    }


def _deepseek2(keys: Keys) -> Mapping[str, Any]:
    """Return the fields of DeepSeek V2, which has softmax scores."""
    return {
        **(deepseek_experts(keys) if keys.get("expert_count") else _no_experts(keys)),
        "topk_method": "group_limited_greedy" if keys.get("expert_group_count") else "greedy",
        "rope_scaling": latent_yarn(keys),
    }


def _deepseek3(keys: Keys) -> Mapping[str, Any]:
    return {**_deepseek2(keys), "topk_method": "noaux_tc", "rope_interleave": True}


def _no_experts(keys: Keys) -> Mapping[str, Any]:
    """Return the required expert fields for a model without experts."""
    one = dict.fromkeys(("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"), 1)
    layers = {"first_k_dense_replace": keys.num_layers(), "n_group": 1, "topk_group": 1}
    return {**one, **layers, "n_shared_experts": 0}


def _of_deepseek(keys: Keys) -> Architecture | None:
    return _DEEPSEEK3 if keys.get("expert_gating_func") == _SIGMOID else None


def _latents(keys: Keys) -> Mapping[str, Any]:
    """Return the sizes of latent attention; files before 2025 have whole-head sizes only."""
    turning = keys.integer("rope.dimension_count")
    length = keys.integer("attention.key_length_mla", keys.integer("attention.key_length"))
    value = keys.integer("attention.value_length_mla", keys.integer("attention.value_length"))
    if length <= turning:
        raise keys.wrong("rope.dimension_count", f"must be below {length}, got {turning}")
    ranked = keys.get("attention.q_lora_rank") is not None
    return {
        "num_key_value_heads": keys.integer("attention.head_count"),
        "q_lora_rank": keys.integer("attention.q_lora_rank") if ranked else None,
        "kv_lora_rank": keys.integer("attention.kv_lora_rank"),
        "qk_nope_head_dim": length - turning,
        "qk_rope_head_dim": turning,
        "v_head_dim": value,
    }


def _glm4moe(keys: Keys) -> Mapping[str, Any]:
    return {
        **deepseek_experts(keys),
        "norm_topk_prob": keys.boolean("expert_weights_norm", True),
        "use_qk_norm": keys.has("attn_q_norm.weight"),
    }


def _gpt_oss(keys: Keys) -> Mapping[str, Any]:
    scaling = rope_scaling(keys)
    if scaling is not None and scaling["rope_type"] == "yarn":
        scaling = {**scaling, "truncate": False}  # true of all its files, though they do not say so
    return {
        "num_local_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "intermediate_size": expert_size(keys),
        "layer_types": layer_types(keys, _GPT_OSS_INTERVAL),
        "sliding_window": keys.integer("attention.sliding_window"),
        "rope_scaling": scaling or {"rope_type": "default"},
    }


def granite_experts(keys: Keys) -> Mapping[str, Any]:
    """Return the fields of Granite 4's shared MLP, and of its experts if it has any."""
    count = keys.integer("expert_count", 0, minimum=0)
    shared = "ffn_up_shexp.weight" if count else "ffn_up.weight"
    return {
        "num_local_experts": count,
        "num_experts_per_tok": keys.integer("expert_used_count", 0, minimum=0) or 1,
        "intermediate_size": expert_size(keys) if count else keys.integer("feed_forward_length"),
        "shared_intermediate_size": keys.rows(shared),
    }


def _granitemoe(keys: Keys) -> Mapping[str, Any]:
    """Return the fields of Granite with experts, as a Granite 4 with attention in every layer."""
    return {
        **granite_scales(keys),
        **granite_experts(keys),
        "layer_types": ["attention"] * keys.num_layers(),
        "mamba_n_heads": 1,
        "position_embedding_type": "rope" if turns(keys) else "nope",
    }


def turns(keys: Keys) -> bool:
    """Return whether Granite uses RoPE."""
    return keys.boolean("rope.scaling.finetuned", True)


GRANITE_NAMES: Names = {
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    "ffn_down_shexp": "shared_mlp.output_linear",
    "ffn_down": "shared_mlp.output_linear",
}
GRANITE_JOINS = (
    ("shared_mlp.input_linear.weight", ("ffn_gate_shexp.weight", "ffn_up_shexp.weight")),
    ("shared_mlp.input_linear.weight", ("ffn_gate.weight", "ffn_up.weight")),
)
SHARED_EXPERT: Names = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_SHARED_EXPERTS: Names = {
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
}
_LATENT_NAMES: Names = {
    **_SHARED_EXPERTS,
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
}
_KV_B = "self_attn.kv_b_proj.weight"
_MIXTRAL = Architecture(
    "MixtralForCausalLM",
    _mixtral,
    names={
        "ffn_gate_inp": "block_sparse_moe.gate",
        "ffn_gate_exps": "block_sparse_moe.experts.{expert}.w1",
        "ffn_up_exps": "block_sparse_moe.experts.{expert}.w3",
        "ffn_down_exps": "block_sparse_moe.experts.{expert}.w2",
    },
    changes=PAIRS,
)


def _deepseek(model: str, fields: Any) -> Architecture:
    return Architecture(
        model,
        fields,
        heads=_latents,
        names=_LATENT_NAMES,
        joins=((_KV_B, ("attn_k_b.weight", "attn_v_b.weight")),),
        changes={_KV_B: (Change.LATENTS,)},
        variant=_of_deepseek if fields is _deepseek2 else None,
    )


_DEEPSEEK3 = _deepseek("DeepseekV3ForCausalLM", _deepseek3)

WITH_EXPERTS: Mapping[str, Architecture] = {
    "deepseek2": _deepseek("DeepseekV2ForCausalLM", _deepseek2),
    "glm4moe": Architecture(
        "Glm4MoeForCausalLM",
        _glm4moe,
        heads=partly,
        names={"post_attention_norm": "post_attention_layernorm", **_SHARED_EXPERTS},
    ),
    "gpt-oss": Architecture(
        "GptOssForCausalLM",
        _gpt_oss,
        names={
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks.weight": "self_attn.sinks",
            "ffn_gate_inp": "mlp.router",
        },
    ),
    "granitemoe": Architecture(
        "GraniteMoeHybridForCausalLM",
        _granitemoe,
        names=GRANITE_NAMES,
        joins=GRANITE_JOINS,
        changes=PAIRS,
    ),
    "llama": Architecture("LlamaForCausalLM", changes=PAIRS, variant=_of_llama),
    "qwen2moe": Architecture(
        "Qwen2MoeForCausalLM",
        _qwen2moe,
        names=SHARED_EXPERT,
        changes={"ffn_gate_inp_shexp": (Change.ONE_ROW,)},
    ),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", _qwen3moe),
}
