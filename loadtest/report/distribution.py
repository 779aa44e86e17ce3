"""Distribution: the mean and exact percentiles of weighted values, without buckets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

PER_MILLE = {"p50": 500, "p90": 900, "p95": 950, "p99": 990, "p999": 999}


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Percentiles by nearest rank: p99 is the smallest value that 99 % of the values do not exceed.
    Attributes:
        count: sum of the values' weights.
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
    """Summarize values; None without values."""
    return weighted_distribution([(value, 1) for value in values])


def weighted_distribution(pairs: Sequence[tuple[float, int]]) -> Distribution | None:
    """Summarize values, each counted as often as its weight says; None without values."""
    in_order = sorted(pair for pair in pairs if pair[1] > 0)
    count = sum(weight for _, weight in in_order)
    if not count:
        return None
    # A rank is a number of values, rounded up, and exact because it is an integer.
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
