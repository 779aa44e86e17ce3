"""Nemotron-H: Mamba 2, attention without RoPE, and MLPs or experts with squared ReLU.

In config.json, each layer has one part. Baton joins up to two parts to a layer::

    config.json    M  -  M  *  -  M  E        M: Mamba 2, -: MLP, *: attention, E: experts
    Baton          M  -| M |*  -| M  E        a mixer, and the MLP or experts after it, if any
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from baton.checkpoint.gguf.architecture import Architecture, Keys, Names, whole_heads
from models.families.shared.experts import checked
from models.families.shared.gguf import (
    MAMBA2,
    MAMBA2_CHANGES,
    mamba2_names,
    routed_experts,
    state_heads,
)
from models.families.shared.mamba2 import refuse_time_step_limit
from models.family import Family
from models.fields import MAX_PARTS, Fields
from models.model_fields import ModelFields
from models.recipe import (
    RELU2,
    ExpertsSpec,
    FeedForwardSpec,
    LayerSpec,
    Mamba2Spec,
    MixerSpec,
    MlpSpec,
    NormWeight,
    Recipe,
)
from models.rope_config import NO_ROPE

_MAMBA, _ATTENTION, _MLP, _MOE = "linear_attention", "full_attention", "mlp", "moe"
_LETTERS = {"M": _MAMBA, "*": _ATTENTION, "-": _MLP, "E": _MOE}
_NAMES = {name: name for name in _LETTERS.values()} | {"mamba": _MAMBA, "attention": _ATTENTION}
_PATTERN, _PARTS = "hybrid_override_pattern", "layers_block_type"
_TIME_STEP_MIN = 0.001
# Older -> newer field names. If a file has both, the value under the older name is used.
_OLDER_NAMES = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_dt_limit": "time_step_limit",
    "mamba_dt_min": "time_step_min",
}
_STORED_NAMES = {
    ".shared_expert.": ".shared_experts.",
    ".mixer.e_score_correction_bias": ".mixer.gate.e_score_correction_bias",
    "model.embed_tokens.": "backbone.embeddings.",
    "model.norm.": "backbone.norm_f.",
}


def _in_common_words(fields: Fields) -> Fields:
    """Return the fields under the names that other families use.

    Raises:
        ModelLoadError: a field has the wrong type, or a value that is not supported.
    """
    found = {new: old for old, new in _OLDER_NAMES.items() if old in fields.names()}
    fields = fields.with_values({new: fields.get(old) for new, old in found.items()})
    for name, only in (("mlp_hidden_act", RELU2), ("mamba_hidden_act", "silu")):
        if (act := fields.text(name, only)) != only:
            raise fields.wrong(name, f"{act!r} is not supported; supported: {only}")
    if fields.boolean("residual_in_fp32", False):
        raise fields.wrong("residual_in_fp32", "only false is supported")
    refuse_time_step_limit(fields)
    _refuse_time_step_min(fields)
    kinds = _kinds(fields)
    head_dim = "head_dim" if fields.has("head_dim") else "attention_head_dim"
    return fields.with_values(
        {
            "num_hidden_layers": sum(kind in (_MAMBA, _ATTENTION) for kind in kinds),
            "layer_types": None,
            _PARTS: kinds,
            "rms_norm_eps": fields.number("layer_norm_epsilon", 1e-5),
            "head_dim": fields.integer(head_dim, 128),
            "hidden_act": "silu",  # activation of Mamba 2
        }
    )


def _refuse_time_step_min(fields: Fields) -> None:
    """Raise ModelLoadError unless the minimum time step is absent, 0 or 0.001.

    All published checkpoints have 0.001.

    In NVIDIA's code and in Baton, this field does not affect results. transformers 5 raises time
    steps below the minimum for a prompt's tokens, but not for generated tokens.
    """
    name = "time_step_min"
    if fields.get(name) not in (None, 0.0, _TIME_STEP_MIN):
        problem = f"{fields.get(name)!r} is not supported; supported: 0.0, {_TIME_STEP_MIN}"
        raise fields.wrong(name, problem)


def _kinds(fields: Fields) -> list[str]:
    """Return the kind of each part of the model, in the order of config.json.

    Raises:
        ModelLoadError: a kind is unknown, an MLP or experts do not follow a mixer, or no part is
            attention.
    """
    # If a file has several of these fields, layer_types is used, as in transformers.
    name = next((n for n in ("layer_types", _PARTS) if fields.has(n)), _PATTERN)
    known = _LETTERS if name == _PATTERN else _NAMES
    kinds: list[str] = []
    for index, kind in enumerate(fields.text(name) if name == _PATTERN else fields.texts(name)):
        if kind not in known:
            raise fields.wrong(name, f"{kind!r} is not supported; supported: {', '.join(known)}")
        kinds.append(known[kind])
        is_mixer = [one in (_MAMBA, _ATTENTION) for one in kinds[-2:]]
        if not is_mixer[-1] and is_mixer != [True, False]:
            raise fields.wrong(name, f"{kind!r} at {index} must follow an attention or Mamba part")
    if _ATTENTION not in kinds:
        raise fields.wrong(name, "must have an attention part")
    return kinds


def _mamba2(fields: Fields) -> Mamba2Spec:
    mamba2 = Mamba2Spec(
        num_heads=fields.integer("mamba_num_heads", 128),
        head_dim=fields.integer("mamba_head_dim", 64),
        num_groups=fields.integer("n_groups", 8),
        state_dim=fields.integer("ssm_state_size", 128),
        kernel_size=fields.integer("conv_kernel", 4, minimum=2),
        conv_bias=fields.boolean("use_conv_bias", True),
        proj_bias=fields.boolean("use_bias", False),
    )
    if mamba2.num_heads % mamba2.num_groups:
        problem = f"{mamba2.num_groups} does not divide {mamba2.num_heads} heads"
        raise fields.wrong("n_groups", problem)
    return mamba2


def _experts(fields: Fields, mlp_bias: bool) -> ExpertsSpec:
    """Read experts that have no gates and are chosen as in DeepSeek V3."""
    latent_size = fields.optional_integer("moe_latent_size")
    if latent_size is not None and mlp_bias:
        raise fields.wrong("mlp_bias", "true is not supported with moe_latent_size")
    experts = ExpertsSpec(
        num_experts=fields.integer("n_routed_experts", 8, maximum=MAX_PARTS),
        inner_size=fields.integer("moe_intermediate_size", 7688),
        top_k=fields.integer("num_experts_per_tok", 2),
        scoring="sigmoid",
        normalize=fields.boolean("norm_topk_prob", True),
        scale=fields.number("routed_scaling_factor", 1.0),
        num_groups=fields.integer("n_group", 1),
        top_groups=fields.integer("topk_group", 1),
        group_best=2,
        has_bias=True,
        shared_size=fields.integer("moe_shared_expert_intermediate_size", 7688),
        shared_bias=mlp_bias,
        activation=RELU2,
        latent_size=latent_size,
    )
    return checked(fields, experts)


def _stored_names(layer: int, mixer: int, feed_forward: int) -> dict[str, str]:
    """Return checkpoint names of a layer's parts.

    Args:
        layer: index of the layer in Baton.
        mixer: index of the mixer in the checkpoint.
        feed_forward: index of the MLP or experts in the checkpoint.
    """
    return {
        f"model.layers.{layer}.self_attn.": f"backbone.layers.{mixer}.mixer.",
        f"model.layers.{layer}.input_layernorm.": f"backbone.layers.{mixer}.norm.",
        f"model.layers.{layer}.mlp.": f"backbone.layers.{feed_forward}.mixer.",
        f"model.layers.{layer}.post_attention_layernorm.": f"backbone.layers.{feed_forward}.norm.",
    }


def _layers(
    kinds: Sequence[str],
    mixers: dict[str, MixerSpec],
    feed_forwards: dict[str, FeedForwardSpec],
) -> tuple[LayerSpec, ...]:
    layers: list[LayerSpec] = []
    for place, kind in enumerate(kinds):
        if kind in mixers:
            following = kinds[place + 1] if place + 1 < len(kinds) else ""
            names = _stored_names(len(layers), place, place + 1)
            layers.append(LayerSpec(mixers[kind], feed_forwards.get(following), names))
    return tuple(layers)


def _recipe(model: ModelFields) -> Recipe:
    fields = model.fields
    kinds = fields.texts(_PARTS)
    mixers: dict[str, MixerSpec] = {_MAMBA: _mamba2(fields), _ATTENTION: model.attention()}
    feed_forwards: dict[str, FeedForwardSpec] = {
        _MLP: MlpSpec(inner_size=model.intermediate_size, bias=model.mlp_bias, activation=RELU2)
    }
    if _MOE in kinds:
        feed_forwards[_MOE] = _experts(fields, model.mlp_bias)
    return Recipe(
        layers=_layers(kinds, mixers, feed_forwards),
        ropes=(NO_ROPE,),
        norm_weight=NormWeight.WIDE,
        stored_names=_STORED_NAMES,
        ignored=("mtp.",),
    )


# NVIDIA, arXiv:2504.03624.
NemotronHForCausalLM = Family(
    recipe=_recipe, translate=_in_common_words, defaults={"num_key_value_heads": 8}
)


# ---------------------------------------------------------------------------- GGUF files


_GGUF_NAMES: Names = {
    **mamba2_names("mixer"),
    "attn_norm": "norm",
    "attn_q": "mixer.q_proj",
    "attn_k": "mixer.k_proj",
    "attn_v": "mixer.v_proj",
    "attn_output": "mixer.o_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    "ffn_up_exps": "mixer.experts.{expert}.up_proj",
    "ffn_down_exps": "mixer.experts.{expert}.down_proj",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
}


def _gguf(keys: Keys) -> Mapping[str, Any]:
    """Return the fields of config.json; in the GGUF file, too, each layer has one part."""
    kinds = {
        **dict.fromkeys(keys.layers_with("ffn_up.weight"), "mlp"),
        **dict.fromkeys(keys.layers_with("ffn_gate_inp.weight"), "moe"),
        **dict.fromkeys(keys.layers_with(MAMBA2), "mamba"),
        **dict.fromkeys(keys.layers_with("attn_q.weight"), "attention"),
    }
    layers = range(keys.num_layers())
    if missing := [layer for layer in layers if layer not in kinds]:
        problem = f"blk.{missing[0]} has neither attention nor a state, a MLP or experts"
        raise keys.wrong("block_count", problem)
    num_heads, head_dim = state_heads(keys)
    eps = keys.decimal("attention.layer_norm_rms_epsilon")
    return {
        "layers_block_type": [kinds[layer] for layer in layers],
        "layer_norm_epsilon": eps,
        "mamba_num_heads": num_heads,
        "mamba_head_dim": head_dim,
        "n_groups": keys.integer("ssm.group_count"),
        "ssm_state_size": keys.integer("ssm.state_size"),
        "conv_kernel": keys.integer("ssm.conv_kernel"),
        "use_conv_bias": bool(keys.layers_with("ssm_conv1d.bias")),
        "use_bias": bool(keys.layers_with("ssm_in.bias")),
        "attention_bias": bool(keys.layers_with("attn_q.bias")),
        "mlp_bias": bool(keys.layers_with("ffn_up.bias")),
        "mlp_hidden_act": "relu2",
        **(_gguf_experts(keys) if keys.get("expert_count") else {}),
    }


def _gguf_experts(keys: Keys) -> Mapping[str, Any]:
    found = {**routed_experts(keys)}
    found["norm_topk_prob"] = keys.boolean("expert_weights_norm", True)
    found["moe_shared_expert_intermediate_size"] = keys.integer("expert_shared_feed_forward_length")
    has_latents = keys.get("moe_latent_size") is not None
    found["moe_latent_size"] = keys.integer("moe_latent_size") if has_latents else None
    return found


_GGUF_ROW = Architecture(
    "NemotronHForCausalLM",
    _gguf,
    heads=whole_heads,
    prefix="backbone.layers.{layer}.",
    outer={"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f"},
    names=_GGUF_NAMES,
    changes=MAMBA2_CHANGES,
    may_have_experts=True,
)
GGUF = {"nemotron_h": _GGUF_ROW, "nemotron_h_moe": _GGUF_ROW}
