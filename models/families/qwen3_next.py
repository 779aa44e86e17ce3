"""Qwen3-Next and Qwen3.5: gated delta nets in most layers, gated attention in the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from baton.checkpoint.gguf.architecture import (
    Architecture,
    Change,
    Keys,
    Names,
    partly_turning_heads,
)
from models.families.qwen import (
    GGUF_SHARED_EXPERT,
    dense_layers,
    experts_with_shared,
    gguf_experts,
    gguf_shared,
)
from models.families.shared.experts import checked, dense_mlp
from models.families.shared.gguf import kinds, state_heads
from models.family import Family
from models.fields import Fields
from models.loading.text_parts import text_fields
from models.model_fields import STATE_KINDS, ModelFields
from models.recipe import (
    DeltaNetSpec,
    ExpertsSpec,
    FeedForwardSpec,
    LayerSpec,
    MlpSpec,
    NormWeight,
    Recipe,
)
from models.rope_config import AxesRule
from models.vision.specs import read_qwen3_5

_INTERVAL = 4  # without layer types, every fourth layer has attention
# Prefixes of weights that the text model ignores: of MTP layers, and of the vision part.
_ELSEWHERE = ("mtp.", "model.visual.")


def _delta_net(fields: Fields, *, stored_by_key_head: bool) -> DeltaNetSpec:
    """Read the ``linear_...`` fields; raises ModelLoadError for inconsistent sizes."""
    if fields.get("attn_output_gate") not in (None, True):
        raise fields.wrong("attn_output_gate", "only true is supported with this architecture")
    num_key_heads = fields.integer("linear_num_key_heads", 16)
    num_value_heads = fields.integer("linear_num_value_heads", 32)
    if num_value_heads % num_key_heads:
        problem = f"{num_key_heads} does not divide {num_value_heads} value heads"
        raise fields.wrong("linear_num_key_heads", problem)
    return DeltaNetSpec(
        num_key_heads=num_key_heads,
        num_value_heads=num_value_heads,
        key_dim=fields.integer("linear_key_head_dim", 128),
        value_dim=fields.integer("linear_value_head_dim", 128),
        kernel_size=fields.integer("linear_conv_kernel_dim", 4, minimum=2),
        stored_by_key_head=stored_by_key_head,
    )


def _recipe(
    model: ModelFields,
    net: DeltaNetSpec,
    feed_forward: FeedForwardSpec,
    dense: frozenset[int] = frozenset(),
) -> Recipe:
    """Return the recipe.

    Args:
        model: the fields of config.json.
        net: the gated delta net of layers without attention.
        feed_forward: the MLP or experts of all layers but ``dense``.
        dense: indices of layers that have an MLP instead of ``feed_forward``.
    """
    bias, mlp = model.attention_bias, dense_mlp(model)
    attention = model.attention(
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        norm_weight=NormWeight.OFFSET,
        output_gate=True,
    )
    names = {".self_attn.": ".linear_attn."}
    parts: list[FeedForwardSpec] = [
        mlp if index in dense else feed_forward for index in range(model.num_layers)
    ]
    layers = tuple(
        LayerSpec(net, part, names) if is_recurrent else LayerSpec(attention, part)
        for is_recurrent, part in zip(
            model.recurrent_layers(interval=_INTERVAL), parts, strict=True
        )
    )
    return Recipe(
        layers=layers, ropes=(model.rope,), norm_weight=NormWeight.OFFSET, ignored=_ELSEWHERE
    )


def _qwen3_next(model: ModelFields) -> Recipe:
    fields = model.fields
    # Unlike in Qwen3, the weights of a token's experts sum to 1 if the file does not say.
    normalize = fields.boolean("norm_topk_prob", True)
    experts = checked(fields, replace(experts_with_shared(fields), normalize=normalize))
    net = _delta_net(fields, stored_by_key_head=True)
    return _recipe(model, net, experts, dense_layers(model))


def _qwen3_5(model: ModelFields) -> Recipe:
    mlp = MlpSpec(inner_size=model.intermediate_size, activation=model.activation)
    return _recipe(model, _delta_net(model.fields, stored_by_key_head=False), mlp)


def _qwen3_5_experts(fields: Fields) -> ExpertsSpec:
    """Read experts whose weights for a token always sum to 1."""
    if fields.get("norm_topk_prob") not in (None, True):
        raise fields.wrong("norm_topk_prob", "only true is supported for this architecture")
    return checked(fields, replace(experts_with_shared(fields), normalize=True))


def _qwen3_5_moe(model: ModelFields) -> Recipe:
    experts = _qwen3_5_experts(model.fields)
    dense_layers(model)  # raises if a field is wrong
    return _recipe(model, _delta_net(model.fields, stored_by_key_head=False), experts)


def _beside_images(recipe: Recipe) -> Recipe:
    """Return the recipe with the names that text layers have in a checkpoint with a vision part."""
    return replace(recipe, stored_prefix="model.language_model.")


def _qwen3_5_of_images(model: ModelFields) -> Recipe:
    return _beside_images(_qwen3_5(model))


def _qwen3_5_moe_of_images(model: ModelFields) -> Recipe:
    return _beside_images(_qwen3_5_moe(model))


# Qwen Team, qwen.ai/blog (2025); gated delta nets: arXiv:2412.06464.
Qwen3NextForCausalLM = Family(
    recipe=_qwen3_next,
    defaults={
        "partial_rotary_factor": 0.25,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
    },
    layer_kinds=tuple(STATE_KINDS),
    partial_rotary=True,
)
Qwen3_5ForCausalLM = replace(
    Qwen3NextForCausalLM,
    recipe=_qwen3_5,
    defaults={**Qwen3NextForCausalLM.defaults, "num_key_value_heads": 4},
)
# These files have no size of an MLP, because all layers have experts.
Qwen3_5MoeForCausalLM = replace(
    Qwen3NextForCausalLM,
    recipe=_qwen3_5_moe,
    defaults={**Qwen3NextForCausalLM.defaults, "intermediate_size": 1},
)
_AXES = AxesRule((11, 11, 10), interleaved=True)
Qwen3_5ForConditionalGeneration = replace(
    Qwen3_5ForCausalLM,
    recipe=_qwen3_5_of_images,
    translate=text_fields,
    vision=read_qwen3_5,
    axes=_AXES,
)
Qwen3_5MoeForConditionalGeneration = replace(
    Qwen3_5MoeForCausalLM,
    recipe=_qwen3_5_moe_of_images,
    translate=text_fields,
    vision=read_qwen3_5,
    axes=_AXES,
)


# ---------------------------------------------------------------------------- GGUF files


_DELTA_NET_NAMES: Names = {
    **GGUF_SHARED_EXPERT,
    "post_attention_norm": "post_attention_layernorm",
    "ssm_a": "linear_attn.A_log",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_NORMS = ("attn_norm", "attn_q_norm", "attn_k_norm", "post_attention_norm", "output_norm")
_DELTA_NET_CHANGES: Mapping[str, tuple[Change, ...]] = {
    **dict.fromkeys(_NORMS, (Change.LESS_ONE,)),
    "ffn_gate_inp_shexp": (Change.ONE_ROW,),
    "ssm_a": (Change.LOG_OF_DECAY,),
    "ssm_conv1d": (Change.CHANNELS,),
}
_IN_PROJ = "linear_attn.in_proj_qkvz.weight"
_QWEN3_5_NAMES: Names = {
    **_DELTA_NET_NAMES,
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
}
_VALUES = (Change.VALUE_HEADS,)
_QWEN3_5_CHANGES: Mapping[str, tuple[Change, ...]] = {
    **_DELTA_NET_CHANGES,
    **dict.fromkeys(("attn_gate", "ssm_beta", "ssm_alpha", "ssm_dt"), _VALUES),
    "attn_qkv": (Change.VALUE_CHANNELS,),
    "ssm_a": (Change.VALUE_HEADS, Change.LOG_OF_DECAY),
    "ssm_conv1d": (Change.VALUE_CHANNELS, Change.CHANNELS),
    "ssm_out": (Change.VALUE_COLUMNS,),
}


def _gguf(keys: Keys) -> Mapping[str, Any]:
    num_value_heads, value_head_dim = state_heads(keys)
    return {
        "layer_types": kinds(keys, "ssm_a", ("linear_attention", "full_attention")),
        "linear_conv_kernel_dim": keys.integer("ssm.conv_kernel"),
        "linear_key_head_dim": keys.integer("ssm.state_size"),
        "linear_num_key_heads": keys.integer("ssm.group_count"),
        "linear_num_value_heads": num_value_heads,
        "linear_value_head_dim": value_head_dim,
    }


def _gguf_with_experts(keys: Keys) -> Mapping[str, Any]:
    experts = {**gguf_experts(keys, normalized=True), **gguf_shared(keys)}
    return {**_gguf(keys), **experts}


def _gguf_of_3_5(model: str, fields: Any) -> Architecture:
    return Architecture(
        model,
        fields,
        heads=partly_turning_heads,
        names=_QWEN3_5_NAMES,
        changes=_QWEN3_5_CHANGES,
        may_have_experts=True,
    )


GGUF = {
    "qwen35": _gguf_of_3_5("Qwen3_5ForCausalLM", _gguf),
    "qwen35moe": _gguf_of_3_5("Qwen3_5MoeForCausalLM", _gguf_with_experts),
    "qwen3next": Architecture(
        "Qwen3NextForCausalLM",
        _gguf_with_experts,
        heads=partly_turning_heads,
        names={
            **_DELTA_NET_NAMES,
            "ssm_ba": "linear_attn.in_proj_ba",
            "ssm_in": "linear_attn.in_proj_qkvz",
        },
        joins=((_IN_PROJ, ("attn_qkv.weight", "attn_gate.weight")),),
        changes={**_DELTA_NET_CHANGES, _IN_PROJ: (Change.BY_KEY_HEAD,)},
        may_have_experts=True,
    ),
}
