"""Sweeps and searches against servers whose capacity is known."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.api.errors import ConfigError
from loadtest.load.generate import Lengths
from loadtest.load.workload import planned_requests
from loadtest.page.page import render_figures, render_page
from loadtest.plan import ClosedLoop, LoadPlan, OpenLoop, Search
from loadtest.report.confidence import bracket_interval, mean_interval
from loadtest.report.report import plain
from loadtest.report.report_steps import (
    search_lines,
    search_to_json,
    step_heading,
    step_line,
    steps_to_json,
)
from loadtest.run import RunResult
from loadtest.search import find_highest, play_search
from loadtest.slo import Slo
from loadtest.steps import Step, Sweep, play_sweep
from tests.fakes.outside.load_targets import ScriptedTarget, even, run_virtually
from tests.unit.loadtest.test_page import assert_numbers_are_those_of

pytestmark = pytest.mark.large

T = TypeVar("T")
SERVICE_S = 0.1  # of one request, one after the other: ten per second and no more


def finish(work: Coroutine[Any, Any, T]) -> T:
    """Run what waits for nothing that is real; its runs have loops of their own."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    raise AssertionError("it waits for something")


def player(stop_at: int = 9999) -> Callable[[LoadPlan], Coroutine[Any, Any, RunResult]]:
    """Each run meets a new server; the run of that number is stopped."""
    number = itertools.count()

    async def play(plan: LoadPlan) -> RunResult:
        target = ScriptedTarget(even(SERVICE_S, 0.0), one_at_a_time=True)
        stop_after_s = 1.0 if next(number) == stop_at else None
        return run_virtually(plan, target, stop_after_s=stop_after_s)

    return play


def plan(**options: Any) -> LoadPlan:
    defaults: dict[str, Any] = {
        "load": OpenLoop(rate_per_s=3.0, arrivals="constant"),
        "input_lengths": Lengths(4, 0.5),
        "output_lengths": Lengths(1),
        "warmup_s": 1.0,
        "duration_s": 11.0,
        "max_lag_s": 0.1,
        "slo": Slo.parse("ttft=0.25"),
    }
    return LoadPlan(**defaults | options)


def test_a_sweep_shows_the_capacity_of_the_server() -> None:
    seen: list[Step] = []
    sweep = Sweep.parse("rate=2,8,20")
    steps = finish(play_sweep(player(), plan(), sweep, seen.append))
    assert seen == steps
    assert [step.value for step in steps] == [2, 8, 20]
    rates = [step.result.summary.requests_per_s for step in steps]
    assert rates == pytest.approx([2, 8, 10], abs=0.2)
    assert [step.result.summary.attainment for step in steps[:2]] == [1.0, 1.0]
    assert (steps[2].result.summary.attainment or 0) < 0.1
    assert {step.result.plan.warmup_s for step in steps} == {1.0}
    plans = [step.result.plan for step in steps]
    prompts = [{part for r in planned_requests(one) for part, _ in r.prompt.sizes} for one in plans]
    assert not any(one & other for one, other in itertools.combinations(prompts, 2))
    lines = [*step_heading("concurrency").splitlines(), *map(step_line, steps)]
    assert max(map(len, lines)) <= 80
    document = plain(steps_to_json("sweep", "rate", steps, {"url": "x", "model": ""}))
    shown = assert_numbers_are_those_of(document, render_page(document))
    assert {f"steps.{i}.summary.latencies.itl_s.p99" for i in range(3)} & {
        path for path, _, _ in shown.found
    } == set()  # one token has no gap: a dash, not a number
    assert sorted(render_figures(document, "svg")) == ["throughput", "throughput_latency"]


def test_a_sweep_over_users_and_one_that_is_stopped() -> None:
    closed = plan(load=ClosedLoop(concurrency=1))
    sweep = Sweep.parse("concurrency=1,2,4")
    steps = finish(play_sweep(player(stop_at=1), closed, sweep, lambda step: None))
    assert [step.value for step in steps] == [1, 2]
    assert steps[1].result.was_stopped


@pytest.mark.parametrize(
    "text",
    ["", "rate", "rate=", "rate=1,x", "rate=0", "rate=1,-2", "users=3", "concurrency=1.5",
     "concurrency=nan", "rate=nan", "rate=inf", "rate=" + ",".join(["1"] * 101)],
)  # fmt: skip
def test_a_sweep_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="sweep: must be like"):
        Sweep.parse(text)


