"""CWM, the Code World Model: a Llama in which some layers have a sliding window."""

from __future__ import annotations

from baton.api.errors import ModelLoadError
from models.family import Family
from models.model_fields import FULL, SLIDING, ModelFields
from models.recipe import Recipe

# If config.json has no layer types, the first of every four layers has full attention.
_FULL_INTERVAL = 4


def _cwm(model: ModelFields) -> Recipe:
    if model.sliding_window is None:
        raise ModelLoadError("config.json: sliding_window: missing")
    types = model.layer_types or [
        SLIDING if index % _FULL_INTERVAL else FULL for index in range(model.num_layers)
    ]
    mixers = model.attention_layers(model.windows_by_type(types))
    return model.recipe(mixers, model.mlp(bias=model.mlp_bias))


# Copet et al., arXiv:2510.02387.
CwmForCausalLM = Family(
    recipe=_cwm,
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "sliding_window": 8192,
        "rope_theta": 1_000_000.0,
    },
    defaults_for_null={
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1_000_000.0,
            "factor": 16.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
)
