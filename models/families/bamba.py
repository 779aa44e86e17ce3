"""Bamba: Mamba 2 in most layers, and attention with RoPE on half of each head in the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton.checkpoint.gguf.architecture import Architecture, Keys, partly_turning_heads
from models.families.shared.gguf import MAMBA2, MAMBA2_CHANGES, mamba2, mamba2_names
from models.families.shared.mamba2 import read_mamba2
from models.family import Family
from models.model_fields import ModelFields
from models.recipe import LayerSpec, Recipe

_NAMES = {
    ".mlp.": ".feed_forward.",
    ".post_attention_layernorm.": ".pre_ff_layernorm.",
    "model.norm.": "model.final_layernorm.",
}


def _bamba(model: ModelFields) -> Recipe:
    fields, num_layers = model.fields, model.num_layers
    attending = fields.token_ids("attn_layer_indices")
    if not attending or max(attending) >= num_layers:
        problem = f"some of {num_layers} layers have to attend, found {list(attending)}"
        raise fields.wrong("attn_layer_indices", problem)
    bias, mlp = model.attention_bias, model.mlp(bias=model.mlp_bias)
    attention = LayerSpec(model.attention(qkv_bias=bias, output_bias=bias), mlp)
    mamba2 = LayerSpec(read_mamba2(fields, model.hidden_size), mlp, {".self_attn.": ".mamba."})
    layers = tuple(attention if layer in attending else mamba2 for layer in range(num_layers))
    return Recipe(layers=layers, ropes=(model.rope,), stored_names=_NAMES)


# IBM, Princeton, CMU and UIUC, huggingface.co/blog/bamba (2024).
BambaForCausalLM = Family(recipe=_bamba, defaults={"num_key_value_heads": 8}, turning=0.5)


# ---------------------------------------------------------------------------- GGUF files


_TURNING = 0.5  # fraction of a head's dims that RoPE rotates


def _gguf(keys: Keys) -> Mapping[str, Any]:
    attending = set(range(keys.num_layers())) - set(keys.layers_with(MAMBA2))
    return {**mamba2(keys), "attn_layer_indices": sorted(attending)}


def _gguf_heads(keys: Keys) -> Mapping[str, Any]:
    """Return the head size as a config.json field.

    Raises:
        ModelLoadError: RoPE does not rotate exactly half of each head.
    """
    found = partly_turning_heads(keys)
    turning = found["partial_rotary_factor"]
    if keys.get("rope.dimension_count") is not None and turning != _TURNING:
        problem = f"must be half of {found['head_dim']}, got {keys.get('rope.dimension_count')}"
        raise keys.wrong("rope.dimension_count", problem)
    return {"head_dim": found["head_dim"]}


# Bamba's GGUF files name their architecture granitehybrid; granite.py recognizes them.
GGUF_ROW = Architecture(
    "BambaForCausalLM",
    _gguf,
    heads=_gguf_heads,
    outer={"output_norm": "model.final_layernorm"},
    names={
        **mamba2_names("mamba"),
        "ffn_norm": "pre_ff_layernorm",
        "ffn_gate": "feed_forward.gate_proj",
        "ffn_up": "feed_forward.up_proj",
        "ffn_down": "feed_forward.down_proj",
    },
    changes=MAMBA2_CHANGES,
)
