"""GGUF architectures with attention in every layer and without experts.

Knows no tensor's content.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton.checkpoint.gguf.architecture import (
    Architecture,
    Change,
    Keys,
    Names,
    partly_turning_heads,
)
from baton.checkpoint.gguf.rope import DEFAULT_THETA, original_length, rope_scaling

# The first Llama's layout: RoPE rotates adjacent rows of a head. Hugging Face stores the rows of a
# head's first half, then of its second.
PAIRS = {"attn_q": (Change.QUERY_HALVES,), "attn_k": (Change.KEY_HALVES,)}
_LESS_ONE = (Change.LESS_ONE,)
_SLIDING, _FULL = "sliding_attention", "full_attention"
# Layer counts of the Gemma sizes that scale queries differently, as in llama.cpp.
_GEMMA2_27B, _GEMMA3_27B = 46, 62
_GEMMA3_LOCAL_THETA = 10_000.0
_SMOLLM3_INTERVAL = 4  # one layer of this many has no RoPE


def _window(keys: Keys) -> Mapping[str, Any]:
    return {"sliding_window": keys.integer("attention.sliding_window", 0, minimum=0) or None}


def layer_types(keys: Keys, interval: int) -> list[str]:
    """Return each layer's kind: sliding window or full attention.

    Args:
        keys: the file's metadata.
        interval: by default one layer of this many has full attention.

    Raises:
        ModelLoadError: the pattern is neither a number nor a list with one value per layer.
    """
    layers, name = range(keys.num_layers()), "attention.sliding_window_pattern"
    pattern = keys.get(name, interval)
    if isinstance(pattern, list):
        if len(pattern) < len(layers):
            raise keys.wrong(name, f"{len(pattern)} entries for {len(layers)} layers")
        return [_SLIDING if pattern[layer] else _FULL for layer in layers]
    interval = keys.integer(name, interval)
    return [_SLIDING if (layer + 1) % interval else _FULL for layer in layers]


def _gemma(keys: Keys, unlike_others: int) -> Mapping[str, Any]:
    """Return the fields that Gemma 2 and 3 share."""
    heads, length = keys.integer("attention.head_count"), keys.integer("attention.key_length", 256)
    scalar: float = length
    if keys.num_layers() == unlike_others:
        scalar = keys.integer("embedding_length") / heads
    if keys.get("attention.scale") is not None:
        scalar = keys.number("attention.scale") ** -2
    found: dict[str, Any] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "final_logit_softcapping": None,
    }
    if keys.get("final_logit_softcapping") is not None:
        found["final_logit_softcapping"] = keys.decimal("final_logit_softcapping")
    return found


def _gemma2(keys: Keys) -> Mapping[str, Any]:
    return {
        **_gemma(keys, _GEMMA2_27B),
        "attn_logit_softcapping": keys.decimal("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.decimal("final_logit_softcapping", 30.0),
        "layer_types": layer_types(keys, 2),
        "sliding_window": keys.integer("attention.sliding_window", 4096),
    }


def _gemma3(keys: Keys) -> Mapping[str, Any]:
    found = {**_gemma(keys, _GEMMA3_27B), **_window(keys)}
    types = layer_types(keys, 6) if found["sliding_window"] else [_FULL] * keys.num_layers()
    theta = keys.number("rope.freq_base_swa", _GEMMA3_LOCAL_THETA)
    return {**found, "layer_types": types, "rope_local_base_freq": theta}


_GEMMA_NORMS: Names = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA_CHANGES = dict.fromkeys(
    ("attn_norm", "attn_q_norm", "attn_k_norm", *_GEMMA_NORMS, "output_norm"), _LESS_ONE
)


def granite_scales(keys: Keys) -> Mapping[str, Any]:
    """Return the multipliers of Granite's models."""
    return {
        "embedding_multiplier": keys.decimal("embedding_scale", 1.0),
        "residual_multiplier": keys.decimal("residual_scale", 1.0),
        "attention_multiplier": keys.decimal("attention.scale", 1.0),
        "logits_scaling": keys.decimal("logit_scale", 1.0),
    }


def _olmo(keys: Keys) -> Architecture | None:
    return _OLMO3 if keys.get("attention.sliding_window") else None


def _olmo3(keys: Keys) -> Mapping[str, Any]:
    """Return OLMo 3's fields; its sliding-window layers use the same RoPE base, unscaled."""
    theta = {"rope_theta": keys.decimal("rope.freq_base", DEFAULT_THETA)}
    ropes = {
        _FULL: {**(rope_scaling(keys) or {"rope_type": "default"}), **theta},
        _SLIDING: {"rope_type": "default", **theta},
    }
    types = layer_types(keys, 4)
    return {**_window(keys), "layer_types": types, "rope_parameters": ropes, "rope_scaling": None}


def _phi3(keys: Keys) -> Mapping[str, Any]:
    return {**_window(keys), "original_max_position_embeddings": original_length(keys)}


def _qwen2(keys: Keys) -> Mapping[str, Any]:
    return {"attention_bias": False}  # queries, keys and values always have a bias


def _seed_oss(keys: Keys) -> Mapping[str, Any]:
    return {"attention_out_bias": keys.has("attn_output.bias")}


def _smollm3(keys: Keys) -> Mapping[str, Any]:
    layers = range(keys.num_layers())
    return {"no_rope_layers": [int((layer + 1) % _SMOLLM3_INTERVAL != 0) for layer in layers]}


def _mistral3(keys: Keys) -> Mapping[str, Any]:
    name = "attention.temperature_scale"
    if keys.get(name):
        raise keys.wrong(name, f"{keys.get(name)} is not supported; supported: 0")
    return _window(keys)


_OLMO_NAMES: Names = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_OLMO3 = Architecture("Olmo3ForCausalLM", _olmo3, names=_OLMO_NAMES)
MISTRAL = Architecture("MistralForCausalLM", _window, changes=PAIRS)

DENSE: Mapping[str, Architecture] = {
    "chatglm": Architecture(
        "GlmForCausalLM", heads=partly_turning_heads, names={"ffn_up": "mlp.gate_up_proj"}
    ),
    "gemma2": Architecture(
        "Gemma2ForCausalLM", _gemma2, names=_GEMMA_NORMS, changes=_GEMMA_CHANGES
    ),
    "gemma3": Architecture(
        "Gemma3ForCausalLM", _gemma3, names=_GEMMA_NORMS, changes=_GEMMA_CHANGES
    ),
    "glm4": Architecture(
        "Glm4ForCausalLM",
        heads=partly_turning_heads,
        names={
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
        },
    ),
    "granite": Architecture("GraniteForCausalLM", granite_scales, changes=PAIRS),
    "mistral3": Architecture("MistralForCausalLM", _mistral3, changes=PAIRS),
    "olmo2": Architecture("Olmo2ForCausalLM", names=_OLMO_NAMES, variant=_olmo),
    "phi3": Architecture(
        "Phi3ForCausalLM",
        _phi3,
        heads=partly_turning_heads,
        names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    ),
    "qwen2": Architecture("Qwen2ForCausalLM", _qwen2),
    "qwen3": Architecture("Qwen3ForCausalLM"),
    "seed_oss": Architecture(
        "SeedOssForCausalLM",
        _seed_oss,
        names={"post_attention_norm": "post_attention_layernorm"},
    ),
    "smollm3": Architecture("SmolLM3ForCausalLM", _smollm3, changes=PAIRS),
}