@given(st.floats(0.05, 5000), st.floats(1, 100), st.floats(0.01, 0.5), st.floats(1.05, 2.0))
def test_the_highest_that_holds_is_found(
    limit: float, start: float, precision: float, factor: float
) -> None:
    tried: list[float] = []

    async def holds(value: float) -> bool:
        tried.append(value)
        return value <= limit

    found = finish(find_highest(holds, start, factor, precision, start / 1000))
    low, high = found
    if limit < start / 1000:
        assert low <= limit
        return
    assert {low, high} <= set(tried)
    assert low <= limit < high <= low * (1 + precision) * (1 + 1e-9)
    assert len(tried) < 40


def test_the_search_finds_what_the_server_can() -> None:
    search = Search(attainment=0.9, repeats=3, precision=0.05)
    poisson = plan(load=OpenLoop(rate_per_s=3.0), duration_s=31.0)
    found = finish(play_search(player(), poisson, search, lambda step: None))
    assert found.max_rate_per_s is not None
    assert found.goodput_per_s is not None
    assert len(found.max_rate_per_s.values) == 3
    # Poisson arrivals at one server of ten per second: 90 % wait at most 0.15 s up to 5.0 per
    # second (200,000 steps of Lindley's recursion), and here it is seen through half a minute.
    assert found.max_rate_per_s.mean == pytest.approx(5.0, rel=0.2)
    low, high = found.max_rate_per_s.low, found.max_rate_per_s.high
    assert low is not None
    assert high is not None
    assert low < 5.0 < high
    assert found.goodput_per_s.mean == pytest.approx(found.max_rate_per_s.mean, rel=0.25)
    for step in found.steps:
        assert step.held == ((step.result.summary.attainment or 0) >= 0.9)
    for value, repeat in zip(found.max_rate_per_s.values, range(3), strict=True):
        tries = [step for step in found.steps if step.repeat == repeat]
        failed = [step.value for step in tries if not step.held and step.value > value]
        assert min(failed) <= value * 1.05 * (1 + 1e-9)
    rounds = [step.result.plan.round for step in found.steps]
    assert rounds == list(range(len(rounds)))
    document = plain(search_to_json(found, {"url": "x", "model": ""}))
    assert_numbers_are_those_of(document, render_page(document))
    assert "search" in render_figures(document, "svg")
    slo, highest = search_lines(found, "ttft 0.25 s")[:2]
    assert slo == "90% of requests within ttft 0.25 s:"
    assert highest.startswith("highest rate that holds: ")


def test_searches_that_agree_on_a_grid_are_not_taken_for_certain() -> None:
    """Two of them, whose server has no noise at all: what is not known is what was not tried."""
    search = Search(attainment=1.0, repeats=2, precision=1.0)
    start = plan(load=OpenLoop(rate_per_s=4.0, arrivals="constant"), slo=Slo.parse("ttft=0.15"))
    found = finish(play_search(player(), start, search, lambda step: None))
    assert found.max_rate_per_s is not None
    low, high = found.max_rate_per_s.low, found.max_rate_per_s.high
    assert low is not None
    assert high is not None
    # Ten per second and no more; each search has tried rates of its own.
    assert low < max(held for held, _ in found.brackets) < 10 < high
    assert all(held < 10.2 < failed * 1.05 for held, failed in found.brackets)
    assert len({step.value for step in found.steps}) == len(found.steps)
    same = bracket_interval([(16.0, 32.0), (16.0, 32.0)])
    assert (same.mean, same.low, same.high) == (16.0, 16.0, 32.0)
    assert same.text() == "16.00 (95 %: 16.00 to 32.00)"
    line = search_lines(found, "ttft 0.15 s")[2]
    first_held, first_failed = found.brackets[0]
    assert f"of each search: {first_held:.2f} and {first_failed:.2f}" in line


def test_constant_arrivals_hold_up_to_the_capacity() -> None:
    search = Search(attainment=1.0, repeats=1, precision=0.02)
    found = finish(play_search(player(), plan(slo=Slo.parse("ttft=0.15")), search, lambda s: None))
    assert found.max_rate_per_s is not None
    assert found.max_rate_per_s.mean == pytest.approx(10.0, rel=0.03)
    assert (found.max_rate_per_s.low, found.max_rate_per_s.high) == (None, None)


