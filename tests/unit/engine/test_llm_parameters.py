"""Unit tests of LLM with stop strings, logprobs and penalties: transformers is the reference."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.api.errors import InvalidRequestError
from baton.api.outputs import FinishReason
from baton.api.sampling_params import SamplingParams
from engine import LLM
from engine.sampling.logprobs import compute_logprobs
from tests.fakes.checkpoints.demo_model import DEMO_MODEL
from tests.fakes.engine.engine_parts import make_request
from tests.fakes.engine.sampling import sampling_input
from tests.numerics.tiny_models import hugging_face_logits, make_hugging_face_model, save

OPTIONS = {"block_size": 4, "num_blocks": 24, "max_num_batched_tokens": 64}
PROMPTS = [[3, 4, 5], [7], [10, 11, 12, 13, 14, 15, 16, 17, 18]]


@pytest.fixture(scope="module")
def theirs() -> Any:
    return make_hugging_face_model("Qwen3ForCausalLM", vocab_size=4096)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory, theirs: Any) -> LLM:
    """Engine with random weights and a real tokenizer."""
    folder = save(theirs, tmp_path_factory.mktemp("tiny"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / name, folder)
    return LLM(str(folder), **OPTIONS)


def greedy(**params: Any) -> SamplingParams:
    return SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, **params)


# ---------------------------------------------------------------- logprobs


def test_logprobs_are_those_of_transformers_whatever_penalties_do(llm: LLM, theirs: Any) -> None:
    params = greedy(logprobs=3, repetition_penalty=1.5, logit_bias=((9, 4.0),))
    for prompt, completion in zip(PROMPTS, llm.generate(PROMPTS, params), strict=True):
        logits = hugging_face_logits(theirs, [*prompt, *completion.token_ids])
        logprobs = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        assert len(completion.logprobs) == len(completion.token_ids) == 8
        for row, token_id, found in zip(
            logprobs, completion.token_ids, completion.logprobs, strict=True
        ):
            assert found.logprob == pytest.approx(float(row[token_id]), abs=1e-4)
            best = row.topk(3)
            assert [token for token, _ in found.top] == best.indices.tolist()
            assert [p for _, p in found.top] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_logprobs_change_no_token_and_come_only_to_those_who_ask(llm: LLM) -> None:
    asking, plain = SamplingParams(max_tokens=6, seed=1, logprobs=0), greedy()
    found = llm.generate([*PROMPTS, PROMPTS[0]], [plain, asking, plain, asking])
    assert [len(c.logprobs) for c in found] == [0, len(found[1].token_ids), 0, 6]
    assert all(one.top == () for c in found for one in c.logprobs)
    [silent] = llm.generate([PROMPTS[1]], SamplingParams(max_tokens=6, seed=1))
    assert silent.token_ids == found[1].token_ids


def test_logprobs_of_a_small_distribution_by_hand() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.2, 0.7]]).log()
    requests = [
        make_request("a", params=SamplingParams(logprobs=1)),
        make_request("b", params=SamplingParams(logprobs=20)),  # more than there are
    ]
    found = compute_logprobs(logits, sampling_input(requests), [1, 2])
    (of_a,), (of_b,) = found["a"], found["b"]
    assert of_a.logprob == pytest.approx(math.log(0.25))
    [(best_id, best)] = of_a.top
    assert best_id == 0
    assert best == pytest.approx(math.log(0.5))
    assert [token_id for token_id, _ in of_b.top] == [2, 1, 0]


def test_logprobs_come_with_the_stream_too(llm: LLM) -> None:
    params = greedy(logprobs=2)
    pieces = list(llm.stream(PROMPTS[0], params))
    [whole] = llm.generate([PROMPTS[0]], params)
    assert tuple(one for piece in pieces for one in piece.logprobs) == whole.logprobs


# ---------------------------------------------------------------- stop strings


@pytest.mark.parametrize("num_chars", [1, 3, 9])
def test_a_stop_string_ends_the_output_before_it_and_frees_its_blocks(
    llm: LLM, num_chars: int
) -> None:
    whole = llm.generate(PROMPTS, greedy())
    for prompt, plain in zip(PROMPTS, whole, strict=True):
        stop = plain.text[len(plain.text) // 3 :][:num_chars]
        [cut] = llm.generate([prompt], greedy(stop=(stop,)))
        assert cut.text == plain.text[: plain.text.index(stop)]
        assert cut.finish_reason is FinishReason.STOP
        assert cut.token_ids == plain.token_ids[: len(cut.token_ids)]
        assert llm.tokenizer is not None
        assert stop not in llm.tokenizer.decode(cut.token_ids[:-1])
        pieces = list(llm.stream(prompt, greedy(stop=(stop,))))
        assert "".join(piece.text for piece in pieces) == cut.text
        assert pieces[-1].finish_reason is FinishReason.STOP
    assert llm.engine.requests == {}


def test_others_go_on_when_one_is_stopped(llm: LLM) -> None:
    plain = llm.generate(PROMPTS, greedy())
    stop = plain[1].text[:2]
    found = llm.generate(PROMPTS, [greedy(), greedy(stop=(stop,)), greedy()])
    assert (found[1].text, found[1].finish_reason) == ("", FinishReason.STOP)
    assert [found[0].token_ids, found[2].token_ids] == [plain[0].token_ids, plain[2].token_ids]


def test_a_stop_string_that_never_comes_changes_nothing(llm: LLM) -> None:
    plain = llm.generate(PROMPTS, greedy())
    found = llm.generate(PROMPTS, greedy(stop=("\N{SNOWMAN}" * 3, plain[0].text + "x")))
    assert [c.text for c in found] == [c.text for c in plain]
    assert {c.finish_reason for c in found} == {FinishReason.LENGTH}


def test_streams_side_by_side_and_a_generate_between_do_not_take_each_others_tokens(
    llm: LLM,
) -> None:
    plain = llm.generate(PROMPTS, greedy())
    first, second = llm.stream(PROMPTS[0], greedy()), llm.stream(PROMPTS[1], greedy())
    pieces = [[next(first)], [next(second)]]
    assert llm.generate([PROMPTS[2]], greedy())[0].token_ids == plain[2].token_ids
    pieces[1] += second
    pieces[0] += first
    for found, expected in zip(pieces, plain, strict=False):
        assert tuple(t for piece in found for t in piece.token_ids) == expected.token_ids
        assert "".join(piece.text for piece in found) == expected.text


# ---------------------------------------------------------------- other parameters


def test_a_preempted_request_gets_the_tokens_it_gets_alone(llm: LLM, tmp_path: Path) -> None:
    """Penalties depend on prompt and output, and a preemption changes neither."""
    params = SamplingParams(
        max_tokens=12,
        seed=4,
        ignore_eos=True,
        repetition_penalty=1.3,
        frequency_penalty=0.5,
        min_p=0.01,
        logprobs=1,
    )
    alone = [llm.generate([prompt], params)[0] for prompt in PROMPTS]
    theirs = make_hugging_face_model("Qwen3ForCausalLM", vocab_size=4096)
    small = LLM(
        str(save(theirs, tmp_path)), block_size=2, num_blocks=13, max_model_len=24,
        max_num_requests=3, max_num_batched_tokens=5, long_prefill_token_threshold=3,
    )  # fmt: skip
    found = small.generate(PROMPTS, params)
    assert small.engine._scheduler.num_preemptions > 0
    assert [c.token_ids for c in found] == [c.token_ids for c in alone]
    for mine, other in zip(found, alone, strict=True):
        assert [one.logprob for one in mine.logprobs] == pytest.approx(
            [one.logprob for one in other.logprobs], abs=1e-4
        )


def test_min_tokens_holds_back_the_end(llm: LLM) -> None:
    [plain] = llm.generate([PROMPTS[0]], greedy())
    stop = (plain.token_ids[2],)
    assert len(llm.generate([PROMPTS[0]], greedy(stop_token_ids=stop))[0].token_ids) <= 3
    [held] = llm.generate([PROMPTS[0]], greedy(stop_token_ids=stop, min_tokens=6))
    assert len(held.token_ids) >= 6
    assert stop[0] not in held.token_ids[:6]


def test_only_allowed_tokens_come(llm: LLM) -> None:
    params = SamplingParams(
        max_tokens=20, seed=2, ignore_eos=True, allowed_token_ids=(50, 60, 70),
        banned_token_ids=(60,),
    )  # fmt: skip
    [found] = llm.generate([PROMPTS[0]], params)
    assert set(found.token_ids) == {50, 70}


@pytest.mark.parametrize("field", ["allowed_token_ids", "banned_token_ids", "stop_token_ids"])
def test_a_token_id_outside_the_vocabulary_is_refused(llm: LLM, field: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{field}: .* 0 to 4095 .* got 4096$"):
        llm.generate(PROMPTS, SamplingParams(**{field: (4096,)}))  # type: ignore[arg-type]  # lists of token ids


def test_stop_strings_need_a_tokenizer(tmp_path: Path) -> None:
    bare = LLM(str(save(make_hugging_face_model("Qwen3ForCausalLM"), tmp_path)), **OPTIONS)
    with pytest.raises(InvalidRequestError, match=r"^stop: .* no tokenizer\.json$"):
        bare.generate(PROMPTS, SamplingParams(stop=("a",)))
