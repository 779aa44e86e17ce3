"""Unit tests of metrics: exact counts of what a tiny model did, and the costs of a request."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

from baton.api.sampling_params import SamplingParams
from engine import LLM
from engine.core.metrics import STEP_TOKENS
from engine.core.request import Request
from models.work import model_work
from tests.numerics.tiny_models import make_hugging_face_model, save

PROMPTS = [[3, 4, 5], [7], [10, 11, 12, 13, 14, 15, 16, 17, 18]]
NUM_PROMPT_TOKENS = 13


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    theirs = make_hugging_face_model("Qwen3ForCausalLM")
    return str(save(theirs, tmp_path_factory.mktemp("tiny")))


def make_llm(folder: str, **options: Any) -> LLM:
    defaults = {"block_size": 4, "num_blocks": 24, "max_num_batched_tokens": 64}
    return LLM(folder, **(defaults | options))


def greedy(max_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, **options)


def request(llm: LLM, prompt: list[int], max_tokens: int = 4) -> Request:
    return llm._make_choices(prompt, greedy(max_tokens))[0]


# ---------------------------------------------------------------- of an engine


def test_a_new_engine_has_done_nothing_and_all_blocks_are_free(folder: str) -> None:
    metrics = make_llm(folder).metrics()
    free = ("blocks", "blocks_free")
    assert (metrics.blocks, metrics.blocks_free) == (24, 24)
    assert metrics.uptime_seconds > 0
    others = dataclasses.asdict(metrics)
    for name in (*free, "uptime_seconds"):
        del others[name]
    assert set(others.pop("steps_by_tokens")) == {0}
    for name in ("requests_started_by_priority", "preemptions_by_priority"):
        assert set(others.pop(name).values()) == {0}
    assert set(others.pop("pins").values()) == {0}
    assert others.pop("kv_files") is None
    assert all(one == {"counts": [0] * 12, "sum_s": 0} for one in others.pop("residency").values())
    assert set(others.values()) == {0, ()}


def test_tokens_steps_and_requests_are_counted_once(folder: str) -> None:
    llm = make_llm(folder)
    llm.generate(PROMPTS, [greedy(1), greedy(4), greedy(2)])
    metrics = llm.metrics()
    assert metrics.prompt_tokens_computed_total == NUM_PROMPT_TOKENS
    assert metrics.output_tokens_total == 7
    assert metrics.steps_total == llm.engine.num_steps == sum(metrics.steps_by_tokens) == 4
    # A request's last token is computed by nobody.
    assert metrics.step_tokens_total == NUM_PROMPT_TOKENS + 7 - 3
    assert metrics.steps_by_tokens[STEP_TOKENS.index(2)] == 1  # two requests' second tokens
    assert metrics.requests_finished_length_total == 3
    assert (metrics.requests_running, metrics.requests_waiting, metrics.requests_parked) == (0,) * 3
    assert 0 < metrics.forward_seconds_total <= metrics.step_seconds_total
    assert metrics.step_seconds_total <= metrics.uptime_seconds


def test_work_is_counted_by_tokens_and_by_what_they_attend_to(folder: str) -> None:
    llm = make_llm(folder)
    llm.generate(PROMPTS, greedy(3))
    metrics, config = llm.metrics(), llm.engine.model_config
    work = model_work(config, dtype=llm.engine.dtype)
    sizes = [len(prompt) for prompt in PROMPTS]
    by_prompts = sum(size * (size + 1) // 2 for size in sizes)
    by_outputs = sum(size + 1 + size + 2 for size in sizes)
    [(_, flops, kv_bytes)] = work.attention  # equal for all layers
    assert metrics.model_flops_total == pytest.approx(
        metrics.step_tokens_total * work.token_flops
        + 9 * work.head_flops
        + (by_prompts + by_outputs) * flops
    )
    assert metrics.weight_read_bytes_total == 3 * work.weight_bytes
    read = sum(sizes) + by_outputs  # a prompt, in one step
    assert metrics.kv_read_bytes_total == read * kv_bytes


def test_work_grows_while_a_request_runs_and_stays_when_it_ends(folder: str) -> None:
    llm = make_llm(folder)
    seen = [llm.metrics()]
    llm.engine.add_request(request(llm, PROMPTS[2], 6))
    while llm.engine.requests:
        llm.engine.step()
        seen.append(llm.metrics())
    for before, after in itertools.pairwise(seen):
        assert before.model_flops_total < after.model_flops_total
        assert before.kv_read_bytes_total <= after.kv_read_bytes_total
    assert seen[-1].kv_read_bytes_total > seen[2].kv_read_bytes_total > 0


def test_ends_are_counted_by_their_reason(folder: str) -> None:
    llm = make_llm(folder)
    first = llm.generate([PROMPTS[0]], greedy(6))[0].token_ids
    llm.generate([PROMPTS[0]], greedy(6, stop_token_ids=(first[2],)))
    llm.engine.add_request(request(llm, PROMPTS[1]))
    llm.engine.step()
    [left] = llm.engine.requests
    llm.engine.abort(left)
    assert llm.engine.abort(left) is None
    metrics = llm.metrics()
    assert metrics.requests_finished_length_total == 1
    assert metrics.requests_finished_stop_total == 1
    assert metrics.requests_finished_abort_total == 1


def test_prefix_hits_are_counted_with_what_was_looked_up(folder: str) -> None:
    llm = make_llm(folder)
    for _ in range(3):
        llm.generate([PROMPTS[2]], greedy(2))
    metrics = llm.metrics()
    assert (metrics.prefix_lookups_total, metrics.prefix_lookup_tokens_total) == (3, 27)
    assert metrics.cached_prompt_tokens_total == 2 * 8  # two full blocks, all but the first time
    assert metrics.prompt_tokens_computed_total == 27 - 16
    assert metrics.blocks_cached == 2
    assert metrics.blocks_free == 24


def test_blocks_that_cached_something_are_evicted_when_others_need_them(folder: str) -> None:
    llm = make_llm(folder, num_blocks=4)
    llm.generate([PROMPTS[2]], greedy(2))
    assert (llm.metrics().blocks_cached, llm.metrics().blocks_evicted_total) == (2, 0)
    llm.generate([[9 + token for token in PROMPTS[2]]], greedy(2))
    assert (llm.metrics().blocks_cached, llm.metrics().blocks_evicted_total) == (3, 1)


def test_a_beat_reads_the_use_of_the_cache_and_no_other_figures(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: each beat made all metrics, and computed the size of a block anew."""
    llm = make_llm(folder)
    for _ in range(3):
        llm.generate([PROMPTS[2]], greedy(2))
    figures, manifest = llm.engine.figures, llm.engine.kv_memory.manifest
    size = manifest.unit_bytes()
    monkeypatch.setattr(type(manifest), "unit_bytes", None)
    monkeypatch.setattr(figures, "metrics", None)
    use = figures.cache_use(num_fetched_tokens=3)
    assert (use.num_blocks, use.num_bytes, use.num_pinned_blocks) == (2, 2 * size, 0)
    assert (use.memory_tokens, use.fetched_tokens, use.file_tokens) == (16 - 3, 3, 0)


