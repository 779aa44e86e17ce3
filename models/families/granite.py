"""Granite: dense, with muP's multipliers. Granite 4 also has experts, and mostly Mamba 2 layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton.checkpoint.gguf.architecture import Architecture, Keys, Names
from models.families import bamba
from models.families.shared.experts import checked
from models.families.shared.gguf import (
    MAMBA2,
    MAMBA2_CHANGES,
    PAIRS,
    expert_size,
    kinds,
    mamba2,
    mamba2_names,
)
from models.families.shared.mamba2 import read_mamba2
from models.family import GELU, Family
from models.fields import MAX_PARTS, Fields
from models.model_fields import STATE_KINDS, ModelFields
from models.recipe import ExpertsSpec, FeedForwardSpec, LayerSpec, Recipe
from models.rope_config import NO_ROPE

_MULTIPLIERS = frozenset(
    {"embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"}
)
# Baton's name for the intermediate size of experts: Granite 4's files call it intermediate_size,
# which is the MLP's size in other families.
_EXPERT_SIZE = "expert_intermediate_size"
_HYBRID_NAMES = {
    ".mlp.gate.": ".block_sparse_moe.router.layer.",
    ".mlp.shared_expert.gate_up_proj.": ".shared_mlp.input_linear.",
    ".mlp.shared_expert.down_proj.": ".shared_mlp.output_linear.",
    ".mlp.gate_up_proj.": ".shared_mlp.input_linear.",
    ".mlp.down_proj.": ".shared_mlp.output_linear.",
}


def _scales(fields: Fields) -> dict[str, Any]:
    return {
        "embedding_scale": fields.number("embedding_multiplier", 1.0),
        "residual_scale": fields.number("residual_multiplier", 1.0),
        "logits_divisor": fields.number("logits_scaling", 1.0),
    }


def _dense(model: ModelFields) -> Recipe:
    bias, scale = model.attention_bias, model.fields.optional_number("attention_multiplier")
    mixers = model.attention_layers(qkv_bias=bias, output_bias=bias, scale=scale)
    return model.recipe(mixers, model.mlp(bias=model.mlp_bias), **_scales(model.fields))


def _in_common_words(fields: Fields) -> Fields:
    """Return Granite 4's fields under the names that other families use."""
    turning = fields.text("position_embedding_type", "nope")
    if turning not in ("nope", "rope"):
        problem = f"{turning!r} is not supported; supported: nope, rope"
        raise fields.wrong("position_embedding_type", problem)
    size = fields.integer("intermediate_size")
    shared = fields.integer("shared_intermediate_size", 1024)
    return fields.with_values({_EXPERT_SIZE: size, "intermediate_size": shared})


def _experts(fields: Fields) -> ExpertsSpec | None:
    """Read the routed experts; None: the model has only the shared MLP."""
    if fields.integer("num_local_experts", 8, minimum=0) == 0:
        return None
    experts = ExpertsSpec(
        num_experts=fields.integer("num_local_experts", 8, maximum=MAX_PARTS),
        inner_size=fields.integer(_EXPERT_SIZE),
        top_k=fields.integer("num_experts_per_tok", 2),
        scoring="softmax of the chosen",
        shared_size=fields.integer("intermediate_size"),
        stored_as_linears=True,
    )
    return checked(fields, experts)


def _hybrid(model: ModelFields) -> Recipe:
    fields, bias = model.fields, model.attention_bias
    scale = fields.optional_number("attention_multiplier")
    feed_forward: FeedForwardSpec = _experts(fields) or model.mlp(stored_joined=True)
    attention = LayerSpec(
        model.attention(qkv_bias=bias, output_bias=bias, scale=scale), feed_forward
    )
    mixer = read_mamba2(fields, model.hidden_size)
    mamba2 = LayerSpec(mixer, feed_forward, {".self_attn.": ".mamba."})
    recurrent = model.recurrent_layers(interval=0)
    turns = fields.text("position_embedding_type", "nope") == "rope"
    return Recipe(
        layers=tuple(mamba2 if is_recurrent else attention for is_recurrent in recurrent),
        ropes=(model.rope if turns else NO_ROPE,),
        stored_names=_HYBRID_NAMES,
        **_scales(fields),
    )


