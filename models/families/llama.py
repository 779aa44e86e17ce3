"""Llama 1 to 3.3, other models saved as Llama, and (with images) Idefics3 and SmolVLM."""

from __future__ import annotations

from baton.checkpoint.gguf.architecture import Architecture, Keys
from models.families import mistral
from models.families.shared.gguf import PAIRS
from models.family import GELU, Family, TextPart
from models.model_fields import ModelFields
from models.recipe import Recipe
from models.vision.specs import read_tiles


def _llama(model: ModelFields) -> Recipe:
    bias = model.attention_bias
    mixers = model.attention_layers(qkv_bias=bias, output_bias=bias)
    return model.recipe(mixers, model.mlp(bias=model.mlp_bias))


# Touvron et al., arXiv:2302.13971; Grattafiori et al., arXiv:2407.21783.
LlamaForCausalLM = Family(recipe=_llama, activations=GELU)
# Laurençon et al., arXiv:2408.12637; Marafioti et al., arXiv:2504.05299.
Idefics3ForConditionalGeneration = SmolVLMForConditionalGeneration = TextPart(
    by_type={"llama": "LlamaForCausalLM"},
    defaults={
        "vocab_size": 32_000,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
    },
    vision=read_tiles,
)


# ---------------------------------------------------------------------------- GGUF files


def _gguf_variant(keys: Keys) -> Architecture | None:
    """Return the table row of Mistral or Mixtral if the file is one of these, else None.

    GGUF files of both also have the architecture llama, but have a sliding window (Mistral) or
    experts (Mixtral).
    """
    if keys.get("expert_count"):
        return mistral.GGUF_MIXTRAL
    return mistral.GGUF_MISTRAL if keys.get("attention.sliding_window") else None


GGUF = {
    "llama": Architecture(
        "LlamaForCausalLM", changes=PAIRS, may_have_experts=True, variant=_gguf_variant
    )
}
