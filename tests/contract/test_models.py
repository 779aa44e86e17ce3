"""Contract of models of Llama's kind: in float32, each option computes what transformers computes.

Every registered architecture is in tests/numerics/test_families.py, with the engine around it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from baton_kernels.attention import ATTENTION_BACKENDS
from models import load_model
from tests.numerics.paged import make_cache, make_context, make_metadata, make_tables
from tests.numerics.tiny_models import (
    hugging_face_logits,
    make_hugging_face_model,
    paged_logits,
    save,
)

TOKENS = [(7 * i * i + 3 * i + 5) % 61 for i in range(23)]
LONG_TOKENS = [(5 * i * i + i + 2) % 61 for i in range(50)]
PAIRS = 4  # head_dim 8
LONGROPE = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 24,
    "factor": 2.0,
    "short_factor": [1.0, 1.1, 1.3, 1.5],
    "long_factor": [1.0, 2.0, 3.5, 5.0],
}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 5000.0},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "yarn, every option": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 3.0,
        "beta_slow": 0.5,
        "mscale": 0.7,
        "mscale_all_dim": 0.4,
        "truncate": False,
    },
    "yarn, attention factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "attention_factor": 1.25,
    },
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": 2.0},
}

# Their configs have all of the options here, or transformers ignores them.
LLAMA_LIKE = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
every_architecture = pytest.mark.parametrize("architecture", LLAMA_LIKE)


def check(folder: Path, theirs: Any, tokens: list[int], **load_options: Any) -> None:
    """The whole prompt and the prompt in chunks both equal transformers' one forward pass."""
    model = load_model(save(theirs, folder), **load_options)
    expected = hugging_face_logits(theirs, tokens)
    for chunks in ([len(tokens)], [5, 1, 9, 1, 1, len(tokens) - 17]):
        found = paged_logits(model, tokens, chunks)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4)
        assert torch.equal(found.argmax(-1), expected.argmax(-1))


@every_architecture
@pytest.mark.parametrize("tied", [False, True])
def test_equals_transformers(tmp_path: Path, architecture: str, tied: bool) -> None:
    check(tmp_path, make_hugging_face_model(architecture, tie_word_embeddings=tied), TOKENS)


@every_architecture
def test_token_by_token_equals_transformers(tmp_path: Path, architecture: str) -> None:
    theirs = make_hugging_face_model(architecture)
    model = load_model(save(theirs, tmp_path))
    found = paged_logits(model, TOKENS, [1] * len(TOKENS))
    torch.testing.assert_close(found, hugging_face_logits(theirs, TOKENS), rtol=2e-4, atol=2e-4)


@every_architecture
def test_equals_transformers_with_every_bias(tmp_path: Path, architecture: str) -> None:
    check(
        tmp_path,
        make_hugging_face_model(architecture, attention_bias=True, mlp_bias=True),
        TOKENS,
    )


@every_architecture
@pytest.mark.parametrize("num_kv_heads", [1, 4])
def test_equals_transformers_with_other_head_ratios(
    tmp_path: Path, architecture: str, num_kv_heads: int
) -> None:
    theirs = make_hugging_face_model(architecture, num_key_value_heads=num_kv_heads)
    check(tmp_path, theirs, TOKENS)


@every_architecture
def test_equals_transformers_with_a_sliding_window(tmp_path: Path, architecture: str) -> None:
    theirs = make_hugging_face_model(
        architecture, sliding_window=6, use_sliding_window=True, max_window_layers=1
    )
    check(tmp_path, theirs, TOKENS)


@every_architecture
@pytest.mark.parametrize("rope", ROPES)
def test_equals_transformers_with_every_rope(tmp_path: Path, architecture: str, rope: str) -> None:
    theirs = make_hugging_face_model(
        architecture, rope_parameters={"rope_theta": 10_000.0, **ROPES[rope]}
    )
    check(tmp_path, theirs, LONG_TOKENS)


