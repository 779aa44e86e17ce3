"""Reports of a sweep or a search: a line for each step, and JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from loadtest.plan import Search
from loadtest.report.distribution import Distribution
from loadtest.report.report import result_to_json
from loadtest.search import SearchResult
from loadtest.steps import Step

Document = dict[str, Any]
# Headings of the columns in two lines; the second line continues the first.
_HEADINGS = (
    ("ended", "good", "in SLO", "cached", "tokens", "TTFT", "ms", "ITL", "ms"),
    ("/s", "/s", "", "", "/s", "p50", "p99", "p50", "p99"),
)
_WIDTHS = (7, 7, 8, 7, 7, 8, 8, 7, 7)
_VALUE_WIDTH = 9
_SHARED = ("format", "plan", "target", "environment", "faults", "audit")


def step_heading(variable: str) -> str:
    """Return the two lines of headings above the steps' lines, of at most 80 characters."""
    first, second = map(_in_columns, _HEADINGS)
    return f"{variable:>{_VALUE_WIDTH}}{first}\n{'':{_VALUE_WIDTH}}{second}"


def step_line(step: Step) -> str:
    """Return the line of one step, of at most 80 characters; a missing value is a dash."""
    summary = step.result.summary
    latencies = summary.latencies
    ttft, itl = latencies.get("ttft_s"), latencies.get("itl_s")
    goodput, attained = summary.goodput_per_s, summary.attainment
    cached = summary.cache.cached_share
    cells = [
        f"{summary.requests_per_s:.2f}",
        "-" if goodput is None else f"{goodput:.2f}",
        "-" if attained is None else f"{attained:.1%}",
        "-" if cached is None else f"{cached:.0%}",
        f"{summary.output_tokens_per_s:.0f}",
        *(_ms(values, name) for values in (ttft, itl) for name in ("p50", "p99")),
    ]
    mark = "" if step.held is None else " held" if step.held else " fail"
    if not summary.lag.kept_up:
        # The load generator was late, so this step proves nothing; a line at the end says this.
        mark = " late"
    return f"{step.value:>{_VALUE_WIDTH}.4g}{_in_columns(cells)}{mark}"


def _in_columns(cells: Sequence[str]) -> str:
    return "".join(f"{cell:>{width}}" for cell, width in zip(cells, _WIDTHS, strict=True))


def _ms(values: Distribution | None, name: str) -> str:
    if values is None:
        return "-"
    value_ms = getattr(values, name) * 1e3
    return f"{value_ms:,.{1 if value_ms < 1000 else 0}f}"


def cache_lines(steps: Sequence[Step]) -> list[str]:
    """Return a warning for each step with so many cached tokens that its TTFT shows the cache."""
    warned = [(step, warning) for step in steps if (warning := step.result.summary.cache.warning())]
    return [f"warning: at {step.value:.4g}: {warning}" for step, warning in warned]


def search_lines(found: SearchResult, slo: str) -> list[str]:
    """Return the lines about a search's result."""
    share = f"{found.search.attainment:.0%} of requests within {slo}:"
    if found.max_rate_per_s is None or found.goodput_per_s is None:
        return [share, "no search came to its end: the highest rate that holds is not known"]
    if not found.holds_some:
        rates = sorted(step.value for step in found.steps)
        return [
            share,
            f"no rate that was tried holds ({rates[0]:.3g} to {rates[-1]:.3g} requests/s)",
        ]
    num_zero = found.highest.count(None)
    return [
        share,
        f"highest rate that holds: {found.max_rate_per_s.text()} requests/s",
        "a rate that held and one that failed, of each search: "
        + ", ".join(f"{low:.2f} and {high:.2f}" for low, high in found.brackets),
        f"goodput there: {found.goodput_per_s.text()} requests/s; "
        f"{len(found.max_rate_per_s.values)} of {found.search.repeats} searches",
        *([f"in {num_zero} of them no rate that was tried held: they count as 0"] * bool(num_zero)),
    ]


def steps_to_json(
    kind: str, variable: str, steps: Sequence[Step], target_options: Document
) -> Document:
    """Convert the steps of a sweep or search to JSON, each with its load and round.

    The field ``plan`` is the first step's plan.
    """
    runs = [result_to_json(step.result, target_options) for step in steps]
    return {
        **{name: runs[0][name] for name in _SHARED},
        "kind": kind,
        "variable": variable,
        "was_stopped": any(run["was_stopped"] for run in runs),
        "steps": [
            {
                "value": step.value,
                "repeat": step.repeat,
                "held": step.held,
                "round": run["plan"]["round"],
                **{name: value for name, value in run.items() if name not in _SHARED},
            }
            for step, run in zip(steps, runs, strict=True)
        ],
    }


def search_to_json(found: SearchResult, target_options: Document) -> Document:
    """Convert a search with at least one step to JSON."""
    search: Search = found.search
    slo = found.steps[0].result.plan.slo.text()
    return steps_to_json("search", "rate", found.steps, target_options) | {
        "search": {
            **dataclasses.asdict(search),
            "brackets": [
                {"repeat": repeat, "held": low, "failed": high}
                for repeat, (low, high) in enumerate(found.brackets)
            ],
            "max_rate_per_s": found.max_rate_per_s and dataclasses.asdict(found.max_rate_per_s),
            "goodput_per_s": found.goodput_per_s and dataclasses.asdict(found.goodput_per_s),
            "holds_some": found.holds_some,
            "text": search_lines(found, slo),
        }
    }
