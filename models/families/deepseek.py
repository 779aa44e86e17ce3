"""DeepSeek V2, V3 and R1, and Kimi K2: latent attention; experts in all but the first layers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from baton.checkpoint.gguf.architecture import Architecture, Change, Keys, Names
from baton.checkpoint.gguf.rope import latent_yarn
from models.families.shared import gguf
from models.families.shared.experts import (
    ROUTED_NAMES,
    checked,
    expect,
    layers_behind_dense_ones,
    routed_experts,
    without_auxiliary_loss,
)
from models.family import Family
from models.fields import Fields
from models.model_fields import ModelFields
from models.recipe import ExpertsSpec, LatentSpec, Recipe

# RoPE's sections in config.json; if a file has both, the first is read
_SCALING = ("rope_scaling", "rope_parameters")


_NUM_KV_HEADS, _V3_KV_HEADS = "num_key_value_heads", 128


def _turning_heads(fields: Fields, default_kv_heads: int | None = None) -> Fields:
    """Set ``head_dim`` to the size of a head's rotated part, and check the number of key heads.

    Args:
        fields: fields of config.json.
        default_kv_heads: number of key heads if the file lacks the field; None: the number of
            attention heads.
    """
    num_heads = fields.integer("num_attention_heads")
    default = None if _NUM_KV_HEADS in fields.names() else default_kv_heads
    num_kv_heads = fields.integer(_NUM_KV_HEADS, default or num_heads)
    if num_kv_heads != num_heads:
        problem = f"{num_kv_heads} is not supported, a latent makes all {num_heads} heads"
        raise fields.wrong(_NUM_KV_HEADS, problem)
    rope_dim = fields.integer("qk_rope_head_dim")
    if rope_dim % 2:
        raise fields.wrong("qk_rope_head_dim", f"{rope_dim} is odd, rotary embedding needs pairs")
    return fields.with_values({"head_dim": rope_dim})


def _turning_heads_of_v3(fields: Fields) -> Fields:
    rope_dim = fields.integer("qk_rope_head_dim")
    if rope_dim % 2 == 0 and fields.get("head_dim") not in (None, rope_dim):
        # transformers rotates head_dim dims, even if the rotated part has another size.
        raise fields.wrong("head_dim", f"only qk_rope_head_dim, {rope_dim}, is supported")
    return _turning_heads(fields, _V3_KV_HEADS)


def _latents(model: ModelFields, *, rope_interleave: bool) -> LatentSpec:
    fields = model.fields
    nope_dim, rope_dim = fields.integer("qk_nope_head_dim"), model.head_dim
    return LatentSpec(
        num_heads=model.num_heads,
        q_lora_rank=fields.optional_integer("q_lora_rank"),
        kv_lora_rank=fields.integer("kv_lora_rank"),
        qk_nope_head_dim=nope_dim,
        qk_rope_head_dim=rope_dim,
        v_head_dim=fields.integer("v_head_dim"),
        rope_interleave=rope_interleave,
        scale=(nope_dim + rope_dim) ** -0.5 * _scale_of_rope(fields),
        bias=model.attention_bias,
    )


def _scale_of_rope(fields: Fields) -> float:
    """Return YaRN's factor of the dot products: the square of ``mscale_all_dim``'s scale."""
    section = next((name for name in _SCALING if fields.get(name)), None)
    scaling = fields.child(section) if section else Fields({}, "")
    rope_type = scaling.get("rope_type") or scaling.get("type") or "default"
    if rope_type == "default" or not scaling.get("mscale_all_dim"):
        return 1.0
    factor = scaling.number("factor")
    scale = 0.1 * scaling.number("mscale_all_dim") * math.log(factor) + 1.0 if factor > 1 else 1.0
    return scale * scale


def _experts_of_v2(fields: Fields) -> ExpertsSpec:
    expect(fields, "scoring_func", "softmax")
    method = fields.text("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        known = "greedy, group_limited_greedy"
        raise fields.wrong("topk_method", f"{method!r} is not supported; supported: {known}")
    for name in ("norm_topk_prob", "mlp_bias"):
        if fields.boolean(name, False):
            raise fields.wrong(name, "true is not supported for this architecture")
    experts = replace(routed_experts(fields, scoring="softmax", group_best=1), normalize=False)
    if method == "greedy":
        experts = replace(experts, num_groups=1, top_groups=1)
    return checked(fields, experts)


def _recipe(model: ModelFields, latents: LatentSpec, experts: ExpertsSpec) -> Recipe:
    return Recipe(
        layers=layers_behind_dense_ones(model, latents, experts),
        ropes=(model.rope,),
        stored_names=ROUTED_NAMES,
    )


def _v2(model: ModelFields) -> Recipe:
    """Return the recipe of V2. Unlike V3, V2 has no option: RoPE always rotates adjacent dims."""
    return _recipe(model, _latents(model, rope_interleave=True), _experts_of_v2(model.fields))


def _v3(model: ModelFields) -> Recipe:
    latents = _latents(model, rope_interleave=model.fields.boolean("rope_interleave", True))
    return _recipe(model, latents, without_auxiliary_loss(model.fields))


# DeepSeek-AI, arXiv:2405.04434.
DeepseekV2ForCausalLM = Family(recipe=_v2, translate=_turning_heads, defaults={"q_lora_rank": 1536})
# DeepSeek-AI, arXiv:2412.19437.
DeepseekV3ForCausalLM = Family(
    recipe=_v3,
    translate=_turning_heads_of_v3,
    defaults={
        _NUM_KV_HEADS: _V3_KV_HEADS,
        "q_lora_rank": 1536,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
    },
)


# ---------------------------------------------------------------------------- GGUF files


_SIGMOID = 2  # value of `expert_gating_func` for sigmoid scores
_KV_B = "self_attn.kv_b_proj.weight"
_GGUF_NAMES: Names = {
    **gguf.ROUTED_EXPERTS,
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
}


def _gguf_of_v2(keys: Keys) -> Mapping[str, Any]:
    """Return V2's fields of config.json."""
    return {
        **(gguf.routed_experts(keys) if keys.get("expert_count") else _gguf_without_experts(keys)),
        "topk_method": "group_limited_greedy" if keys.get("expert_group_count") else "greedy",
        "rope_scaling": latent_yarn(keys),
    }


