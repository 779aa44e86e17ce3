"""Reports of a comparison: a table of 80 columns, the verdict in words, and JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from loadtest.compare import Comparison, Trial
from loadtest.plan import OpenLoop
from loadtest.report.confidence import Interval, mean_interval
from loadtest.report.report import empty_table, result_to_json
from loadtest.report.verdict import (
    METRICS,
    EncodeVerdict,
    Values,
    Verdict,
    judge_comparison,
    judge_encoding,
    values_of,
)

Document = dict[str, Any]
_COLUMNS = {
    "goodput_per_s": ("goodput/s", 1.0, ".2f"),
    "attainment": ("within SLO %", 100.0, ".0f"),
    "ttft_p50_s": ("TTFT p50 ms", 1e3, ".0f"),
    "ttft_p99_s": ("TTFT p99 ms", 1e3, ".0f"),
    "itl_p50_s": ("ITL p50 ms", 1e3, ".1f"),
    "itl_p99_s": ("ITL p99 ms", 1e3, ".1f"),
}
_TOLD = {
    "itl_p99_s": "ITL p99",
    "ttft_p50_s": "TTFT p50",
    "ttft_p99_s": "TTFT p99",
    "itl_text_p99_s": "ITL p99 of text requests",
    "ttft_text_p99_s": "TTFT p99 of text requests",
    "ttft_images_p50_s": "TTFT p50 of requests with images",
}
_NO_VERDICT = "no verdict: fewer than two whole repeats"
_SHARED = ("format", "plan", "environment")


def trial_line(trial: Trial) -> str:
    """Format a line about one finished run."""
    summary = trial.result.summary
    cells = [f"repeat {trial.repeat + 1}", f"{trial.deployment.name:<14}"]
    load = trial.result.plan.load
    if isinstance(load, OpenLoop):
        cells.append(f"rate {load.rate_per_s:.3g}")
    if trial.holds_none:
        cells.append("the lowest that was tried: none holds the SLO")
    for metric, (title, scale, form) in _COLUMNS.items():
        value = METRICS[metric](summary)
        cells.append(f"{title} {'-' if value is None else format(value * scale, form)}")
    cached = summary.cache.cached_share
    cells.append(f"cached {'-' if cached is None else format(cached, '.0%')}")
    errors = sum(summary.errors.values())
    late = "" if summary.lag.kept_up else ", generator late"
    cells.append(f"machine's load {trial.result.load_average_at_end:.1f}")
    return ", ".join(cells) + (f", {errors} failed" if errors else "") + late


def print_comparison(comparison: Comparison, values: Values, console: Console) -> None:
    """Print a table of the deployments' means over all repeats, with 95 % intervals."""
    table = empty_table("mean, 95 % interval")
    for title, _, _ in _COLUMNS.values():
        table.add_column(title, justify="right")
    for deployment in comparison.deployments:
        own = values[deployment.name]
        table.add_row(
            deployment.name,
            *(
                _cell(metric, list(own[metric].values()), scale, form)
                for metric, (_, scale, form) in _COLUMNS.items()
            ),
        )
    console.print(table)
    for line in all_verdict_lines(comparison, values):
        console.print(line, soft_wrap=True)


def _interval(metric: str, values: Sequence[float]) -> Interval | None:
    """Return the mean of a metric and its interval; a share's interval ends at 1 at most."""
    most = 1.0 if metric == "attainment" else math.inf
    return mean_interval(values, most=most) if values else None


def _cell(metric: str, values: Sequence[float], scale: float, form: str) -> str:
    found = _interval(metric, values)
    if found is None:
        return "-"
    ends = ""
    if found.low is not None and found.high is not None:
        ends = f"\n{found.low * scale:{form}}-{found.high * scale:{form}}"
    return f"{found.mean * scale:{form}}{ends}"


def all_verdict_lines(comparison: Comparison, values: Values) -> list[str]:
    """Format whether to disaggregate, and whether encode nodes pay, as far as compared."""
    deployments = comparison.deployments
    lines = []
    if any(one.is_colocated for one in deployments):
        lines += verdict_lines(judge_comparison(deployments, values))
    if any(one.num_encode for one in deployments) and not all(
        one.num_encode for one in deployments
    ):
        lines += encode_verdict_lines(judge_encoding(deployments, values))
    return lines


