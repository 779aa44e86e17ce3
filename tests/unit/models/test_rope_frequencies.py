"""Unit tests of layers.rope_frequencies: the same bits as transformers' own functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from models.config import ModelConfig
from models.layers.rope_frequencies import rope_frequencies

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
CASES: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.7},
    {"rope_type": "yarn", "factor": 4.0, "truncate": False, "beta_fast": 20.0, "beta_slow": 2.0},
    {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192, **LLAMA3},
    {"rope_type": "llama3", "factor": 32.0, "original_max_position_embeddings": 8192, **LLAMA3},
    {"rope_type": "proportional", "partial_rotary_factor": 0.25, "factor": 2.0},
    {
        "rope_type": "longrope",
        "original_max_position_embeddings": 4096,
        "short_factor": [1.0 + 0.01 * i for i in range(64)],
        "long_factor": [1.0 + 0.5 * i for i in range(64)],
    },
]


@pytest.mark.filterwarnings("ignore:.*original_max_position_embeddings.*")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("length", [None, 100_000])
def test_equal_to_transformers(case: dict[str, Any], length: int | None) -> None:
    shape = {"hidden_size": 4096, "num_attention_heads": 32, "max_position_embeddings": 131072}
    rope = {"rope_theta": 500_000.0, **case}
    theirs, factor = ROPE_INIT_FUNCTIONS[case["rope_type"]](
        LlamaConfig(rope_parameters=dict(rope), **shape), torch.device("cpu"), seq_len=length
    )
    values = shape | {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 10,
        "intermediate_size": 10,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "rope_parameters": rope,
    }
    ours = ModelConfig.from_dict(values, max_model_len=length).rope
    assert torch.equal(rope_frequencies(ours, 128), theirs)
    assert ours.attention_factor == factor
