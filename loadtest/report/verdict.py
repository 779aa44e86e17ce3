"""Verdicts: decide from a comparison whether to disaggregate, and whether encode nodes pay.

The goodput of the best split and the best colocated deployment decides. All deployments get the
same requests in a repeat, so their difference is computed per repeat. If the confidence interval of
the mean difference contains 0, nothing is decided.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from loadtest.compare import Trial
from loadtest.load.shapes import Deployment
from loadtest.report.confidence import Interval, mean_interval
from loadtest.report.summary import Summary

# The metrics to compare, each with a function that returns a run's value; None: the run has no
# value.
METRICS: dict[str, Callable[[Summary], float | None]] = {
    "goodput_per_s": lambda s: s.goodput_per_s,
    "attainment": lambda s: s.attainment,
    "ttft_p50_s": lambda s: s.latencies["ttft_s"].p50 if "ttft_s" in s.latencies else None,
    "ttft_p99_s": lambda s: s.latencies["ttft_s"].p99 if "ttft_s" in s.latencies else None,
    "itl_p50_s": lambda s: s.latencies["itl_s"].p50 if "itl_s" in s.latencies else None,
    "itl_p99_s": lambda s: s.latencies["itl_s"].p99 if "itl_s" in s.latencies else None,
    "output_tokens_per_s": lambda s: s.output_tokens_per_s,
    "itl_text_p99_s": lambda s: found.p99 if (found := s.latencies.get("itl_text_s")) else None,
    "ttft_text_p99_s": lambda s: found.p99 if (found := s.latencies.get("ttft_text_s")) else None,
    "ttft_images_p50_s": lambda s: (
        found.p50 if (found := s.latencies.get("ttft_images_s")) else None
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of comparing split with colocated deployments.

    Attributes:
        answer: disaggregate, colocate or undecided.
        split, colocated: names of the best deployment of each kind: the highest mean goodput; if
            equal, the lowest ITL p99.
        differences: by metric, the mean of split minus colocated over the repeats, with its
            interval.
        ratios: by metric, the mean of split divided by the mean of colocated; None if the latter is
            0.
        holding_none: names of deployments that had a goodput of 0 in all repeats.
    """

    answer: str
    split: str
    colocated: str
    differences: dict[str, Interval]
    ratios: dict[str, float | None]
    holding_none: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeVerdict:
    """The comparison of deployments with and without encode nodes.

    Attributes:
        answer: pay, do not pay or undecided.
        with_encode, without: names of the best of each kind, chosen as in `Verdict`. Colocated
            deployments count only if all others have encode nodes.
        differences: with minus without encode nodes over the repeats, by metric.
        ratios: mean with divided by mean without encode nodes, by metric.
    """

    answer: str
    with_encode: str
    without: str
    differences: dict[str, Interval]
    ratios: dict[str, float | None]


Values = dict[str, dict[str, dict[int, float]]]


def values_of(deployments: Sequence[Deployment], trials: Sequence[Trial]) -> Values:
    """Collect values by deployment, metric and repeat, if all deployments played the repeat.

    A deployment that held no rate in a search has a goodput of 0, and no latencies to compare.
    """
    found = {(trial.deployment.name, trial.repeat): trial for trial in trials}
    repeats = sorted(
        repeat
        for repeat in {trial.repeat for trial in trials}
        if all((one.name, repeat) in found for one in deployments)
    )
    return {
        one.name: {
            metric: {
                repeat: value
                for repeat in repeats
                if (value := _value(metric, found[one.name, repeat])) is not None
            }
            for metric in METRICS
        }
        for one in deployments
    }


def _value(metric: str, trial: Trial) -> float | None:
    if trial.holds_none:
        return 0.0 if metric == "goodput_per_s" else None
    return METRICS[metric](trial.result.summary)


def judge_comparison(deployments: Sequence[Deployment], values: Values) -> Verdict | None:
    """Judge whether to disaggregate; None with fewer than two repeats."""
    if not _has_repeats(deployments, values):
        return None
    split = _best([one for one in deployments if not one.is_colocated], values)
    colocated = _best([one for one in deployments if one.is_colocated], values)
    differences, ratios = _compare(split, colocated, values)
    return Verdict(
        answer=_answer(differences["goodput_per_s"], "disaggregate", "colocate"),
        split=split,
        colocated=colocated,
        differences=differences,
        ratios=ratios,
        holding_none=tuple(
            one.name for one in deployments if not any(values[one.name]["goodput_per_s"].values())
        ),
    )


def judge_encoding(deployments: Sequence[Deployment], values: Values) -> EncodeVerdict | None:
    """Judge whether encode nodes pay.

    None with fewer than two repeats, or unless some deployments have encode nodes and others not.
    """
    encoding = [one for one in deployments if one.num_encode]
    others = [one for one in deployments if not one.num_encode and not one.is_colocated]
    others = others or [one for one in deployments if not one.num_encode]
    if not encoding or not others or not _has_repeats(deployments, values):
        return None
    with_encode, without = _best(encoding, values), _best(others, values)
    differences, ratios = _compare(with_encode, without, values)
    return EncodeVerdict(
        answer=_answer(differences["goodput_per_s"], "pay", "do not pay"),
        with_encode=with_encode,
        without=without,
        differences=differences,
        ratios=ratios,
    )


def _has_repeats(deployments: Sequence[Deployment], values: Values) -> bool:
    return all(len(values[one.name]["goodput_per_s"]) >= 2 for one in deployments)


def _best(deployments: Sequence[Deployment], values: Values) -> str:
    """Return the name of the deployment with the highest mean goodput, then lowest ITL p99."""

    def rank(deployment: Deployment) -> tuple[float, float]:
        own = values[deployment.name]
        itl = list(own["itl_p99_s"].values())
        worst = mean_interval(itl).mean if itl else float("inf")
        return mean_interval(list(own["goodput_per_s"].values())).mean, -worst

    return max(deployments, key=rank).name


def _compare(
    one: str, other: str, values: Values
) -> tuple[dict[str, Interval], dict[str, float | None]]:
    """Return differences and ratios of two deployments over the repeats, by metric."""
    pairs = {
        metric: [
            (value, values[other][metric][repeat])
            for repeat, value in values[one][metric].items()
            if repeat in values[other][metric]
        ]
        for metric in METRICS
    }
    differences = {
        metric: mean_interval([a - b for a, b in both], least=None)
        for metric, both in pairs.items()
        if len(both) >= 2
    }
    return differences, {metric: _ratio(pairs[metric]) for metric in differences}


def _answer(goodput: Interval, more: str, less: str) -> str:
    """Return the answer that a difference of goodput gives; "undecided" if it may be 0."""
    assert goodput.low is not None
    assert goodput.high is not None
    if goodput.low > 0:
        return more
    return less if goodput.high < 0 else "undecided"


def _ratio(pairs: Sequence[tuple[float, float]]) -> float | None:
    below = sum(value for _, value in pairs)
    return sum(value for value, _ in pairs) / below if below else None