def encode_verdict_lines(verdict: EncodeVerdict | None) -> list[str]:
    """Format whether encode nodes pay, then their effects on latencies."""
    if verdict is None:
        return [_NO_VERDICT]
    with_encode, without = verdict.with_encode, verdict.without
    difference = f"{_signed(verdict.differences['goodput_per_s'])} requests/s within the SLO"
    first = {
        "pay": f"encode nodes pay: {with_encode} beats {without} by {difference}",
        "do not pay": f"encode nodes do not pay: {with_encode} against {without}: {difference}",
        "undecided": f"encode nodes, undecided by goodput: {with_encode} against {without}: "
        f"{difference}",
    }[verdict.answer]
    return [first, *_effect_lines(verdict, without)]


def verdict_lines(verdict: Verdict | None) -> list[str]:
    """Return lines that say whether to disaggregate, how, and what this does to latencies."""
    if verdict is None:
        return [_NO_VERDICT]
    split, colocated = verdict.split, verdict.colocated
    difference = f"{_signed(verdict.differences['goodput_per_s'])} requests/s within the SLO"
    lines = [
        {
            "disaggregate": f"disaggregate: {split} beats {colocated} by {difference}",
            "colocate": f"do not disaggregate: {split} against {colocated}: {difference}",
            "undecided": f"undecided by goodput: {split} against {colocated}: {difference}",
        }[verdict.answer],
        *_effect_lines(verdict, colocated),
    ]
    lines += [
        f"{name} held the SLO at no rate that was tried: its goodput counts as 0"
        for name in verdict.holding_none
    ]
    return lines


def _effect_lines(verdict: Verdict | EncodeVerdict, other: str) -> list[str]:
    lines = []
    for metric, name in _TOLD.items():
        ratio, found = verdict.ratios.get(metric), verdict.differences.get(metric)
        if ratio is not None and found is not None:
            difference = f"{_signed(found, 1e3)} ms"
            lines.append(f"{name}: {ratio:.2f} times that of {other}, {difference}")
    return lines


def _signed(found: Interval, scale: float = 1.0) -> str:
    assert found.low is not None
    assert found.high is not None
    mean, low, high = (value * scale for value in (found.mean, found.low, found.high))
    return f"{mean:+.2f} (95 %: {low:+.2f} to {high:+.2f})"


def comparison_to_json(
    comparison: Comparison, trials: Sequence[Trial], target_options: Document
) -> Document:
    """Convert a comparison to JSON: all runs, the compared values, and the verdict."""
    values = values_of(comparison.deployments, trials)
    has_colocated = any(one.is_colocated for one in comparison.deployments)
    verdict = judge_comparison(comparison.deployments, values) if has_colocated else None
    encode_verdict = judge_encoding(comparison.deployments, values)
    runs = [result_to_json(trial.result, target_options) for trial in trials]
    up = dataclasses.asdict(comparison.up)
    del up["admin_token"], up["num_prefill"], up["num_decode"], up["num_encode"], up["can_inject"]
    return {
        **{name: runs[0][name] for name in _SHARED},
        "kind": "compare",
        "target": target_options | {"url": "baton up", "model": comparison.up.model},
        "up": up | {"colocated_args": list(comparison.colocated_args)},
        "repeats": comparison.repeats,
        "search": comparison.search and dataclasses.asdict(comparison.search),
        "was_stopped": any(run["was_stopped"] for run in runs),
        "deployments": [
            {
                "name": one.name,
                "is_colocated": one.is_colocated,
                "num_prefill": one.num_prefill,
                "num_decode": one.num_decode,
                "num_encode": one.num_encode,
                "metrics": {
                    metric: interval and dataclasses.asdict(interval)
                    for metric, found in values[one.name].items()
                    for interval in (_interval(metric, list(found.values())),)
                },
                "runs": [
                    {
                        "repeat": trial.repeat,
                        "holds_none": trial.holds_none,
                        "load": run["plan"]["load"],
                        "load_average": trial.result.load_average_at_end,
                    }
                    | {name: value for name, value in run.items() if name not in _SHARED}
                    for trial, run in zip(trials, runs, strict=True)
                    if trial.deployment is one
                ],
            }
            for one in comparison.deployments
        ],
        "verdict": verdict and dataclasses.asdict(verdict),
        "encode_verdict": encode_verdict and dataclasses.asdict(encode_verdict),
        "verdict_text": all_verdict_lines(comparison, values),
    }
