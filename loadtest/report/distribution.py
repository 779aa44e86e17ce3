"""Distribution: the mean and the exact percentiles of weighted values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

PER_MILLE = {"p50": 500, "p90": 900, "p95": 950, "p99": 990, "p999": 999}


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """The mean, the maximum and the percentiles (by nearest rank) of weighted values.

    p99 is the smallest value that 99 % of the values do not exceed.

    Attributes:
        count: sum of the values' weights, which is their number if each weight is 1.
    """

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    p999: float
    max: float


def distribution(values: Iterable[float]) -> Distribution | None:
    """Summarize values that each count once; None without values."""
    return weighted_distribution([(value, 1) for value in values])


def weighted_distribution(pairs: Sequence[tuple[float, int]]) -> Distribution | None:
    """Summarize pairs of a value and its weight, the value's number; None without values."""
    in_order = sorted(pair for pair in pairs if pair[1] > 0)
    count = sum(weight for _, weight in in_order)
    if not count:
        return None
    # A percentile's rank is rounded up, and computed with integers, which are exact.
    ranks = [(name, -(-count * per_mille // 1000)) for name, per_mille in PER_MILLE.items()]
    found: dict[str, float] = {}
    seen = 0
    for value, weight in in_order:
        seen += weight
        while len(found) < len(ranks) and seen >= ranks[len(found)][1]:
            found[ranks[len(found)][0]] = value
    return Distribution(
        count=count,
        mean=sum(value * weight for value, weight in in_order) / count,
        max=in_order[-1][0],
        **found,
    )