@every_architecture
def test_longrope_short_by_default_long_on_request(tmp_path: Path, architecture: str) -> None:
    theirs = make_hugging_face_model(
        architecture, rope_parameters={"rope_theta": 10_000.0, **LONGROPE}
    )
    check(tmp_path / "short", theirs, TOKENS)
    check(tmp_path / "long", theirs, LONG_TOKENS, max_model_len=64)


def test_a_sequence_that_rope_cannot_serve_is_stopped(tmp_path: Path) -> None:
    theirs = make_hugging_face_model(
        "LlamaForCausalLM", rope_parameters={"rope_theta": 10_000.0, **LONGROPE}
    )
    model = load_model(save(theirs, tmp_path))
    assert model.config.max_model_len == 24
    with pytest.raises(AssertionError, match="max_model_len is 24"):
        paged_logits(model, LONG_TOKENS)


@every_architecture
def test_backends_agree_and_the_hook_sees_each_layer_once(
    tmp_path: Path, architecture: str
) -> None:
    model = load_model(save(make_hugging_face_model(architecture), tmp_path))
    by_backend = []
    # Libraries need a GPU always, and Triton where its kernels are compiled; "sdpa" is "cpu".
    absent = {"flash_attn", "flashinfer", "sdpa", "triton_latents"}
    absent |= {name for name in ATTENTION_BACKENDS.names() if name.endswith("_triton")}
    absent |= {"triton"} if torch.cuda.is_available() else set()
    for name in [name for name in ATTENTION_BACKENDS.names() if name not in absent]:
        layers: list[int] = []
        by_backend.append(paged_logits(model, TOKENS, [20, 3], name, layers.append))
        assert layers == [0, 1, 0, 1]
    for logits in by_backend[1:]:
        torch.testing.assert_close(logits, by_backend[0])


@every_architecture
def test_requests_in_one_batch_equal_requests_alone(tmp_path: Path, architecture: str) -> None:
    """One step with two prompts, then one that decodes the first while the second goes on."""
    model = load_model(save(make_hugging_face_model(architecture), tmp_path))
    first, second = TOKENS[:10], LONG_TOKENS[:17]
    table = make_tables([10, 17], 4, num_blocks=12)
    cache = make_cache(12, 2, model.config.num_kv_heads, 4, model.config.head_dim)
    backend = ATTENTION_BACKENDS.load("cpu")()
    logits = []
    with torch.inference_mode():
        for query_lens, seq_lens in (([9, 8], [9, 8]), ([1, 9], [10, 17])):
            metadata = make_metadata(query_lens, seq_lens, table, 4, num_padding=2)
            backend.plan(metadata)
            spans = [slice(s - q, s) for q, s in zip(query_lens, seq_lens, strict=True)]
            tokens = first[spans[0]] + second[spans[1]] + [0, 0]
            positions = [*range(10)[spans[0]], *range(17)[spans[1]], 0, 0]
            context = make_context(torch.tensor(positions), metadata, backend, cache)
            hidden = model.forward(torch.tensor(tokens), context)
            logits.append(model.compute_logits(hidden).float())
    torch.testing.assert_close(logits[1][0], paged_logits(model, first)[-1])
    torch.testing.assert_close(logits[1][9], paged_logits(model, second)[-1])


@every_architecture
def test_bfloat16_stays_close_to_transformers_in_bfloat16(
    tmp_path: Path, architecture: str
) -> None:
    # All experts: a rounded logit may choose another.
    theirs = make_hugging_face_model(architecture, num_experts_per_tok=4).bfloat16()
    model = load_model(save(theirs, tmp_path))  # dtype: the checkpoint's own
    found, expected = paged_logits(model, TOKENS), hugging_face_logits(theirs, TOKENS).float()
    # Rounding noise relative to the spread of the logits.
    assert float((found - expected).std() / expected.std()) < 0.03
