"""Llama 1 to 3.3 and everything saved under that name."""

from __future__ import annotations

from baton.checkpoint.gguf.architecture import Architecture, Keys
from models.families import mistral
from models.families.shared.gguf import PAIRS
from models.family import GELU, Family
from models.model_fields import ModelFields
from models.recipe import Recipe


def _llama(model: ModelFields) -> Recipe:
    bias = model.attention_bias
    mixers = model.attention_layers(qkv_bias=bias, output_bias=bias)
    return model.recipe(mixers, model.mlp(bias=model.mlp_bias))


# Touvron et al., arXiv:2302.13971; Grattafiori et al., arXiv:2407.21783.
LlamaForCausalLM = Family(recipe=_llama, activations=GELU)


# ---------------------------------------------------------------------------- GGUF files


def _gguf_variant(keys: Keys) -> Architecture | None:
    """Choose Mistral (by window) or Mixtral (by experts), whose files claim to be llama."""
    if keys.get("expert_count"):
        return mistral.GGUF_MIXTRAL
    return mistral.GGUF_MISTRAL if keys.get("attention.sliding_window") else None


GGUF = {
    "llama": Architecture(
        "LlamaForCausalLM", changes=PAIRS, may_have_experts=True, variant=_gguf_variant
    )
}