def _gguf_of_v3(keys: Keys) -> Mapping[str, Any]:
    return {**_gguf_of_v2(keys), "topk_method": "noaux_tc", "rope_interleave": True}


def _gguf_without_experts(keys: Keys) -> Mapping[str, Any]:
    """Return values for the required expert fields of a model without experts."""
    one = dict.fromkeys(("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"), 1)
    layers = {"first_k_dense_replace": keys.num_layers(), "n_group": 1, "topk_group": 1}
    return {**one, **layers, "n_shared_experts": 0}


def _gguf_variant(keys: Keys) -> Architecture | None:
    return _GGUF_V3 if keys.get("expert_gating_func") == _SIGMOID else None


def _gguf_heads(keys: Keys) -> Mapping[str, Any]:
    """Return the sizes of latent attention as config.json fields.

    GGUF files from before 2025 have these sizes only under the keys for ordinary heads.
    """
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


def _gguf_row(model: str, fields: Any) -> Architecture:
    return Architecture(
        model,
        fields,
        heads=_gguf_heads,
        names=_GGUF_NAMES,
        joins=((_KV_B, ("attn_k_b.weight", "attn_v_b.weight")),),
        changes={_KV_B: (Change.LATENTS,)},
        may_have_experts=True,
        variant=_gguf_variant if fields is _gguf_of_v2 else None,
    )


_GGUF_V3 = _gguf_row("DeepseekV3ForCausalLM", _gguf_of_v3)
GGUF = {"deepseek2": _gguf_row("DeepseekV2ForCausalLM", _gguf_of_v2)}
