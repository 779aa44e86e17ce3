"""Unit tests of workloads: the sent requests follow the plan, and the seed decides all of them."""

from __future__ import annotations

import itertools
import random
import statistics
from pathlib import Path
from typing import Any

import pytest

from baton.api.errors import ConfigError
from loadtest.load.generate import WORKLOADS, Lengths, gamma_arrivals, generate
from loadtest.load.lengths import UniformLengths
from loadtest.load.traces import prompt_token_ids, write_trace
from loadtest.load.workload import PlannedRequest, planned_requests
from loadtest.options import fresh_seed
from loadtest.plan import ClosedLoop, LoadPlan, OpenLoop, TraceReplay


def plan(**options: Any) -> LoadPlan:
    defaults: dict[str, Any] = {
        "load": OpenLoop(rate_per_s=50.0),
        "input_lengths": UniformLengths(5, 90),
        "output_lengths": Lengths(20, 0.5),
        "num_requests": 400,
    }
    return LoadPlan(**defaults | options)


def made(**options: Any) -> list[PlannedRequest]:
    return list(planned_requests(plan(**options)))


def token_ids(request: PlannedRequest, vocab_size: int) -> list[int]:
    prompt = request.prompt.make(vocab_size)
    assert isinstance(prompt, list)
    return prompt


def gaps(requests: list[PlannedRequest]) -> list[float]:
    times = [request.due_s for request in requests]
    return [after - before for before, after in itertools.pairwise(times)]  # type: ignore[operator]


@pytest.mark.medium
@pytest.mark.parametrize(
    ("load", "variation"),
    [
        (OpenLoop(rate_per_s=20.0, arrivals="constant"), 0.0),
        (OpenLoop(rate_per_s=20.0), 1.0),
        (OpenLoop(rate_per_s=20.0, arrivals="gamma", burstiness=0.3), 0.3),
        (OpenLoop(rate_per_s=20.0, arrivals="gamma", burstiness=3.0), 3.0),
    ],
)
def test_arrivals_have_the_rate_and_the_burstiness(load: OpenLoop, variation: float) -> None:
    found = gaps(made(load=load, num_requests=20_000))
    mean = statistics.fmean(found)
    assert mean == pytest.approx(0.05, rel=0.06)
    assert statistics.pstdev(found) / mean == pytest.approx(variation, rel=0.05, abs=1e-6)


def test_the_seed_decides_all_and_the_rate_no_prompt() -> None:
    one = made(prefix_groups=3, prefix_tokens=7, cancel_rate=0.2)
    assert made(prefix_groups=3, prefix_tokens=7, cancel_rate=0.2) == one
    assert made(prefix_groups=3, prefix_tokens=7, cancel_rate=0.2, seed=1) != one
    faster = made(prefix_groups=3, prefix_tokens=7, load=OpenLoop(rate_per_s=99.0))
    assert [(r.prompt, r.output_length) for r in faster] == [
        (r.prompt, r.output_length) for r in one
    ]


def test_another_seed_makes_other_prompts_of_a_trace(tmp_path: Path) -> None:
    write_trace(
        tmp_path / "t", generate(WORKLOADS["tool-agent"], iter([0.0]), num_sessions=1, seed=0)
    )
    load = TraceReplay(path=tmp_path / "t")
    one, other = ({r.prompt for r in made(load=load, seed=seed)} for seed in (1, 2))
    assert not one & other
    again = {r.prompt for r in made(load=load, seed=1)}
    assert again == one
    assert fresh_seed() != fresh_seed()


def test_turns_go_on_from_what_was_said() -> None:
    requests = made(turns=UniformLengths(1, 4), num_requests=60, turn_pause_s=2.0)
    assert {request.turn for request in requests} == {0, 1, 2, 3}
    for before, after in itertools.pairwise(requests):
        if after.turn == 0:
            assert after.due_s is not None
            assert after.shared_share == 0
            continue
        assert after.due_s is None
        assert after.think_s > 0
        history, prompt = token_ids(before, 999), token_ids(after, 999)
        assert prompt[: len(history)] == history
        assert after.prompt.num_tokens is not None
        assert before.prompt.num_tokens is not None
        # The answer, of drawn tokens, too: but that no earlier prompt had.
        assert len(prompt) > len(history) + before.output_length
        assert after.shared_share == pytest.approx(len(history) / len(prompt))
    pauses = [request.think_s for request in made(turns=Lengths(2), turn_pause_s=2.0)[1::2]]
    assert statistics.fmean(pauses) == pytest.approx(2.0, rel=0.2)


