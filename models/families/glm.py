"""GLM-4, dense and with experts: RoPE rotates half of each head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton.checkpoint.gguf.architecture import Architecture, Keys, partly_turning_heads
from models.families.shared.experts import (
    ROUTED_NAMES,
    layers_behind_dense_ones,
    without_auxiliary_loss,
)
from models.families.shared.gguf import ROUTED_EXPERTS, routed_experts
from models.family import Family
from models.model_fields import ModelFields
from models.recipe import LayerNorms, Recipe

# GLM-4 and Z1 of 2025 also have norms after each part.
_NORMS_OF_2025 = LayerNorms(
    after_mixer="post_self_attn_layernorm", after_feed_forward="post_mlp_layernorm"
)


def _dense(model: ModelFields, norms: LayerNorms) -> Recipe:
    pair_dims = model.rope.rotary_dim(model.head_dim)
    mixers = model.attention_layers(qkv_bias=model.attention_bias, pair_dims=pair_dims)
    return model.recipe(mixers, model.mlp(stored_joined=True), norms=norms)


def _glm(model: ModelFields) -> Recipe:
    return _dense(model, LayerNorms())


def _glm4(model: ModelFields) -> Recipe:
    return _dense(model, _NORMS_OF_2025)


def _glm4_moe(model: ModelFields) -> Recipe:
    qk_norm = model.fields.boolean("use_qk_norm", False)
    attention = model.attention(qkv_bias=model.attention_bias, qk_norm=qk_norm)
    experts = without_auxiliary_loss(model.fields)
    return Recipe(
        layers=layers_behind_dense_ones(model, attention, experts),
        ropes=(model.rope,),
        stored_names=ROUTED_NAMES,
    )


# Team GLM, arXiv:2406.12793.
GlmForCausalLM = Family(
    recipe=_glm,
    defaults={
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
        "num_key_value_heads": 2,
        "head_dim": 128,
    },
    partial_rotary=True,
)
Glm4ForCausalLM = Family(recipe=_glm4, defaults=GlmForCausalLM.defaults, partial_rotary=True)
# GLM-4.5 and 4.6: GLM-4.5 Team, arXiv:2508.06471.
Glm4MoeForCausalLM = Family(
    recipe=_glm4_moe,
    defaults={"partial_rotary_factor": 0.5, "num_key_value_heads": 8},
    reads=frozenset({"use_qk_norm"}),
    partial_rotary=True,
)


# ---------------------------------------------------------------------------- GGUF files


def _gguf_of_moe(keys: Keys) -> Mapping[str, Any]:
    return {
        **routed_experts(keys),
        "norm_topk_prob": keys.boolean("expert_weights_norm", True),
        "use_qk_norm": keys.has("attn_q_norm.weight"),
    }


GGUF = {
    "chatglm": Architecture(
        "GlmForCausalLM", heads=partly_turning_heads, names={"ffn_up": "mlp.gate_up_proj"}
    ),
    "glm4": Architecture(
        "Glm4ForCausalLM",
        heads=partly_turning_heads,
        names={
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
        },
    ),
    "glm4moe": Architecture(
        "Glm4MoeForCausalLM",
        _gguf_of_moe,
        heads=partly_turning_heads,
        names={"post_attention_norm": "post_attention_layernorm", **ROUTED_EXPERTS},
        may_have_experts=True,
    ),
}
