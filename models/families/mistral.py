"""Mistral: a Llama without biases, in which all or some layers may have a sliding window.

Ministral 8B's ``layer_types`` tells which layers have a window. Mixtral also has experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton.checkpoint.gguf.architecture import Architecture, Keys
from models.families.shared.experts import checked
from models.families.shared.gguf import PAIRS, window
from models.family import GELU, Family, TextPart
from models.fields import MAX_PARTS
from models.model_fields import ModelFields
from models.recipe import ExpertsSpec, Recipe
from models.vision.specs import read_llava, read_pixtral

_DEFAULTS = {"num_key_value_heads": 8, "sliding_window": 4096}
_MIXTRAL_NAMES = {
    ".mlp.": ".block_sparse_moe.",
    ".gate_proj.": ".w1.",
    ".down_proj.": ".w2.",
    ".up_proj.": ".w3.",
}


def _windowed(model: ModelFields) -> list[int | None]:
    return [model.sliding_window] * model.num_layers


def _mistral(model: ModelFields) -> Recipe:
    return model.recipe(model.attention_layers(_windowed(model)), model.mlp())


def _ministral(model: ModelFields) -> Recipe:
    windows = _windowed(model)
    if model.layer_types is not None:
        windows = model.windows_by_type(model.layer_types)
    return model.recipe(model.attention_layers(windows), model.mlp())


def _mixtral(model: ModelFields) -> Recipe:
    fields = model.fields
    experts = ExpertsSpec(
        num_experts=fields.integer("num_local_experts", maximum=MAX_PARTS),
        inner_size=model.intermediate_size,
        top_k=fields.integer("num_experts_per_tok"),
        normalize=True,
    )
    return model.recipe(
        model.attention_layers(_windowed(model)),
        checked(fields, experts),
        stored_names=_MIXTRAL_NAMES,
    )


# Jiang et al., arXiv:2310.06825.
MistralForCausalLM = Family(recipe=_mistral, defaults=_DEFAULTS, activations=GELU)
MinistralForCausalLM = Family(recipe=_ministral, defaults=_DEFAULTS)
Mistral3ForConditionalGeneration = TextPart(
    by_type={"mistral": "MistralForCausalLM"}, vision=read_pixtral
)
# Pixtral's files have this architecture. The vision encoders of other LLaVAs are not supported.
LlavaForConditionalGeneration = TextPart(
    by_type={"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}, vision=read_llava
)
# Jiang et al., arXiv:2401.04088.
MixtralForCausalLM = Family(
    recipe=_mixtral, defaults={"num_key_value_heads": 8, "rope_theta": 1_000_000.0}
)


# ---------------------------------------------------------------------------- GGUF files


def _gguf_of_3(keys: Keys) -> Mapping[str, Any]:
    name = "attention.temperature_scale"
    if keys.get(name):
        raise keys.wrong(name, f"{keys.get(name)} is not supported; supported: 0")
    return window(keys)


def _gguf_of_mixtral(keys: Keys) -> Mapping[str, Any]:
    if keys.get("expert_shared_count"):
        raise keys.wrong("expert_shared_count", "shared experts are not supported")
    window = keys.integer("attention.sliding_window", 0, minimum=0)
    return {
        "num_local_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "sliding_window": window or None,
    }


# GGUF files of the first Mistral and of Mixtral name their architecture llama; llama.py recognizes
# them.
GGUF_MISTRAL = Architecture("MistralForCausalLM", window, changes=PAIRS)
GGUF_MIXTRAL = Architecture(
    "MixtralForCausalLM",
    _gguf_of_mixtral,
    names={
        "ffn_gate_inp": "block_sparse_moe.gate",
        "ffn_gate_exps": "block_sparse_moe.experts.{expert}.w1",
        "ffn_up_exps": "block_sparse_moe.experts.{expert}.w3",
        "ffn_down_exps": "block_sparse_moe.experts.{expert}.w2",
    },
    changes=PAIRS,
)
GGUF = {"mistral3": Architecture("MistralForCausalLM", _gguf_of_3, changes=PAIRS)}
