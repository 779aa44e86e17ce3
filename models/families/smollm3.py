"""SmolLM3: a Llama in which some layers lack RoPE (Yang et al., arXiv:2501.18795)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton.checkpoint.gguf.architecture import Architecture, Keys
from models.families.shared.gguf import PAIRS
from models.family import GELU, Family
from models.fields import Fields
from models.model_fields import ModelFields
from models.recipe import Recipe
from models.rope_config import NO_ROPE

_INTERVAL = 4  # without a list, every fourth layer has no RoPE


def _smollm3(model: ModelFields) -> Recipe:
    fields, bias = model.fields, model.attention_bias
    interval = fields.integer("no_rope_layer_interval", _INTERVAL)
    turning = _no_rope_layers(fields, model.num_layers) or tuple(
        int((index + 1) % interval != 0) for index in range(model.num_layers)
    )
    windows = model.windows_if_switched_on()
    if model.layer_types is None and model.use_sliding_window:
        windows = [None if turns else model.sliding_window for turns in turning]
    mixers = [
        model.attention(window=window, rotation=1 - turns, qkv_bias=bias, output_bias=bias)
        for window, turns in zip(windows, turning, strict=True)
    ]
    return model.recipe(mixers, model.mlp(bias=model.mlp_bias), ropes=(model.rope, NO_ROPE))


def _no_rope_layers(fields: Fields, num_layers: int) -> tuple[int, ...] | None:
    """Return the file's list: 0 for a layer without RoPE, else 1; None: there is no list."""
    if not fields.has("no_rope_layers"):
        return None
    values = fields.get("no_rope_layers")
    if not isinstance(values, list) or not all(value in (0, 1) for value in values):
        raise fields.wrong("no_rope_layers", "expected a list of 0 and 1")
    if len(values) < num_layers:
        raise fields.wrong("no_rope_layers", f"{len(values)} entries for {num_layers} layers")
    return tuple(values[:num_layers])


SmolLM3ForCausalLM = Family(
    recipe=_smollm3,
    defaults={
        "tie_word_embeddings": True,
        "num_key_value_heads": 4,
        "rope_theta": 2_000_000.0,
    },
    reads=frozenset({"no_rope_layers"}),
    activations=GELU,
)


# ---------------------------------------------------------------------------- GGUF files


def _gguf(keys: Keys) -> Mapping[str, Any]:
    layers = range(keys.num_layers())
    return {"no_rope_layers": [int((layer + 1) % _INTERVAL != 0) for layer in layers]}


GGUF = {"smollm3": Architecture("SmolLM3ForCausalLM", _gguf, changes=PAIRS)}
