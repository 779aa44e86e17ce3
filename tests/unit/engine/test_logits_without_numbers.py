"""NaN logits end their own request with an error, and no other request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.api.errors import ModelLoadError
from baton.api.outputs import FinishReason
from baton.api.sampling_params import SamplingParams
from engine import LLM
from tests.fakes.handoff.handoff_cluster import Cluster
from tests.numerics.tiny_models import make_hugging_face_model, save

pytestmark = pytest.mark.medium

BROKEN = 7  # a token whose embedding is NaN
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "drawn": {"temperature": 1.0},
    "filtered": {"temperature": 0.8, "top_p": 0.9, "top_k": 20},
    "a biased choice": {"temperature": 0, "logit_bias": ((3, 1.0),)},
    "a penalty": {"temperature": 1.0, "presence_penalty": 0.5},
    "logprobs": {"temperature": 0, "logprobs": 2},
}
SPECULATION: dict[str, dict[str, Any]] = {
    "no drafts": {},
    "drafts": {"speculative_method": "ngram", "num_speculative_tokens": 3},
    "drafts by rejection": {
        "speculative_method": "ngram",
        "num_speculative_tokens": 3,
        "draft_acceptance": "rejection",
    },
}


def break_weights(folder: Path, name: str, rows: slice) -> Path:
    """Write NaN into some rows of a checkpoint's tensor."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    weights[name][rows] = torch.nan
    save_file(weights, path, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = make_hugging_face_model("LlamaForCausalLM", tie_word_embeddings=False)
    made = save(model, tmp_path_factory.mktemp("broken"))
    return break_weights(made, "model.embed_tokens.weight", slice(BROKEN, BROKEN + 1))


@pytest.mark.parametrize("speculation", SPECULATION)
@pytest.mark.parametrize("way", WAYS)
def test_a_request_without_numbers_ends_and_no_other(
    folder: Path, way: str, speculation: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: token 0 was the answer, as if nothing were wrong."""
    params = SamplingParams(max_tokens=8, seed=1, ignore_eos=True, **WAYS[way])
    good, bad = [5, 6, 5, 6, 5, 6], [5, 6, 5, 6, BROKEN]
    llm = LLM(str(folder), **SPECULATION[speculation])
    [alone] = llm.generate([good], params)
    first, broken, second = llm.generate([good, bad, good], params)
    assert first.token_ids == second.token_ids == alone.token_ids
    assert len(alone.token_ids) == 8
    assert (broken.finish_reason, tuple(broken.token_ids)) == (FinishReason.ABORT, ())
    assert "the model's logits are not numbers" in caplog.text


@pytest.mark.parametrize("name", ["model.norm.weight", "lm_head.weight"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_without_numbers_does_not_load(tmp_path: Path, name: str, dtype: str) -> None:
    model = make_hugging_face_model("LlamaForCausalLM", tie_word_embeddings=False)
    folder = break_weights(save(model, tmp_path), name, slice(None))
    with pytest.raises(ModelLoadError, match="its logits are not numbers"):
        LLM(str(folder), dtype=dtype)


def test_nodes_end_a_request_without_numbers_with_an_error(folder: Path) -> None:
    """The prefill node ends a request whose prompt gives NaN, else the decode node does."""
    params = SamplingParams(max_tokens=8, seed=1, temperature=0, ignore_eos=True)
    cluster = Cluster(folder, lambda _: torch.zeros(0), 40)
    cluster.place("bad", 1, [5, 6, BROKEN], params)
    cluster.place("alone", 1, [5, 6, BROKEN], params, alone=True)
    cluster.settle()
    for key, where in ((("bad", 1), "prefill: "), (("alone", 1), "")):
        attempt = cluster.attempts[key]
        assert attempt.error_code == "INTERNAL"
        assert attempt.error.startswith(f"{where}the model's logits are not numbers")
        assert not attempt.tokens
    assert not cluster.is_down
