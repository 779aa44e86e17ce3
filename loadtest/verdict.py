"""Verdict: whether to disaggregate, and how, by what a comparison measured.

Goodput decides. Each repeat gave all deployments the same requests, so that differences are taken
repeat by repeat, and their mean has a confidence interval; one that has 0 in it decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from loadtest.compare import Deployment, Trial
from loadtest.confidence import Interval, mean_interval
from loadtest.summary import Summary

# What is compared; None where a run has no such value.
METRICS: dict[str, Callable[[Summary], float | None]] = {
    "goodput_per_s": lambda s: s.goodput_per_s,
    "attainment": lambda s: s.attainment,
    "ttft_p50_s": lambda s: s.latencies["ttft_s"].p50 if "ttft_s" in s.latencies else None,
    "ttft_p99_s": lambda s: s.latencies["ttft_s"].p99 if "ttft_s" in s.latencies else None,
    "itl_p50_s": lambda s: s.latencies["itl_s"].p50 if "itl_s" in s.latencies else None,
    "itl_p99_s": lambda s: s.latencies["itl_s"].p99 if "itl_s" in s.latencies else None,
    "output_tokens_per_s": lambda s: s.output_tokens_per_s,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Attributes:
    answer: disaggregate, colocate or undecided.
    split, colocated: names of the best of each kind, by mean goodput, then by ITL p99.
    differences: by metric, split minus colocated over the repeats.
    ratios: by metric, mean of split over mean of colocated; None where that is 0.
    """

    answer: str
    split: str
    colocated: str
    differences: dict[str, Interval]
    ratios: dict[str, float | None]


Values = dict[str, dict[str, list[float]]]


def values_of(deployments: Sequence[Deployment], trials: Sequence[Trial]) -> Values:
    """By deployment and metric, one value per repeat that all deployments have it in."""
    values: Values = {one.name: {} for one in deployments}
    for metric, value_of in METRICS.items():
        found = {(t.deployment.name, t.repeat): value_of(t.result.summary) for t in trials}
        repeats = sorted({repeat for _, repeat in found})
        for one in deployments:
            chosen = [
                found[one.name, repeat]
                for repeat in repeats
                if all(found.get((other.name, repeat)) is not None for other in deployments)
            ]
            values[one.name][metric] = [value for value in chosen if value is not None]
    return values


def judge_comparison(deployments: Sequence[Deployment], values: Values) -> Verdict | None:
    """None when there are not two repeats to judge by."""
    if any(len(values[one.name]["goodput_per_s"]) < 2 for one in deployments):
        return None

    def rank(deployment: Deployment) -> tuple[float, float]:
        own = values[deployment.name]
        itl = own["itl_p99_s"]
        worst = mean_interval(itl).mean if itl else float("inf")
        return mean_interval(own["goodput_per_s"]).mean, -worst

    split = max((one for one in deployments if not one.is_colocated), key=rank).name
    colocated = max((one for one in deployments if one.is_colocated), key=rank).name
    pairs = {
        metric: (values[split][metric], values[colocated][metric])
        for metric in METRICS
        if len(values[split][metric]) >= 2
    }
    differences = {
        metric: mean_interval([a - b for a, b in zip(*both, strict=True)], least=None)
        for metric, both in pairs.items()
    }
    ratios = {metric: _ratio(*both) for metric, both in pairs.items()}
    goodput = differences["goodput_per_s"]
    assert goodput.low is not None
    assert goodput.high is not None
    answer = "undecided"
    if goodput.low > 0:
        answer = "disaggregate"
    elif goodput.high < 0:
        answer = "colocate"
    return Verdict(
        answer=answer, split=split, colocated=colocated, differences=differences, ratios=ratios
    )


def _ratio(above: Sequence[float], below: Sequence[float]) -> float | None:
    return sum(above) / sum(below) if sum(below) else None
