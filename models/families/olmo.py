"""OLMo 2 and 3: a norm after each part, one over all query heads, and one over all key heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton.checkpoint.gguf.architecture import Architecture, Keys, Names
from baton.checkpoint.gguf.rope import DEFAULT_THETA, rope_scaling
from models.families.shared.gguf import layer_types, window
from models.family import GELU, Family
from models.model_fields import FULL, SLIDING, ModelFields
from models.recipe import LayerNorms, NormWeight, Recipe

_NORMS = LayerNorms(
    before_mixer=None,
    after_mixer="post_attention_layernorm",
    before_feed_forward=None,
    after_feed_forward="post_feedforward_layernorm",
)


def _recipe(model: ModelFields, windows: list[int | None], **options: Any) -> Recipe:
    """Return the recipe; layers with a window use the second rotary embedding, if there is one."""
    mixers = [
        model.attention(
            window=window,
            rotation=int(window is not None),
            qkv_bias=model.attention_bias,
            output_bias=model.attention_bias,
            qk_norm_of_all_heads=True,
            norm_weight=NormWeight.WIDE,
        )
        for window in windows
    ]
    norms = {"norms": _NORMS, "norm_weight": NormWeight.WIDE}
    return model.recipe(mixers, model.mlp(), **norms, **options)


def _olmo2(model: ModelFields) -> Recipe:
    return _recipe(model, [None] * model.num_layers)


def _olmo3(model: ModelFields) -> Recipe:
    return _recipe(model, model.windows_by_pattern(), ropes=(model.rope, model.sliding_rope))


# Team OLMo, arXiv:2501.00656.
Olmo2ForCausalLM = Family(recipe=_olmo2, activations=GELU)
Olmo3ForCausalLM = Family(
    recipe=_olmo3,
    defaults={
        "sliding_window": 4096,
        "rope_theta": 500_000.0,
        # Without rope_parameters, transformers applies rope_theta to full attention only.
        "rope_local_base_freq": 500_000.0,
    },
    activations=GELU,
    ropes_by_layer_type=True,
    sliding_window_pattern=4,
)


# ---------------------------------------------------------------------------- GGUF files


_GGUF_NAMES: Names = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def _gguf_variant(keys: Keys) -> Architecture | None:
    return _GGUF_OLMO3 if keys.get("attention.sliding_window") else None


def _gguf_of_3(keys: Keys) -> Mapping[str, Any]:
    """Return OLMo 3's fields of config.json: layers with a window have RoPE without scaling."""
    theta = {"rope_theta": keys.decimal("rope.freq_base", DEFAULT_THETA)}
    ropes = {
        FULL: {**(rope_scaling(keys) or {"rope_type": "default"}), **theta},
        SLIDING: {"rope_type": "default", **theta},
    }
    types = layer_types(keys, 4)
    return {**window(keys), "layer_types": types, "rope_parameters": ropes, "rope_scaling": None}


_GGUF_OLMO3 = Architecture("Olmo3ForCausalLM", _gguf_of_3, names=_GGUF_NAMES)
GGUF = {"olmo2": Architecture("Olmo2ForCausalLM", names=_GGUF_NAMES, variant=_gguf_variant)}
