"""The rows of Gemma 4; see family_checkpoints.py.

Refuses to know: what is asserted.
"""

from __future__ import annotations

from typing import Any

from tests.numerics.family import Family

_KINDS = {"s": "sliding_attention", "f": "full_attention"}


def gemma4_layers(pattern: str, **values: Any) -> dict[str, Any]:
    """A layer per letter: s has a window, f full attention with larger heads."""
    return {
        "num_hidden_layers": len(pattern),
        "layer_types": [_KINDS[letter] for letter in pattern],
        "sliding_window": 12,
        "vocab_size_per_layer_input": 61,
        "hidden_size_per_layer_input": 0,
        "global_head_dim": 16,
        **values,
    }


# As in the small models (E2B, E4B).
_SMALL: dict[str, Any] = {
    "hidden_size_per_layer_input": 6,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
}
# As in the large models (31B, 26B-A4B), of which one has experts.
_LARGE: dict[str, Any] = {
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "final_logit_softcapping": 4.0,
    "use_bidirectional_attention": "vision",
}
_EXPERTS: dict[str, Any] = {
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 3,
    "moe_intermediate_size": 32,
}
_REFUSED = {
    "use_bidirectional_attention": "all",
    "vocab_size_per_layer_input": 62,
    "hidden_size_per_layer_input": -1,
    "num_kv_shared_layers": 8,
    "per_layer_config": {"0": {"head_dim": 4}},
    "attn_logit_softcapping": 5.0,
}
GEMMA4: dict[str, Family] = {
    "Gemma4ForCausalLM": Family(
        {
            "plain": gemma4_layers("sf", initializer_range=0.1),
            "per-layer embeddings, shared keys and values": gemma4_layers(
                "sfssf", **_SMALL, initializer_range=0.1
            ),
            "keys as values": gemma4_layers("ssfsf", **_LARGE, initializer_range=0.1),
            # The second of two stages has all layers that share keys and values.
            "experts, and all of the others": gemma4_layers(
                *("sfssfsfsf",),
                **(_SMALL | _LARGE | _EXPERTS),
                attention_bias=True,
                initializer_range=0.5,
            ),
        },
        {**_REFUSED, "top_k_experts": 0},
    ),
    "Gemma4ForConditionalGeneration": Family(
        {
            "per-layer embeddings, shared keys and values": gemma4_layers(
                "sfsfsfsf", **_SMALL, tie_word_embeddings=True, initializer_range=0.1
            ),
        },
        _REFUSED,
    ),
}