def test_what_prompts_share_by_the_loads_own_making_is_known() -> None:
    requests = made(prefix_groups=2, prefix_tokens=100, input_lengths=Lengths(100), num_requests=50)
    assert sorted(request.shared_share for request in requests) == [0.0] * 2 + [0.5] * 48
    assert {request.shared_share for request in made(num_requests=50)} == {0.0}


def test_duration_and_number_end_a_plan() -> None:
    assert len(made(num_requests=7)) == 7
    found = made(num_requests=None, duration_s=3.0)
    assert len(found) == pytest.approx(150, rel=0.3)
    assert all(r.due_s is not None and r.due_s < 3.0 for r in found)


def test_prompts_of_a_group_begin_alike_and_no_two_are_equal() -> None:
    requests = made(prefix_groups=4, prefix_tokens=30, num_requests=200)
    prompts = [token_ids(request, 500) for request in requests]
    assert [len(prompt) for prompt in prompts] == [r.prompt.num_tokens for r in requests]
    assert all(35 <= len(prompt) <= 120 for prompt in prompts)
    assert len({tuple(prompt[:30]) for prompt in prompts}) == 4
    assert len({tuple(prompt[:35]) for prompt in prompts}) == 200
    assert all(0 <= token_id < 500 for prompt in prompts for token_id in prompt)


@pytest.mark.medium
def test_a_share_is_given_up_before_its_end() -> None:
    requests = made(cancel_rate=0.25, num_requests=4000)
    cancelled = [r for r in requests if r.cancel_after_tokens is not None]
    assert len(cancelled) / 4000 == pytest.approx(0.25, rel=0.1)
    assert all(1 <= (r.cancel_after_tokens or 0) < r.output_length for r in cancelled)


def test_users_think() -> None:
    requests = made(load=ClosedLoop(concurrency=3, think_s=2.0), num_requests=5000)
    assert {request.due_s for request in requests} == {None}
    assert statistics.fmean(r.think_s for r in requests) == pytest.approx(2.0, rel=0.05)
    assert all(r.think_s == 0 for r in made(load=ClosedLoop(concurrency=3)))


def test_a_trace_is_sent_as_it_is_only_slower(tmp_path: Path) -> None:
    starts = gamma_arrivals(random.Random(0), rate_per_s=5.0, variation=1.0)
    trace = generate(WORKLOADS["tool-agent"], starts, num_sessions=10, seed=0)
    write_trace(tmp_path / "t", reversed(trace))
    sent = made(load=TraceReplay(path=tmp_path / "t", slowdown=2.5), num_requests=None)
    assert len(sent) == len(trace)
    for request, of_trace in zip(sent, trace, strict=True):
        assert request.due_s == pytest.approx(of_trace.timestamp_ms / 400)
        assert request.output_length == of_trace.output_length
    for request, of_trace in list(zip(sent, trace, strict=True))[:5]:
        assert request.prompt.make(999) == prompt_token_ids(
            of_trace.hash_ids, of_trace.input_length, 999, seed="0"
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_requests": None}, "duration_s, num_requests: one"),
        ({"num_requests": 0}, "num_requests: must be 1"),
        ({"duration_s": 5.0, "warmup_s": 5.0}, "duration_s: must be more than warmup_s"),
        ({"cancel_rate": 1.5}, "cancel_rate: must be 1 or less"),
        ({"prefix_groups": 2}, "prefix_groups, prefix_tokens"),
        ({"max_lag_s": 0.0}, "max_lag_ms: must be above 0"),
        ({"vocab_size": 0}, "vocab_size: must be 1"),
        ({"warmup_s": float("nan")}, "warmup_s: must be 0"),
        ({"turn_pause_s": -1.0}, "turn_pause_s: must be 0"),
        ({"turns": Lengths(2), "dataset": Path("d")}, "turns, prefix_groups: cannot be given"),
        ({"turns": Lengths(2), "load": TraceReplay(path=Path("t"))}, "turns, dataset: cannot"),
        ({"tokenizer": Path("d")}, "tokenizer: is for the answers of --dataset"),
    ],
)
def test_plans_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(**options)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (OpenLoop, {"rate_per_s": 0.0}),
        (OpenLoop, {"rate_per_s": 1.0, "arrivals": "never"}),
        (OpenLoop, {"rate_per_s": 1.0, "burstiness": 2.0}),
        (OpenLoop, {"rate_per_s": 1.0, "arrivals": "gamma", "burstiness": 0.0}),
        (ClosedLoop, {"concurrency": 0}),
        (ClosedLoop, {"concurrency": 1, "think_s": -1.0}),
        (TraceReplay, {"path": Path("t"), "slowdown": 0.0}),
    ],
)
def test_loads_that_cannot_be_are_refused(kind: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{list(options)[-1].removesuffix('_per_s')}: "):
        kind(**options)