def test_a_search_without_an_end_says_so() -> None:
    never = plan(slo=Slo.parse("ttft=0.05"), duration_s=3.0, load=OpenLoop(rate_per_s=9.0))
    search = Search(repeats=2)
    found = finish(play_search(player(stop_at=3), never, search, lambda s: None))
    assert (found.max_rate_per_s, found.was_stopped) == (None, True)
    assert search_lines(found, "x") == [
        "90% of requests within x:",
        "no search came to its end: the highest rate that holds is not known",
    ]
    for wrong in (plan(slo=Slo()), plan(load=ClosedLoop(concurrency=1))):
        with pytest.raises(ConfigError, match="find_max_goodput: needs --slo, and --rate"):
            finish(play_search(player(), wrong, search, lambda s: None))
    silent = plan(load=OpenLoop(rate_per_s=0.01, arrivals="constant"))
    with pytest.raises(ConfigError, match="duration_s: no request came"):
        finish(play_search(player(), silent, search, lambda s: None))
    for options in ({"attainment": 0.0}, {"repeats": 0}, {"precision": 0.0}, {"attainment": 1.1}):
        with pytest.raises(ConfigError, match="must be"):
            Search(**options)


def test_a_server_that_holds_at_no_rate_is_told_so() -> None:
    never = plan(slo=Slo.parse("ttft=0.05"), load=OpenLoop(rate_per_s=8.0))
    found = finish(play_search(player(), never, Search(repeats=3), lambda step: None))
    # Down to where no request comes in ten seconds; then one try for each repeat, or none that says
    # anything.
    rates = [step.value for step in found.steps if step.repeat == 0]
    assert rates == sorted(rates, reverse=True)
    assert 0.01 < rates[-1] < 1
    assert all(len([s for s in found.steps if s.repeat == repeat]) <= 2 for repeat in (1, 2))
    assert found.highest == [None] * 3
    assert not found.holds_some
    assert found.max_rate_per_s is not None
    assert found.goodput_per_s is not None
    assert (found.max_rate_per_s.mean, found.goodput_per_s.values) == (0.0, (0.0,) * 3)
    _, line = search_lines(found, "ttft 0.05 s")
    lowest = min(step.value for step in found.steps)
    assert line == f"no rate that was tried holds ({lowest:.3g} to 8 requests/s)"
    document = plain(search_to_json(found, {"url": "x", "model": ""}))
    page = render_page(document)
    assert_numbers_are_those_of(document, page)
    assert line in page


def test_a_repeat_in_which_nothing_held_counts_as_0() -> None:
    numbers = itertools.count()

    async def play(plan: LoadPlan) -> RunResult:
        late = next(numbers) != 1  # only the second try holds
        return run_virtually(plan, ScriptedTarget(even(0.5 if late else 0.1, 0.0)))

    search = Search(repeats=2, precision=1.0)
    found = finish(play_search(play, plan(load=OpenLoop(rate_per_s=4.0)), search, lambda s: None))
    first, second = found.highest
    assert first is not None
    assert second is None
    assert found.max_rate_per_s is not None
    assert found.max_rate_per_s.values == (first.value, 0.0)
    assert search_lines(found, "x")[-1].startswith("in 1 of them no rate that was tried held")


def test_an_interval_covers_the_mean_as_often_as_it_says() -> None:
    chance = random.Random(3)
    hits = 0
    for _ in range(4000):
        found = mean_interval([chance.gauss(50, 5) for _ in range(3)])
        assert found.low is not None
        assert found.high is not None
        hits += found.low <= 50 <= found.high
    assert hits / 4000 == pytest.approx(0.95, abs=0.012)
    twenty = mean_interval([float(value) for value in range(20)])
    half = 2.093 * statistics.stdev(range(20)) / math.sqrt(20)
    assert (twenty.low, twenty.high) == pytest.approx((9.5 - half, 9.5 + half))
    bounded = mean_interval([0.1, 0.5, 0.9], most=1.0)
    assert (bounded.low, bounded.high) == (0.0, 1.0)
    assert mean_interval([0.1, 0.5, 0.9], least=None).low == pytest.approx(
        0.5 - 0.4 * 4.303 / 3**0.5
    )
    assert mean_interval([2.0]).text() == "2.00 (one repeat: no interval)"
