"""Unit tests of LLM and AsyncLLM: prompts and parameters in every form, any batch."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from baton.api.errors import ConfigError, InvalidRequestError, ModelLoadError
from baton.api.outputs import FinishReason
from baton.api.sampling_params import SamplingParams
from engine import LLM
from tests.fakes.checkpoints.demo_model import DEMO_MODEL
from tests.fakes.engine.fronts import FRONTS, Front, open_front
from tests.numerics.tiny_models import hugging_face_logits, make_hugging_face_model, save

GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
PROMPTS = [[3, 4, 5], [7], [10, 11, 12, 13, 14, 15, 16, 17, 18]]
OPTIONS = {"block_size": 4, "num_blocks": 24, "max_num_batched_tokens": 64}


@pytest.fixture(scope="module")
def theirs() -> object:
    return make_hugging_face_model("Qwen3ForCausalLM")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, theirs: object) -> str:
    return str(save(theirs, tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module", params=FRONTS)
def llm(request: pytest.FixtureRequest, folder: str) -> Iterator[Front]:
    with open_front(request.param, folder, **OPTIONS) as front:
        yield front


def test_greedy_tokens_are_those_of_transformers(llm: Front, theirs: object) -> None:
    for prompt, completion in zip(PROMPTS, llm.generate(PROMPTS, GREEDY), strict=True):
        token_ids = list(prompt)
        for _ in range(6):
            token_ids.append(int(hugging_face_logits(theirs, token_ids)[-1].argmax()))
        assert list(completion.token_ids) == token_ids[len(prompt) :]


def test_completions_come_in_the_order_of_their_prompts_and_equal_those_alone(llm: Front) -> None:
    together = llm.generate(PROMPTS, GREEDY)
    alone = [llm.generate([prompt], GREEDY)[0] for prompt in PROMPTS]
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]
    assert len({c.request_id for c in [*together, *alone]}) == 6


def test_one_list_of_token_ids_is_one_prompt(llm: Front) -> None:
    [completion] = llm.generate(PROMPTS[0], GREEDY)
    assert completion.token_ids == llm.generate([PROMPTS[0]], GREEDY)[0].token_ids


def test_no_prompt_gives_no_completion(llm: Front) -> None:
    assert llm.generate([]) == []


def test_each_prompt_may_have_its_own_parameters(llm: Front) -> None:
    params = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in (1, 4, 2)]
    found = llm.generate(PROMPTS, params)
    assert [len(c.token_ids) for c in found] == [1, 4, 2]
    assert {c.finish_reason for c in found} == {FinishReason.LENGTH}


def test_a_seed_gives_the_same_tokens_in_any_batch_and_none_gives_others(llm: Front) -> None:
    seeded = SamplingParams(max_tokens=12, temperature=2, seed=5, ignore_eos=True)
    free = SamplingParams(max_tokens=12, temperature=2, ignore_eos=True)
    prompt = PROMPTS[0]
    first, _, third = llm.generate([prompt, PROMPTS[2], prompt], [seeded, free, seeded])
    assert first.token_ids == third.token_ids == llm.generate([prompt], seeded)[0].token_ids
    assert len({llm.generate([prompt], free)[0].token_ids for _ in range(3)}) > 1


def test_an_output_ends_with_the_models_end_token_and_with_a_stop_token(llm: Front) -> None:
    plain = llm.generate([PROMPTS[2]], GREEDY)[0].token_ids
    stop = plain[2]
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, stop_token_ids=(stop,))
    [stopped] = llm.generate([PROMPTS[2]], params)
    assert stopped.token_ids == plain[: plain.index(stop) + 1]
    assert stopped.finish_reason is FinishReason.STOP
    seeded = SamplingParams(max_tokens=50, temperature=5, seed=3)
    [ended] = llm.generate([PROMPTS[1]], seeded)
    assert ended.finish_reason is FinishReason.STOP
    assert ended.token_ids[-1] in (1, 2)  # the config's eos_token_id
    assert not {1, 2} & set(ended.token_ids[:-1])


def test_too_little_memory_and_small_chunks_change_no_token(llm: Front, folder: str) -> None:
    small = LLM(
        folder,
        block_size=2,
        num_blocks=13,
        max_num_requests=3,
        max_num_batched_tokens=5,
        long_prefill_token_threshold=3,
    )
    params = SamplingParams(max_tokens=14, temperature=0.9, seed=1, ignore_eos=True)
    requests = [
        small._make_choices(prompt, params)[0] for prompt in PROMPTS
    ]  # to see that they were preempted
    for request in requests:
        small.engine.add_request(request)
    while small.engine.has_work:
        small.engine.step()
        small.engine.check()
    assert sum(request.num_preemptions for request in requests) > 0
    expected = llm.generate(PROMPTS, params)
    assert [tuple(r.output_token_ids) for r in requests] == [c.token_ids for c in expected]
    assert small.engine.block_pool.num_free == 13


def test_every_block_is_free_after_generate(llm: Front) -> None:
    llm.generate(PROMPTS, GREEDY)
    assert llm.engine.block_pool.num_free == OPTIONS["num_blocks"]
    assert llm.engine.requests == {}


def test_prompts_of_a_batch_are_not_cut_for_those_who_decode() -> None:
    llm = LLM(str(DEMO_MODEL), kv_cache_bytes=2**24)
    [first] = llm._make_choices([300, 301], SamplingParams(max_tokens=5, ignore_eos=True))
    llm.engine.add_request(first)
    llm.engine.step()
    [long] = llm._make_choices(list(range(300, 400)), SamplingParams(max_tokens=1))
    llm.engine.add_request(long)
    llm.engine.step()
    assert long.status.is_finished
    while llm.engine.has_work:
        llm.engine.step()


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        ([], "at least 1 token"),
        ([3] * 64, "is too long: 64 tokens > 63 maximum"),
        ([3, 61], "token ids must be 0 to 60"),
        ("text", r"no tokenizer\.json: give token ids"),
    ],
)
def test_a_bad_prompt_is_refused_and_nothing_was_run(
    llm: Front, prompt: list[int] | str, problem: str
) -> None:
    steps = llm.engine.num_steps
    with pytest.raises(InvalidRequestError, match=f"^prompt:? .*{problem}"):
        llm.generate([PROMPTS[0], prompt], GREEDY)
    assert llm.engine.num_steps == steps
    assert llm.engine.requests == {}


def test_parameters_must_be_one_or_as_many_as_the_prompts(llm: Front) -> None:
    with pytest.raises(InvalidRequestError, match=r"^sampling_params: must be one or 3 .* got 2$"):
        llm.generate(PROMPTS, [GREEDY, GREEDY])


def test_a_model_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="there is no such folder or file"):
        LLM(str(tmp_path / "no" / "model"))


@pytest.mark.parametrize(
    ("option", "value", "problem"),
    [
        ("block_size", -1, "block_size: must be 0 or more"),
        ("dtype", "int8", "dtype: must be one of"),
        ("max_model_len", 65, "max_model_len"),
        ("num_blocks", 3, "max_model_len: 16 is more than the KV cache holds"),
        ("kv_cache_bytes", 1, "kv_cache_bytes: 1 holds 0 blocks"),
        ("device", "toaster", "device: must be auto, cpu, cuda or cuda:N, got 'toaster'"),
        ("attention_backend", "magic", "magic"),
        ("max_num_batched_tokens", -1, "max_num_batched_tokens: must be 0 or more, got -1"),
    ],
)
def test_an_option_that_does_not_fit_is_refused_by_its_name(
    folder: str, option: str, value: int | str, problem: str
) -> None:
    options: dict[str, int | str] = {"block_size": 4, "max_model_len": 16, option: value}
    with pytest.raises(ConfigError, match=problem):
        LLM(folder, **options)


def test_a_checkpoint_with_a_tokenizer_takes_and_gives_text(tmp_path: Path, theirs: object) -> None:
    big = make_hugging_face_model("Qwen3ForCausalLM", vocab_size=4096)
    save(big, tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / name, tmp_path)
    llm = LLM(str(tmp_path), **OPTIONS)
    assert llm.tokenizer is not None
    [one] = llm.generate("hi", GREEDY)
    [same] = llm.generate([llm.tokenizer.encode("hi")], GREEDY)
    assert one.token_ids == same.token_ids
    assert one.text == llm.tokenizer.decode(one.token_ids)


def test_the_cache_is_block_major_and_starts_as_zeros(folder: str) -> None:
    llm = LLM(folder, **OPTIONS)
    cache = llm.engine.kv_memory.tensor
    assert tuple(cache.shape) == (24, 2, 2, 2, 4, 8)
    assert cache.is_contiguous()
    assert cache.dtype is torch.float32
    assert not cache.any()


def test_priorities_that_would_not_count_are_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match=r"^priority: needs .*scheduling_policy"):
        llm.generate([[1, 2]], GREEDY, priority=1)
    with pytest.raises(
        InvalidRequestError, match=r"^priority: must be one or 1 \(one per prompt\)"
    ):
        llm.generate([[1, 2]], GREEDY, priority=[0, 0])
