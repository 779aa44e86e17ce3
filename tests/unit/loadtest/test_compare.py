"""Tests of comparisons of deployments with known latencies: the verdict follows the numbers."""

from __future__ import annotations

import dataclasses
import io
import os
import random
from typing import Any

import pytest
from rich.console import Console

from baton.api.errors import ConfigError
from loadtest.compare import Comparison, Trial, _in_turn
from loadtest.drills.site import UpOptions
from loadtest.load.generate import Lengths
from loadtest.load.images import ImageLoad
from loadtest.load.shapes import Deployment
from loadtest.options import chosen_cores
from loadtest.page.page import render_figures, render_page
from loadtest.plan import LoadPlan, OpenLoop
from loadtest.report.report import plain
from loadtest.report.report_compare import (
    comparison_to_json,
    print_comparison,
    trial_line,
    verdict_lines,
)
from loadtest.report.verdict import judge_comparison, judge_encoding, values_of
from loadtest.slo import Slo
from tests.fakes.outside.load_targets import Answer, ScriptedTarget, run_virtually
from tests.unit.loadtest.test_page import assert_numbers_are_those_of

pytestmark = pytest.mark.large

PLAN = LoadPlan(
    load=OpenLoop(rate_per_s=8.0),
    input_lengths=Lengths(4),
    output_lengths=Lengths(20),
    warmup_s=1.0,
    duration_s=5.0,
    max_lag_s=0.1,
    slo=Slo.parse("ttft=1,tpot=0.05"),
)
SHAPES = tuple(map(Deployment.parse, ("colocated:1", "1:1", "1:1+local")))
Trait = tuple[float, float, float]  # TTFT, gap between tokens, how often a gap is long


def compared(shapes: tuple[Deployment, ...] = SHAPES, **options: Any) -> Comparison:
    up = UpOptions(model="m", cores=(0, 1), node_args=("--dtype", "float32"))
    defaults: dict[str, Any] = {"plan": PLAN, "deployments": shapes, "up": up, "repeats": 3}
    return Comparison(**defaults | options)


def trials_of(comparison: Comparison, traits: dict[str, Trait], repeats: int = 3) -> list[Trial]:
    trials = []
    for repeat in range(repeats):
        for shape in comparison.deployments:
            ttft_s, gap_s, share = traits[shape.name]
            chance = random.Random(repeat)

            def script(number: int, length: int) -> Answer:
                gaps = [gap_s * (10 if chance.random() < share else 1) for _ in range(length - 1)]  # noqa: B023
                return Answer(frames=((ttft_s, 1), *((gap, 1) for gap in gaps)))  # noqa: B023

            plan = dataclasses.replace(comparison.plan, round=repeat)
            result = run_virtually(plan, ScriptedTarget(script))
            trials.append(Trial(deployment=shape, repeat=repeat, result=result))
    return trials


SPLIT_WINS = {
    "colocated:1": (0.2, 0.02, 0.2),
    "1:1": (0.3, 0.02, 0.0),
    "1:1+local": (0.2, 0.02, 0.1),
}