# IBM, arXiv:2408.13359; multipliers: Yang et al., arXiv:2203.03466.
GraniteForCausalLM = Family(
    recipe=_dense,
    defaults={"attention_multiplier": 1.0},
    reads=_MULTIPLIERS,
    activations=GELU,
)
# IBM, huggingface.co/blog/ibm-granite (2025).
GraniteMoeHybridForCausalLM = Family(
    recipe=_hybrid,
    translate=_in_common_words,
    defaults={"attention_multiplier": 1.0, "rms_norm_eps": 1e-6},
    reads=_MULTIPLIERS | {"no_rope_layers"},
    layer_kinds=tuple(STATE_KINDS),
)


# ---------------------------------------------------------------------------- GGUF files


_GGUF_NAMES: Names = {
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    "ffn_down_shexp": "shared_mlp.output_linear",
    "ffn_down": "shared_mlp.output_linear",
}
_GGUF_JOINS = (
    ("shared_mlp.input_linear.weight", ("ffn_gate_shexp.weight", "ffn_up_shexp.weight")),
    ("shared_mlp.input_linear.weight", ("ffn_gate.weight", "ffn_up.weight")),
)


def _gguf_scales(keys: Keys) -> Mapping[str, Any]:
    """Return Granite's multipliers from GGUF metadata, as config.json fields."""
    return {
        "embedding_multiplier": keys.decimal("embedding_scale", 1.0),
        "residual_multiplier": keys.decimal("residual_scale", 1.0),
        "attention_multiplier": keys.decimal("attention.scale", 1.0),
        "logits_scaling": keys.decimal("logit_scale", 1.0),
    }


def _gguf_experts(keys: Keys) -> Mapping[str, Any]:
    """Return the config.json fields of the shared MLP, and of the experts if there are any."""
    count = keys.integer("expert_count", 0, minimum=0)
    shared = "ffn_up_shexp.weight" if count else "ffn_up.weight"
    return {
        "num_local_experts": count,
        "num_experts_per_tok": keys.integer("expert_used_count", 0, minimum=0) or 1,
        "intermediate_size": expert_size(keys) if count else keys.integer("feed_forward_length"),
        "shared_intermediate_size": keys.rows(shared),
    }


def _gguf_of_moe(keys: Keys) -> Mapping[str, Any]:
    """Return the config.json fields of Granite 3 with experts.

    These are the fields of a Granite 4 whose layers all have attention.
    """
    return {
        **_gguf_scales(keys),
        **_gguf_experts(keys),
        "layer_types": ["attention"] * keys.num_layers(),
        "mamba_n_heads": 1,
        "position_embedding_type": "rope" if _turns(keys) else "nope",
    }


def _turns(keys: Keys) -> bool:
    """Return whether the model uses RoPE."""
    return keys.boolean("rope.scaling.finetuned", True)


def _gguf_of_hybrid(keys: Keys) -> Mapping[str, Any]:
    return {
        **mamba2(keys),
        **_gguf_scales(keys),
        **_gguf_experts(keys),
        "layer_types": kinds(keys, MAMBA2, ("mamba", "attention")),
        "position_embedding_type": "rope" if _turns(keys) else "nope",
    }


def _bamba_or_hybrid(keys: Keys) -> Architecture | None:
    """Return Bamba's row for files of Bamba, else None.

    Bamba's files also name their architecture granitehybrid, but have RoPE and no multipliers.
    """
    is_bamba = _turns(keys) and keys.get("embedding_scale") is None
    return bamba.GGUF_ROW if is_bamba else None


GGUF = {
    "granite": Architecture("GraniteForCausalLM", _gguf_scales, changes=PAIRS),
    "granitemoe": Architecture(
        "GraniteMoeHybridForCausalLM",
        _gguf_of_moe,
        names=_GGUF_NAMES,
        joins=_GGUF_JOINS,
        changes=PAIRS,
        may_have_experts=True,
    ),
    "granitehybrid": Architecture(
        "GraniteMoeHybridForCausalLM",
        _gguf_of_hybrid,
        names={**mamba2_names("mamba"), **_GGUF_NAMES},
        joins=_GGUF_JOINS,
        changes=MAMBA2_CHANGES,
        may_have_experts=True,
        variant=_bamba_or_hybrid,
    ),
}
