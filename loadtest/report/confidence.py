"""Interval: the mean of a few repeated measurements, and its 95 % confidence interval."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# Two-sided 95 % quantiles of Student's t distribution, for 1, 2, ... degrees of freedom.
_T_95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093,
)  # fmt: skip
MAX_REPEATS = len(_T_95) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A mean and its 95 % confidence interval; a single repeat has no interval.

    The errors of the repeats are assumed to have a normal distribution. With three repeats, the
    interval is rough and wide.
    """

    mean: float
    low: float | None
    high: float | None
    values: tuple[float, ...]

    def text(self, form: str = ".2f") -> str:
        """Format mean and interval as ``8.10 (95 %: 7.50 to 8.70)``."""
        if self.low is None or self.high is None:
            return f"{self.mean:{form}} (one repeat: no interval)"
        return f"{self.mean:{form}} (95 %: {self.low:{form}} to {self.high:{form}})"


def bracket_interval(brackets: Sequence[tuple[float, float]]) -> Interval:
    """Estimate a value from 1 to `MAX_REPEATS` brackets that each contain the value.

    The mean is the mean of the brackets' lower ends. The interval begins where the confidence
    interval of the lower ends begins, and ends where that of the upper ends ends, so the interval
    also covers the width of the brackets.
    """
    lower = mean_interval([low for low, _ in brackets])
    upper = mean_interval([high for _, high in brackets])
    return Interval(mean=lower.mean, low=lower.low, high=upper.high, values=lower.values)


def mean_interval(
    values: Sequence[float], least: float | None = 0.0, most: float = math.inf
) -> Interval:
    """Estimate the mean of 1 to `MAX_REPEATS` independent values, with its interval.

    Args:
        least, most: the lowest and the highest possible value; the interval ends there at most.
    """
    mean = statistics.fmean(values)
    if len(values) == 1:
        return Interval(mean=mean, low=None, high=None, values=tuple(values))
    half = _T_95[len(values) - 2] * statistics.stdev(values) / math.sqrt(len(values))
    low = mean - half if least is None else max(mean - half, least)
    return Interval(mean=mean, low=low, high=min(mean + half, most), values=tuple(values))