def test_a_split_that_keeps_the_slo_wins_and_its_ttft_is_told() -> None:
    comparison = compared()
    trials = trials_of(comparison, SPLIT_WINS)
    values = values_of(SHAPES, trials)
    assert list(values["1:1"]["itl_p99_s"].values()) == pytest.approx([0.02] * 3, rel=0.1)
    assert list(values["colocated:1"]["itl_p99_s"].values()) == pytest.approx([0.2] * 3, rel=0.05)
    verdict = judge_comparison(SHAPES, values)
    assert verdict is not None
    assert (verdict.answer, verdict.split, verdict.colocated) == (
        "disaggregate", "1:1", "colocated:1",
    )  # fmt: skip
    assert verdict.ratios["itl_p99_s"] == pytest.approx(0.1, rel=0.1)
    assert verdict.ratios["ttft_p50_s"] == pytest.approx(1.5, rel=0.02)
    assert verdict.differences["ttft_p50_s"].mean == pytest.approx(0.1, abs=0.003)
    lines = verdict_lines(verdict)
    assert lines[0].startswith("disaggregate: 1:1 beats colocated:1 by +")
    assert any(line.startswith("TTFT p50: 1.50 times that of colocated:1, +100.") for line in lines)
    document = plain(comparison_to_json(comparison, trials, {"url": "", "model": ""}))
    assert_numbers_are_those_of(document, render_page(document))
    assert sorted(render_figures(document, "svg")) == ["comparison", "comparison_cdfs"]
    assert document["verdict"]["answer"] == "disaggregate"
    assert "admin_token" not in document["up"]
    console = Console(file=io.StringIO(), width=80)
    print_comparison(comparison, values, console)
    assert isinstance(console.file, io.StringIO)
    printed = console.file.getvalue()
    assert "disaggregate: 1:1 beats" in printed
    table = printed[: printed.index("disaggregate: ")].splitlines()
    assert max(map(len, table)) <= 80
    assert any(line.startswith("1:1+local") for line in table)  # no name is cut
    assert trial_line(trials[0]).startswith("repeat 1, colocated:1")


def test_a_split_that_is_worse_is_told_so() -> None:
    traits = {
        "colocated:1": (0.2, 0.02, 0.0),
        "1:1": (1.5, 0.02, 0.0),
        "1:1+local": (1.2, 0.02, 0.0),
    }
    verdict = judge_comparison(SHAPES, values_of(SHAPES, trials_of(compared(), traits)))
    assert verdict is not None
    assert verdict.answer == "colocate"
    assert verdict_lines(verdict)[0].startswith("do not disaggregate: 1:1")


def test_what_is_alike_is_not_decided() -> None:
    same = dict.fromkeys(SPLIT_WINS, (0.2, 0.02, 0.0))
    verdict = judge_comparison(SHAPES, values_of(SHAPES, trials_of(compared(), same)))
    assert verdict is not None
    assert verdict.answer == "undecided"
    assert verdict_lines(verdict)[0].startswith("undecided by goodput: ")


def test_who_holds_at_no_rate_has_a_goodput_of_0_and_no_latencies() -> None:
    trials = [
        dataclasses.replace(trial, holds_none=trial.deployment.is_colocated)
        for trial in trials_of(compared(), SPLIT_WINS)
    ]
    values = values_of(SHAPES, trials)
    assert list(values["colocated:1"]["goodput_per_s"].values()) == [0.0] * 3
    assert values["colocated:1"]["itl_p99_s"] == {}
    assert len(values["1:1"]["itl_p99_s"]) == 3
    verdict = judge_comparison(SHAPES, values)
    assert verdict is not None
    assert (verdict.answer, verdict.holding_none) == ("disaggregate", ("colocated:1",))
    lines = verdict_lines(verdict)
    assert len(lines) == 2
    assert lines[1].startswith("colocated:1 held the SLO at no rate that was tried")
    assert "none holds the SLO" in trial_line(trials[0])
    document = plain(comparison_to_json(compared(), trials, {"url": "", "model": ""}))
    assert document["deployments"][0]["metrics"]["itl_p99_s"] is None
    assert_numbers_are_those_of(document, render_page(document))
    render_figures(document, "svg")
    none = [dataclasses.replace(trial, holds_none=True) for trial in trials]
    verdict = judge_comparison(SHAPES, values_of(SHAPES, none))
    assert verdict is not None
    assert (verdict.answer, len(verdict.holding_none)) == ("undecided", 3)


def test_a_repeat_counts_when_all_deployments_have_it() -> None:
    trials = trials_of(compared(), SPLIT_WINS, repeats=2)
    values = values_of(SHAPES, trials[:-1])
    assert {len(own["goodput_per_s"]) for own in values.values()} == {1}
    assert judge_comparison(SHAPES, values) is None
    assert verdict_lines(None) == ["no verdict: fewer than two whole repeats"]


