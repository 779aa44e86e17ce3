"""The split system equals one process where weights are integers, made or brought."""

from __future__ import annotations

import argparse
from pathlib import Path

import gguf
import pytest

from baton import SamplingParams
from engine import LLM
from tests.fakes.checkpoints.gguf_files import write_model
from tests.fakes.processes.deployments import complete_all, split_deployment
from tests.numerics.tiny_models import make_hugging_face_model

pytestmark = [pytest.mark.large, pytest.mark.nixl, pytest.mark.timeout(300)]

PARAMS = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True, logprobs=2)


def check(model: str, weights: str, prompts: list[list[int]]) -> None:
    alone = LLM(model, dtype="float32", weights=weights, num_threads=1).generate(prompts, PARAMS)
    with split_deployment(model, "--weights", weights) as running:
        split = complete_all(running, prompts, PARAMS)
    assert [one.token_ids for one in split] == [one.token_ids for one in alone]
    for mine, theirs in zip(split, alone, strict=True):
        assert mine.receipt is not None
        assert mine.receipt.decode is not None
        for ours, other in zip(mine.logprobs, theirs.logprobs, strict=True):
            assert ours.logprob == pytest.approx(other.logprob, abs=1e-5)


def test_weights_that_are_made_integers(demo_model: Path) -> None:
    tokenizer = LLM(str(demo_model), dtype="float32").tokenizer
    assert tokenizer is not None
    token_ids = tokenizer.encode(Path(argparse.__file__).read_text(encoding="utf-8"))
    check(str(demo_model), "int4", [token_ids[37 * k : 37 * k + 1 + 60 * k] for k in range(8)])


def test_a_gguf_file_of_integers(tmp_path: Path) -> None:
    shape = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
    model = make_hugging_face_model("Qwen3ForCausalLM", **shape)
    path = write_model(tmp_path / "model.gguf", model, gguf.GGMLQuantizationType.Q4_0)
    check(str(path), "auto", [[(7 * k + i) % 60 + 2 for i in range(1 + 5 * k)] for k in range(8)])
