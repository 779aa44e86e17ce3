"""Seed-OSS by ByteDance: a Llama with optional biases of the attention's projections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton.checkpoint.gguf.architecture import Architecture, Keys
from models.family import Family
from models.model_fields import ModelFields
from models.recipe import Recipe


def _seed_oss(model: ModelFields) -> Recipe:
    output_bias = model.fields.boolean("attention_out_bias", False)
    mixers = model.attention_layers(qkv_bias=model.attention_bias, output_bias=output_bias)
    return model.recipe(mixers, model.mlp(bias=model.mlp_bias))


# There is no paper, only the modeling file.
SeedOssForCausalLM = Family(
    recipe=_seed_oss,
    defaults={"attention_bias": True, "num_key_value_heads": 8, "head_dim": 128},
)


# ---------------------------------------------------------------------------- GGUF files


def _gguf(keys: Keys) -> Mapping[str, Any]:
    return {"attention_out_bias": keys.has("attn_output.bias")}


GGUF = {
    "seed_oss": Architecture(
        "SeedOssForCausalLM",
        _gguf,
        names={"post_attention_norm": "post_attention_layernorm"},
    )
}