def test_shapes_become_options() -> None:
    colocated, split, local = SHAPES
    assert (colocated.num_prefill, colocated.num_decode) == (0, 1)
    comparison = compared(colocated_args=("--long-prefill-token-threshold", "128"))
    options = [comparison.up_options(one) for one in SHAPES]
    assert [one.router_args for one in options] == [(), ("--no-local-prefill",), ()]
    assert options[0].node_args[-1] == "128"
    assert options[1].node_args == ("--dtype", "float32")
    assert (options[1].num_prefill, options[1].num_decode) == (1, 1)
    assert Deployment.parse("3:2").num_prefill == 3
    firsts = [_in_turn(SHAPES, repeat)[0] for repeat in range(4)]
    assert firsts == [colocated, split, local, colocated]


@pytest.mark.parametrize(
    "text", ["", "1", "1:0", "0:1", "colocated:0", "colocated", "1:1+far", "a:b"]
)
def test_a_shape_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="deployments: must be colocated:N"):
        Deployment.parse(text)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"deployments": SHAPES[1:]}, "deployments: must be different ones, with a colocated"),
        ({"deployments": SHAPES[:1]}, "deployments: must be different ones"),
        ({"deployments": (*SHAPES, SHAPES[0])}, "deployments: must be different ones"),
        ({"repeats": 1}, "repeats: must be 2 to 20"),
        ({"plan": dataclasses.replace(PLAN, slo=Slo())}, "slo: must be given"),
        ({"up": UpOptions(model="m", cores=(0,))}, "cores: must be at least one for each of 2"),
    ],
)
def test_a_comparison_that_cannot_be_is_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        compared(**options)


def test_cores() -> None:
    allowed = sorted(os.sched_getaffinity(0))
    assert chosen_cores("") == tuple(allowed)
    assert chosen_cores(f"{allowed[0]}-{allowed[0]},{allowed[0]}") == (allowed[0],)
    for wrong in ("x", "0-", "99999", "-1", ","):
        with pytest.raises(ConfigError, match="cores: must be like"):
            chosen_cores(wrong)


def test_encode_nodes_pay_if_goodput_is_higher_with_them() -> None:
    shapes = tuple(map(Deployment.parse, ("1:1", "1:1+encode:2")))
    images = ImageLoad(counts=Lengths(1), sizes=((8, 8),), share=0.5, repeats=0.0)
    with pytest.raises(ConfigError, match="images: must be given"):
        compared(shapes)
    comparison = compared(shapes, plan=dataclasses.replace(PLAN, images=images))
    assert [one.num_encode for one in map(comparison.up_options, shapes)] == [0, 2]
    trials = trials_of(comparison, {"1:1": (0.3, 0.02, 0.2), "1:1+encode:2": (0.2, 0.02, 0.0)})
    verdict = judge_encoding(shapes, values_of(shapes, trials))
    assert verdict is not None
    assert (verdict.answer, verdict.with_encode, verdict.without) == ("pay", "1:1+encode:2", "1:1")
    assert verdict.ratios["itl_text_p99_s"] == pytest.approx(0.1, rel=0.1)
    document = plain(comparison_to_json(comparison, trials, {"url": "", "model": ""}))
    assert_numbers_are_those_of(document, render_page(document))
    assert document["verdict"] is None
    lines = document["verdict_text"]
    assert lines[0].startswith("encode nodes pay: 1:1+encode:2 beats 1:1 by +")
    assert any(line.startswith("ITL p99 of text requests: 0.1") for line in lines)
    reverse = {"1:1": (0.2, 0.02, 0.0), "1:1+encode:2": (0.3, 0.02, 0.2)}
    worse = judge_encoding(shapes, values_of(shapes, trials_of(comparison, reverse)))
    assert worse is not None
    assert worse.answer == "do not pay"
