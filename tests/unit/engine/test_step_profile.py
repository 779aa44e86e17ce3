"""Unit tests of the step profile: which steps are measured, and that no request notices."""

from __future__ import annotations

from typing import Any

import pytest

from engine import step_profile
from engine.core.step_plan import StepHooks, StepPlan
from engine.executors.base import PendingStep
from engine.step_profile import (
    measure_context_times,
    measure_decode_times,
    measure_step_times,
)
from tests.fakes.engine.demo_engine import answer, load_demo


def test_steps_of_one_a_few_and_most_tokens_are_measured() -> None:
    engine = load_demo(long_prefill_token_threshold=200)
    times = measure_step_times(engine, pushes=False)
    assert [tokens for tokens, _ in times] == [1, 64, 200]
    assert all(seconds > 0 for _, seconds in times)


def test_a_slow_machine_measures_a_smaller_largest_step(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load_demo()
    monkeypatch.setattr(step_profile, "_measure", lambda engine, num, **_: 0.002 * num)
    assert [tokens for tokens, _ in measure_step_times(engine, pushes=False)] == [1, 64, 125]
    monkeypatch.setattr(step_profile, "_measure", lambda engine, num, **_: 0.05 * num)
    assert [tokens for tokens, _ in measure_step_times(engine, pushes=False)] == [1, 64]


def test_the_largest_step_is_measured_again_behind_a_context() -> None:
    engine = load_demo(long_prefill_token_threshold=128)
    step_times = measure_step_times(engine, pushes=False)
    [(num_tokens, num_context, seconds)] = measure_context_times(engine, step_times, pushes=False)
    assert num_tokens == 128
    assert 128 <= num_context <= min(4096, engine.max_model_len - 1 - 128)
    assert seconds > 0


@pytest.mark.parametrize(
    ("alone_s", "token_s", "expected"),
    [
        (0.02, 1e-5, 4096),  # attention to 100 tokens takes a millisecond
        (0.25, 0.75 / 1000, 1000),  # 1 s is reached with 1,000 context tokens
        (0.25, 1.0, 128),  # already the first one takes far longer
        (0.02, 0.0, 4096),
        (0.02, -1e-5, 4096),  # faster with a context: disturbed
    ],
)
def test_the_context_is_as_long_as_a_second_allows(
    alone_s: float, token_s: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load_demo()
    monkeypatch.setattr(engine, "max_model_len", 10_000)
    asked = list[int]()

    def measure(_: object, num_tokens: int, num_context_tokens: int, **__: object) -> float:
        assert num_tokens == 128
        asked.append(num_context_tokens)
        return alone_s + token_s * num_context_tokens

    monkeypatch.setattr(step_profile, "_measure", measure)
    step_times = ((1, 0.01), (128, alone_s))
    [found] = measure_context_times(engine, step_times, pushes=False)
    assert found[0] == 128
    assert found[1] == pytest.approx(expected, abs=1)
    assert found[2] == alone_s + token_s * found[1]
    assert asked[0] == 128
    assert len(asked) <= 2


@pytest.mark.parametrize(
    ("max_model_len", "num_tokens", "expected"),
    [(192, 128, 0), (193, 128, 1), (8192, 4096, 1), (20_000, 8192, 1), (2, 1, 0)],
)
def test_a_context_needs_room_for_half_as_many_tokens_as_the_step(
    max_model_len: int, num_tokens: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load_demo()
    monkeypatch.setattr(engine, "max_model_len", max_model_len)
    monkeypatch.setattr(step_profile, "_measure", lambda *_, **__: 0.1)
    step_times = tuple((number, 0.1) for number in sorted({1, num_tokens}))
    assert len(measure_context_times(engine, step_times, pushes=False)) == expected


def test_steps_that_push_are_measured_with_a_callback(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load_demo()
    hooks_seen: list[StepHooks] = []
    submit = engine.executor.submit

    def noted(plan: StepPlan, hooks: StepHooks) -> PendingStep:
        hooks_seen.append(hooks)
        return submit(plan, hooks)

    monkeypatch.setattr(engine.executor, "submit", noted)
    measure_step_times(engine, pushes=True)
    assert hooks_seen
    assert all(hooks.after_layer is not None for hooks in hooks_seen)


@pytest.mark.parametrize(("compiles", "num_steps"), [(True, 6), (False, 3)])
def test_long_steps_are_computed_once_where_nothing_compiles(
    compiles: bool, num_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load_demo(max_num_requests=8)
    monkeypatch.setattr(step_profile, "_LONG_S", 0.0)
    num_computed = 0
    submit = engine.executor.submit

    def counted(plan: StepPlan, hooks: StepHooks) -> PendingStep:
        nonlocal num_computed
        num_computed += 1
        return submit(plan, hooks)

    monkeypatch.setattr(engine.executor, "submit", counted)
    measure_decode_times(engine, compiles=compiles)
    assert num_computed == num_steps


def test_decode_steps_are_measured_of_one_of_many_and_of_a_long_context() -> None:
    engine = load_demo(max_num_requests=8)
    measure_step_times(engine, pushes=False)
    times = measure_decode_times(engine)
    longest = min(4096, engine.max_model_len - 2)
    assert [(num, context) for num, context, _ in times] == [(1, 64), (8, 512), (1, longest)]
    assert all(seconds > 0 for *_, seconds in times)


def test_a_slow_machine_measures_fewer_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load_demo()
    for seconds, most in ((0.01, 32), (0.1, 5), (0.3, 1)):
        monkeypatch.setattr(step_profile, "_time", lambda *_, s=seconds, **__: s)
        assert max(num for num, *_ in measure_decode_times(engine)) == most


@pytest.mark.parametrize("options", [{}, {"speculative_method": "ngram"}])
def test_answers_and_counts_are_as_without_a_profile(options: dict[str, Any]) -> None:
    plain, profiled = load_demo(**options), load_demo(**options)
    measure_context_times(profiled, measure_step_times(profiled, pushes=False), pushes=False)
    measure_decode_times(profiled)
    assert profiled.num_steps == 0
    assert profiled.metrics().step_tokens_total == 0
    assert answer(profiled) == answer(plain)
    profiled.check()
