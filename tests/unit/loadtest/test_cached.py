"""Unit tests of the prompt tokens that a server had cached, and of when a report has them."""

from __future__ import annotations

import pytest

from loadtest.load.cached import CacheReport, report_cache
from loadtest.load.generate import Lengths
from loadtest.plan import LoadPlan, OpenLoop
from tests.fakes.outside.load_targets import ScriptedTarget, even, run_virtually

pytestmark = pytest.mark.medium


def report(cached: int, shared: int, prompt: int = 1000) -> CacheReport:
    return CacheReport(
        num_requests=1, num_prompt_tokens=prompt, num_cached_tokens=cached, num_shared_tokens=shared
    )


@pytest.mark.parametrize(
    ("cached", "shared", "told"),
    [
        (
            996,
            0,
            "99.6% of the prompt tokens came out of the server's cache, of which this load can",
        ),
        (700, 600, "the server has met these prompts before"),
        (600, 640, "the prompts of this load begin alike: TTFT is that of a warm cache"),
        (300, 300, ""),
        (40, 0, ""),
        (0, 900, ""),
    ],
)
def test_a_warning_comes_when_the_cache_explains_the_result(
    cached: int, shared: int, told: str
) -> None:
    found = report(cached, shared)
    assert told in found.warning()
    assert bool(found.warning()) == bool(told)
    assert f"prompt tokens cached: {cached / 10:.1f}%" in found.line()


def test_a_server_that_says_nothing_is_told_so() -> None:
    plan = LoadPlan(
        load=OpenLoop(rate_per_s=50.0), input_lengths=Lengths(4), output_lengths=Lengths(3),
        num_requests=10, max_lag_s=1.0,
    )  # fmt: skip
    result = run_virtually(plan, ScriptedTarget(even(0.01, 0.01)))
    assert (
        result.summary.cache
        == report_cache(result.records)
        == report(0, 0, prompt=0).__class__(
            num_requests=0, num_prompt_tokens=0, num_cached_tokens=0, num_shared_tokens=0
        )
    )
    assert result.summary.cache.line() == "prompt tokens cached: the server does not say"
    assert result.summary.cache.warning() == ""
