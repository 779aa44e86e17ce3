"""Prompt logprobs: transformers is the reference, however the prompt is cut, cached or repeated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import engine.sampling.logprobs
from baton.api.outputs import Completion
from baton.api.sampling_params import SamplingParams
from engine import LLM
from tests.numerics.tiny_models import hugging_face_logits, make_hugging_face_model, save

VOCAB_SIZE = 61
PROMPTS = [[3], [7, 8], [(7 * i + 5) % VOCAB_SIZE for i in range(23)], [5] * 40, list(range(50))]


@pytest.fixture(scope="module")
def theirs() -> Any:
    return make_hugging_face_model("Qwen3ForCausalLM", vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, theirs: Any) -> Path:
    return save(theirs, tmp_path_factory.mktemp("tiny"))


def asking(num_top: int = 3, **params: Any) -> SamplingParams:
    given = {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True, **params}
    return SamplingParams(prompt_logprobs=num_top, **given)


def assert_right(found: Completion, prompt: list[int], theirs: Any, num_top: int = 3) -> None:
    """One per prompt token, the first None, the others as transformers has them."""
    expected = hugging_face_logits(theirs, prompt).log_softmax(-1)[:-1]
    assert len(found.prompt_logprobs) == len(prompt)
    assert found.prompt_logprobs[0] is None
    for one, row, token_id in zip(found.prompt_logprobs[1:], expected, prompt[1:], strict=True):
        assert one is not None
        assert one.logprob == pytest.approx(float(row[token_id]), abs=1e-4)
        best = row.topk(num_top)
        tokens, found_best = [token for token, _ in one.top], [p for _, p in one.top]
        # Of equal ones, as where an embedding is zero, `topk` takes any.
        is_tied = bool((row == row.topk(num_top + 1).values[-1]).sum() > 1)
        assert tokens == best.indices.tolist() or is_tied
        assert found_best == pytest.approx(best.values.tolist(), abs=1e-4)
        assert found_best == pytest.approx(row[tokens].tolist(), abs=1e-4)


@pytest.mark.parametrize("max_chunk", [1, 7, 64, 4096])
def test_prompt_logprobs_are_those_of_transformers_for_every_chunk_size(
    folder: Path, theirs: Any, max_chunk: int
) -> None:
    llm = LLM(
        str(folder), block_size=4, num_blocks=64, max_num_batched_tokens=max(max_chunk, 8),
        long_prefill_token_threshold=max_chunk, max_num_requests=8,
    )  # fmt: skip
    for prompt, found in zip(PROMPTS, llm.generate(PROMPTS, asking()), strict=True):
        assert_right(found, prompt, theirs)


@pytest.mark.parametrize("max_rows", [1, 5])
def test_slices_of_a_chunk_give_what_the_whole_gives(
    folder: Path, theirs: Any, max_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.sampling.logprobs, "MAX_PROMPT_ROWS", max_rows)
    llm = LLM(str(folder), block_size=4, num_blocks=64)
    for prompt, found in zip(PROMPTS, llm.generate(PROMPTS, asking(0)), strict=True):
        assert_right(found, prompt, theirs, 0)


def test_a_warm_prefix_cache_does_not_shorten_them_and_is_left_warm(
    folder: Path, theirs: Any
) -> None:
    llm = LLM(str(folder), block_size=4, num_blocks=64)
    llm.generate(PROMPTS, SamplingParams(max_tokens=1))
    for prompt, found in zip(PROMPTS, llm.generate(PROMPTS, asking()), strict=True):
        assert_right(found, prompt, theirs)
    request = llm._make_choices(PROMPTS[-1], SamplingParams(max_tokens=1))[0]
    llm.engine.add_request(request)
    while llm.engine.has_work:
        llm._step()
    assert request.num_hit_tokens == 48


def test_preemption_neither_loses_nor_repeats_any(folder: Path, theirs: Any) -> None:
    prompts = [[(9 * i + j) % VOCAB_SIZE for i in range(12)] for j in range(3)]
    llm = LLM(
        str(folder), block_size=2, num_blocks=20, max_model_len=24, max_num_requests=3,
        max_num_batched_tokens=5, long_prefill_token_threshold=3,
    )  # fmt: skip
    for prompt, found in zip(prompts, llm.generate(prompts, asking(max_tokens=10)), strict=True):
        assert_right(found, prompt, theirs)
    assert llm.engine._scheduler.num_preemptions > 0


def test_preemption_in_the_middle_of_a_prompt_begins_anew(folder: Path, theirs: Any) -> None:
    llm = LLM(
        str(folder), block_size=4, num_blocks=64, max_num_batched_tokens=8,
        long_prefill_token_threshold=7, max_num_requests=8,
    )  # fmt: skip
    prompt = PROMPTS[-1]
    request = llm._make_choices(prompt, asking())[0]
    answer = llm._begin([request])[0]
    for _ in range(3):
        llm._step()
    assert len(request.prompt_logprobs) == 21
    scheduler = llm.engine._scheduler
    scheduler._running.remove(request)
    scheduler._preempt(request)
    llm._step()
    assert len(request.prompt_logprobs) == 7
    while llm.engine.has_work:
        llm._step()
    assert_right(answer.completion(), prompt, theirs)


def test_they_come_once_with_the_first_piece_and_only_to_those_who_ask(
    folder: Path, theirs: Any
) -> None:
    llm = LLM(str(folder), block_size=4, num_blocks=64)
    pieces = list(llm.stream(PROMPTS[2], asking(max_tokens=5)))
    assert [bool(piece.prompt_logprobs) for piece in pieces] == [True, False, False, False, False]
    plain, found = llm.generate(
        [PROMPTS[2]] * 2, [SamplingParams(max_tokens=5, temperature=0, ignore_eos=True), asking()]
    )
    assert plain.prompt_logprobs == ()
    assert found.token_ids == plain.token_ids[:4]
    assert_right(found, PROMPTS[2], theirs)
