"""What a config.json of Gemma 4 says about the heads of layers with full attention."""

from __future__ import annotations

from typing import Any

import pytest

from models.config import ModelConfig
from models.recipe import AttentionSpec

CONFIG = {
    "architectures": ["Gemma4ForCausalLM"],
    "vocab_size": 61,
    "vocab_size_per_layer_input": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "layer_types": ["sliding_attention", "full_attention"],
}


@pytest.mark.parametrize(
    ("fields", "head_dim"),
    [
        ({}, 512),
        ({"global_head_dim": 16}, 16),
        ({"per_layer_config": {"1": {"head_dim": 4}}, "global_head_dim": 16}, 4),
        # transformers adds the larger heads only if the file does not have the field at all.
        ({"per_layer_config": {}}, 8),
        ({"per_layer_config": None}, 8),
    ],
)
def test_heads_of_layers_with_full_attention(fields: dict[str, Any], head_dim: int) -> None:
    mixers = [layer.mixer for layer in ModelConfig.from_dict(CONFIG | fields).layers]
    sizes = [mixer.head_dim for mixer in mixers if isinstance(mixer, AttentionSpec)]
    assert sizes == [8, head_dim]
