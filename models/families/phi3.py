"""Phi-3: a Llama with fused projections; RoPE may rotate only a part of each head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton.checkpoint.gguf.architecture import Architecture, Keys, partly_turning_heads
from baton.checkpoint.gguf.rope import original_length
from models.families.shared.gguf import window
from models.family import GELU, Family
from models.model_fields import ModelFields
from models.recipe import Recipe


def _phi3(model: ModelFields) -> Recipe:
    windows = [model.sliding_window] * model.num_layers
    mixers = model.attention_layers(windows, stored_joined=True)
    return model.recipe(mixers, model.mlp(stored_joined=True))


# Abdin et al., arXiv:2404.14219.
Phi3ForCausalLM = Family(
    recipe=_phi3,
    defaults={"original_max_position_embeddings": 4096},
    activations=GELU,
    partial_rotary=True,
)


# ---------------------------------------------------------------------------- GGUF files


def _gguf(keys: Keys) -> Mapping[str, Any]:
    return {**window(keys), "original_max_position_embeddings": original_length(keys)}


GGUF = {
    "phi3": Architecture(
        "Phi3ForCausalLM",
        _gguf,
        heads=partly_turning_heads,
        names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    )
}