def test_without_a_prefix_cache_nothing_is_looked_up(folder: str) -> None:
    llm = make_llm(folder, prefix_cache=False)
    llm.generate(PROMPTS, greedy(2))
    metrics = llm.metrics()
    assert (metrics.prefix_lookups_total, metrics.prefix_lookup_tokens_total) == (0, 0)
    assert (metrics.cached_prompt_tokens_total, metrics.blocks_cached) == (0, 0)


def test_preempted_requests_are_looked_up_once_and_computed_again(folder: str) -> None:
    llm = make_llm(folder, block_size=2, num_blocks=13, prefix_cache=False)
    completions = llm.generate(PROMPTS, greedy(14))
    metrics = llm.metrics()
    lost = [completion.metrics.num_preemptions for completion in completions if completion.metrics]
    assert metrics.preemptions_total == sum(lost) > 0
    assert metrics.prompt_tokens_computed_total > NUM_PROMPT_TOKENS
    assert metrics.output_tokens_total == 3 * 14


def test_requests_are_counted_where_they_are(folder: str) -> None:
    llm = make_llm(folder, max_num_requests=1)
    engine = llm.engine
    for prompt in PROMPTS:
        engine.add_request(request(llm, prompt))
    engine.step()
    parked = request(llm, PROMPTS[2])
    engine.park(parked)
    metrics = engine.metrics()
    places = (metrics.requests_running, metrics.requests_waiting, metrics.requests_parked)
    assert places == (1, 2, 1)
    assert metrics.blocks_free == 23
    while engine.has_work:
        engine.step()
    assert engine.grant(parked.request_id) is not None
    assert engine.metrics().requests_parked == 1
    engine.commit(parked.request_id, 7)
    metrics = engine.metrics()
    assert (metrics.requests_waiting, metrics.requests_parked) == (1, 0)
    before = metrics.output_tokens_total
    while engine.has_work:
        engine.step()
    after = engine.metrics()
    assert after.output_tokens_total - before == 3  # token 1 was sampled elsewhere
    assert after.prompt_tokens_computed_total == NUM_PROMPT_TOKENS


def test_totals_never_shrink(folder: str) -> None:
    llm = make_llm(folder, block_size=2, num_blocks=13)
    for prompt in PROMPTS:
        llm.engine.add_request(request(llm, prompt, 12))
    names = [field.name for field in dataclasses.fields(llm.metrics()) if "_total" in field.name]
    assert len(names) == 27
    before = llm.metrics()
    while llm.engine.has_work:
        llm.engine.step()
        after = llm.metrics()
        assert all(getattr(before, name) <= getattr(after, name) for name in names)
        assert after.steps_total == before.steps_total + 1
        before = after


# ---------------------------------------------------------------- of a request


def test_a_completion_says_what_it_cost(folder: str) -> None:
    llm = make_llm(folder, max_num_requests=1)
    llm.generate([PROMPTS[2]], greedy(1))
    first, second = llm.generate([PROMPTS[0], PROMPTS[2]], greedy(5))
    for completion, num_cached in ((first, 0), (second, 8)):
        metrics = completion.metrics
        assert metrics is not None
        assert metrics.num_output_tokens == 5
        assert metrics.num_cached_tokens == num_cached
        assert metrics.num_preemptions == 0
        assert 0 <= metrics.queue_s <= metrics.ttft_s < metrics.total_s
        per_token = (metrics.total_s - metrics.ttft_s) / 4
        assert metrics.time_per_token_s == pytest.approx(per_token)
    assert first.metrics is not None
    assert second.metrics is not None
    # One at a time: the second began when the first had ended.
    assert second.metrics.queue_s > first.metrics.ttft_s


def test_one_token_has_no_time_per_token_and_times_make_no_completion_another(folder: str) -> None:
    llm = make_llm(folder, prefix_cache=False)
    [one] = llm.generate([PROMPTS[0]], greedy(1))
    assert one.metrics is not None
    assert one.metrics.time_per_token_s == 0
    assert one.metrics.ttft_s == one.metrics.total_s
    [again] = llm.generate([PROMPTS[0]], greedy(1))
    assert again.metrics != one.metrics
    assert dataclasses.replace(again, request_id=one.request_id) == one
