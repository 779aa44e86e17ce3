"""Exact percentiles, and the small parsers of a plan."""

from __future__ import annotations

import math
import random
import statistics
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.api.errors import ConfigError
from loadtest.load.lengths import parse_lengths
from loadtest.load.record import spread_tokens
from loadtest.report.distribution import PER_MILLE, distribution, weighted_distribution
from loadtest.slo import Slo

Pairs = st.lists(
    st.tuples(st.floats(min_value=0, max_value=1e6), st.integers(min_value=0, max_value=9)),
    max_size=60,
)


@given(Pairs)
def test_percentiles_are_the_nearest_rank_of_all_values(pairs: list[tuple[float, int]]) -> None:
    found = weighted_distribution(pairs)
    expanded = sorted(value for value, weight in pairs for _ in range(weight))
    if not expanded:
        assert found is None
        return
    assert found is not None
    assert found == distribution(expanded) or found.mean == pytest.approx(
        statistics.fmean(expanded)
    )
    assert (found.count, found.max) == (len(expanded), expanded[-1])
    assert found.mean == pytest.approx(statistics.fmean(expanded))
    for name, per_mille in PER_MILLE.items():
        rank = math.ceil(Fraction(per_mille, 1000) * len(expanded))
        assert getattr(found, name) == expanded[rank - 1]


def test_percentiles_of_a_thousand() -> None:
    found = distribution(map(float, range(1000, 0, -1)))
    assert found is not None
    assert (found.p50, found.p90, found.p95, found.p99, found.p999, found.max) == (
        500, 900, 950, 990, 999, 1000,
    )  # fmt: skip


@given(st.integers(0, 5000), st.lists(st.integers(0, 300), min_size=1, max_size=50))
def test_all_tokens_are_spread_and_every_frame_has_one_if_there_are_enough(
    num_tokens: int, weights: list[int]
) -> None:
    spread = spread_tokens(num_tokens, weights)
    assert sum(spread) == num_tokens
    assert len(spread) == len(weights)
    assert min(spread) >= (num_tokens >= len(weights))


def test_tokens_are_spread_by_the_length_of_texts() -> None:
    assert spread_tokens(4, [3, 5, 4, 9]) == [1, 1, 1, 1]
    assert spread_tokens(13, [5, 5, 20, 10, 25]) == [1, 1, 4, 2, 5]
    assert spread_tokens(4, [1, 1, 98]) == [1, 1, 2]
    assert spread_tokens(2, [4, 4, 4, 4]) in ([0, 1, 0, 1], [1, 0, 1, 0], [0, 1, 1, 0])


def test_lengths_are_as_written() -> None:
    chance = random.Random(0)
    assert {parse_lengths("x", "7").draw(chance) for _ in range(9)} == {7}
    assert {parse_lengths("x", "fixed:7").draw(chance) for _ in range(9)} == {7}
    uniform = parse_lengths("x", "uniform:3-6")
    assert {uniform.draw(chance) for _ in range(200)} == {3, 4, 5, 6}
    lognormal = parse_lengths("x", "lognormal:200,0.8")
    drawn = [lognormal.draw(chance) for _ in range(20_000)]
    assert statistics.fmean(drawn) == pytest.approx(200, rel=0.05)
    assert statistics.median(drawn) == pytest.approx(200 * math.exp(-(0.8**2) / 2), rel=0.05)


@pytest.mark.parametrize(
    "text",
    ["", "0", "x", "fixed:", "uniform:5", "uniform:6-5", "uniform:0-5", "lognormal:5",
     "lognormal:5,-1", "normal:5", "1e9", "99999999"],
)  # fmt: skip
def test_lengths_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="output_tokens: must be "):
        parse_lengths("output_tokens", text)


def test_slo() -> None:
    slo = Slo.parse("ttft=0.5,tpot=0.05")
    assert slo.is_kept({"ttft": 0.5, "tpot": 0.05, "e2e": 100.0})
    assert not slo.is_kept({"ttft": 0.51, "tpot": 0.01, "e2e": 1.0})
    assert slo.is_kept({"ttft": 0.1, "tpot": None, "e2e": 1.0})
    assert Slo.parse("").limits == ()


@pytest.mark.parametrize("text", ["ttft", "ttft=", "ttft=0", "itl=1", "ttft=1,ttft=2", "ttft=nan"])
def test_an_slo_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="slo: must be like"):
        Slo.parse(text)
