"""Gemma 2 and 3: norms before and after each part, soft caps, sliding windows, and images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton.checkpoint.gguf.architecture import Architecture, Change, Keys, Names
from models.families.shared.gguf import layer_types, window
from models.family import GELU, Family, TextPart
from models.model_fields import FULL, ModelFields
from models.recipe import LayerNorms, NormWeight, Recipe
from models.vision.specs import read_gemma3

_READS = frozenset({"query_pre_attn_scalar", "final_logit_softcapping"})
_DEFAULTS: Mapping[str, object] = {
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_NORMS = LayerNorms(
    before_mixer="input_layernorm",
    after_mixer="post_attention_layernorm",
    before_feed_forward="pre_feedforward_layernorm",
    after_feed_forward="post_feedforward_layernorm",
)


def _recipe(model: ModelFields, *, is_third: bool) -> Recipe:
    """Return the recipe of Gemma 2 or 3.

    Args:
        is_third: whether this is Gemma 3, which has norms of queries and keys, and in which the
            tokens of an image also attend to the image's later tokens (arXiv:2503.19786).
    """
    fields, bias, local = model.fields, model.attention_bias, model.sliding_rope
    scalar = fields.optional_number("query_pre_attn_scalar")
    mixers = [
        model.attention(
            window=window,
            rotation=int(local is not None and window is not None),
            qkv_bias=bias,
            output_bias=bias,
            qk_norm=is_third,
            norm_weight=NormWeight.OFFSET,
            scale=None if scalar is None else scalar**-0.5,
            soft_cap=fields.optional_number("attn_logit_softcapping"),
            whole_images=is_third,
        )
        for window in model.windows_by_pattern()
    ]
    return model.recipe(
        mixers,
        model.mlp(),
        ropes=(model.rope,) if local is None else (model.rope, local),
        norms=_NORMS,
        norm_weight=NormWeight.OFFSET,
        embedding_scale=model.hidden_size**0.5,
        logits_soft_cap=fields.optional_number("final_logit_softcapping"),
    )


def _gemma2(model: ModelFields) -> Recipe:
    return _recipe(model, is_third=False)


def _gemma3(model: ModelFields) -> Recipe:
    return _recipe(model, is_third=True)


# Gemma Team, arXiv:2408.00118.
Gemma2ForCausalLM = Family(
    recipe=_gemma2,
    defaults={**_DEFAULTS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    reads=_READS | {"attn_logit_softcapping"},
    activations=GELU,
    activation_field="hidden_activation",
    sliding_window_pattern=2,
)
# Gemma Team, arXiv:2503.19786.
Gemma3ForCausalLM = Family(
    recipe=_gemma3,
    defaults={
        **_DEFAULTS,
        "sliding_window_pattern": 6,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
    },
    reads=_READS | {"rope_local_base_freq"},
    activations=GELU,
    activation_field="hidden_activation",
    ropes_by_layer_type=True,
)
Gemma3ForConditionalGeneration = TextPart(
    "Gemma3ForCausalLM",
    defaults={
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131_072,
    },
    is_tied=True,
    vision=read_gemma3,
)


# ---------------------------------------------------------------------------- GGUF files


# The 27B models scale queries differently; as llama.cpp does, they are recognized by these numbers
# of layers.
_GEMMA2_27B, _GEMMA3_27B = 46, 62
_GEMMA3_LOCAL_THETA = 10_000.0
_GEMMA_NORMS: Names = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA_CHANGES = dict.fromkeys(
    ("attn_norm", "attn_q_norm", "attn_k_norm", *_GEMMA_NORMS, "output_norm"), (Change.LESS_ONE,)
)


def _gguf(keys: Keys, unlike_others: int) -> Mapping[str, Any]:
    """Return the config.json fields that Gemma 2 and 3 share.

    Args:
        keys: metadata of the GGUF file.
        unlike_others: number of layers of the model that scales queries differently.
    """
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


def _gguf_of_2(keys: Keys) -> Mapping[str, Any]:
    return {
        **_gguf(keys, _GEMMA2_27B),
        "attn_logit_softcapping": keys.decimal("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.decimal("final_logit_softcapping", 30.0),
        "layer_types": layer_types(keys, 2),
        "sliding_window": keys.integer("attention.sliding_window", 4096),
    }


def _gguf_of_3(keys: Keys) -> Mapping[str, Any]:
    found = {**_gguf(keys, _GEMMA3_27B), **window(keys)}
    types = layer_types(keys, 6) if found["sliding_window"] else [FULL] * keys.num_layers()
    theta = keys.number("rope.freq_base_swa", _GEMMA3_LOCAL_THETA)
    return {**found, "layer_types": types, "rope_local_base_freq": theta}


GGUF = {
    "gemma2": Architecture(
        "Gemma2ForCausalLM", _gguf_of_2, names=_GEMMA_NORMS, changes=_GEMMA_CHANGES
    ),
    "gemma3": Architecture(
        "Gemma3ForCausalLM", _gguf_of_3, names=_GEMMA_NORMS, changes=_GEMMA_CHANGES
    ),
}
