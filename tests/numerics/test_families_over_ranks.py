"""Every architecture computes the same over several ranks, each of them a process of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from baton.api.outputs import TokenLogprobs
from baton.api.sampling_params import MAX_LOGPROBS, SamplingParams
from engine import LLM
from tests.numerics.family_checkpoints import (
    TinyCheckpoint,
    make_tiny_checkpoint,
    richest_variants,
)
from tests.numerics.test_families import MAX_DIFFERENCE, assert_right, make_llm


@pytest.fixture(scope="module", params=richest_variants(), ids=", ".join)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    architecture, variant = request.param
    return make_tiny_checkpoint(architecture, variant, tmp_path_factory.mktemp("model"))


# Ranks of a stage, and stages.
@pytest.fixture(params=[(2, 1), (4, 1), (1, 2), (2, 2)], ids=str)
def over_ranks(request: pytest.FixtureRequest, checkpoint: TinyCheckpoint) -> Iterator[LLM]:
    num_ranks, num_stages = request.param
    llm = make_llm(
        checkpoint,
        tensor_parallel_size=num_ranks,
        pipeline_parallel_size=num_stages,
        num_threads=1,
        long_prefill_token_threshold=16,
    )
    yield llm
    llm.engine.close()


@pytest.mark.large
@pytest.mark.lengthy
def test_every_architecture_over_ranks(over_ranks: LLM, checkpoint: TinyCheckpoint) -> None:
    """Logprobs of transformers within 1e-4, and its greedy tokens: alone, in batches, in chunks."""
    longest = checkpoint.examples[0]
    assert_right(over_ranks, [longest], len(longest.output))
    assert_right(over_ranks, [*checkpoint.examples, *checkpoint.short_examples])
    prompt = longest.later(20).prompt
    params = SamplingParams(
        max_tokens=1, temperature=0, prompt_logprobs=MAX_LOGPROBS, logprobs=MAX_LOGPROBS
    )
    [completion] = over_ranks.generate([prompt], params)
    expected = checkpoint.logits(prompt).double().log_softmax(-1)  # [num_tokens, vocab_size]
    found: list[TokenLogprobs | None] = [*completion.prompt_logprobs[1:], *completion.logprobs]
    for row, one in zip(expected, found, strict=True):
        assert one is not None
        for token_id, logprob in one.top:
            assert logprob == pytest.approx(float(row[token_id]), abs=MAX_DIFFERENCE)
