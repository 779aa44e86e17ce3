"""PrefillForecast: expected and measured times of a prompt on its node.

This module does not compute forecasts; it stores them and counts how good they were.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

# Bounds of the histogram's buckets, as ratios of expected to measured time; 0.8 to 1.25 means
# "within a quarter".
RATIOS = (0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0)


@dataclass(slots=True, eq=False)
class PrefillForecast:
    """Expected and measured seconds of one prompt, which only the node's `NodeLoad` sets.

    Attributes:
        num_tokens: number of tokens that the node is expected to compute.
        wait_s: expected wait until the node begins to compute the prompt.
        compute_s: expected seconds from the prompt's beginning on the node until token 1.
        placed_at: when the prompt was placed, by the router's clock.
        measured_wait_s: measured wait until the node began to compute the prompt; None before token
            1.
        measured_compute_s: measured seconds from the prompt's beginning on the node until token 1;
            None before token 1. Prompts that one step finished together share the time equally.
    """

    num_tokens: int
    wait_s: float
    compute_s: float
    placed_at: float
    measured_wait_s: float | None = None
    measured_compute_s: float | None = None


@dataclass(slots=True)
class RatioCounts:
    """A histogram of the ratios of expected to measured time.

    Attributes:
        counts: number of ratios in each bucket of `RATIOS`; the last bucket has ratios above all
            bounds.
        total: sum of all ratios.
    """

    counts: list[int] = field(default_factory=lambda: [0] * (len(RATIOS) + 1))
    total: float = 0.0

    def note(self, expected_s: float, measured_s: float) -> None:
        """Count the ratio of an expected to a measured time; skip a measured time of 0."""
        if measured_s > 0:
            ratio = expected_s / measured_s
            self.counts[bisect.bisect_left(RATIOS, ratio)] += 1
            self.total += ratio


@dataclass(slots=True)
class ForecastCounts:
    """Histograms that show how good one router's forecasts were, over all nodes of one role.

    Attributes:
        compute: ratios for the time to compute a prompt.
        first_token: ratios for the wait and the computation together.
    """

    compute: RatioCounts = field(default_factory=RatioCounts)
    first_token: RatioCounts = field(default_factory=RatioCounts)

    def note(self, forecast: PrefillForecast) -> None:
        """Count the ratios of a forecast, once its prompt has been computed."""
        wait_s, compute_s = forecast.measured_wait_s, forecast.measured_compute_s
        if wait_s is not None and compute_s is not None:
            self.compute.note(forecast.compute_s, compute_s)
            self.first_token.note(forecast.wait_s + forecast.compute_s, wait_s + compute_s)


@dataclass(slots=True)
class PlaceForecasts:
    """Histograms of forecasts, by the place where prompts were computed.

    Attributes:
        pair: forecasts of prompts on prefill nodes.
        alone: forecasts of prompts on decode nodes.
    """

    pair: ForecastCounts = field(default_factory=ForecastCounts)
    alone: ForecastCounts = field(default_factory=ForecastCounts)
