"""LFM2: gated short convolutions in most layers, attention in some."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton.checkpoint.gguf.architecture import Architecture, Change, Keys
from models.families.shared.gguf import kinds
from models.family import Family
from models.fields import MAX_PARTS, Fields
from models.model_fields import FULL, ModelFields
from models.recipe import LayerSpec, MlpSpec, Recipe, ShortConvSpec

_CONV = "conv"
_NAMES = {
    ".input_layernorm.": ".operator_norm.",
    ".post_attention_layernorm.": ".ffn_norm.",
    ".mlp.gate_proj.": ".feed_forward.w1.",
    ".mlp.up_proj.": ".feed_forward.w3.",
    ".mlp.down_proj.": ".feed_forward.w2.",
    ".self_attn.o_proj.": ".self_attn.out_proj.",
    ".self_attn.q_norm.": ".self_attn.q_layernorm.",
    ".self_attn.k_norm.": ".self_attn.k_layernorm.",
    "model.norm.": "model.embedding_norm.",
}


def _in_common_words(fields: Fields) -> Fields:
    """Return the fields under the names that other families use."""
    name = "tie_embedding" if fields.has("tie_embedding") else "tie_word_embeddings"
    return fields.with_values(
        {
            "rms_norm_eps": fields.number("norm_eps", 1e-5),
            "intermediate_size": _intermediate_size(fields),
            "layer_types": _layer_types(fields),
            "tie_word_embeddings": fields.boolean(name, True),
        }
    )


def _intermediate_size(fields: Fields) -> int:
    name = "block_ff_dim" if fields.has("block_ff_dim") else "intermediate_size"
    size = fields.integer(name)
    if not fields.boolean("block_auto_adjust_ff_dim", True):
        return size
    size = int(2 * size / 3)
    multiplier = "block_ffn_dim_multiplier"
    # unlike in other fields, null does not mean the default
    if multiplier in fields.names() and not fields.has(multiplier):
        return size
    size = int(fields.number(multiplier, 1.0) * size)
    multiple = fields.integer("block_multiple_of", 256)
    return -(-size // multiple) * multiple


def _layer_types(fields: Fields) -> list[str]:
    if fields.has("layer_types"):
        return list(fields.texts("layer_types"))
    num_layers = fields.integer("num_hidden_layers", maximum=MAX_PARTS)
    attending = set(range(num_layers))
    if fields.has("full_attn_idxs"):
        attending = set(fields.token_ids("full_attn_idxs"))
    return [FULL if layer in attending else _CONV for layer in range(num_layers)]


def _recipe(model: ModelFields) -> Recipe:
    conv = ShortConvSpec(
        num_channels=model.hidden_size,
        kernel_size=model.fields.integer("conv_L_cache", 3, minimum=2),
        bias=model.fields.boolean("conv_bias", False),
    )
    mlp = MlpSpec(inner_size=model.intermediate_size, activation=model.activation)
    by_type = {
        _CONV: LayerSpec(conv, mlp, {".self_attn.": ".conv."}),
        FULL: LayerSpec(model.attention(qk_norm=True), mlp),
    }
    types = model.layer_types or ()
    if FULL not in types:
        problem = f"some of {model.num_layers} layers have to attend"
        raise model.fields.wrong("layer_types", problem)
    layers = tuple(by_type[name] for name in types)
    return Recipe(layers=layers, ropes=(model.rope,), stored_names=_NAMES)


# Amini et al., arXiv:2511.23404.
Lfm2ForCausalLM = Family(
    recipe=_recipe,
    translate=_in_common_words,
    defaults={"num_key_value_heads": 8, "rope_theta": 1_000_000.0},
    layer_kinds=(FULL, _CONV),
)


# ---------------------------------------------------------------------------- GGUF files


def _gguf(keys: Keys) -> Mapping[str, Any]:
    return {
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": keys.integer("shortconv.l_cache"),
        "conv_bias": bool(keys.layers_with("shortconv.conv.bias")),
        "layer_types": kinds(keys, "shortconv.conv.weight", ("conv", "full_attention")),
        "norm_eps": keys.decimal("attention.layer_norm_rms_epsilon"),
    }


GGUF = {
    "lfm2": Architecture(
        "Lfm2ForCausalLM",
        _gguf,
        outer={"token_embd_norm": "model.embedding_norm", "output_norm": "model.embedding_norm"},
        names={
            "attn_norm": "operator_norm",
            "attn_output": "self_attn.out_proj",
            "attn_q_norm": "self_attn.q_layernorm",
            "attn_k_norm": "self_attn.k_layernorm",
            "ffn_norm": "ffn_norm",
            "ffn_gate": "feed_forward.w1",
            "ffn_up": "feed_forward.w3",
            "ffn_down": "feed_forward.w2",
            "shortconv.conv": "conv.conv",
            "shortconv.in_proj": "conv.in_proj",
            "shortconv.out_proj": "conv.out_proj",
        },
        changes={"shortconv.conv.weight": (Change.CHANNELS,)},
        may_have_experts=True,
    )
}
