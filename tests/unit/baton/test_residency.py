"""Unit tests of the histograms of cached blocks' times."""

from __future__ import annotations

import pytest

from baton.kv.residency import RESIDENCY_S, SecondsHistogram


@pytest.mark.parametrize(
    ("noted", "median_s"),
    [
        ({}, 0.0),
        ({0.005: 1}, 0.005),
        ({0.5: 10}, 0.55),
        ({0.5: 1, 2.0: 8, 500.0: 1}, 3.0),
        ({10.0**9: 3}, RESIDENCY_S[-1]),
    ],
)
def test_a_median_lies_in_its_bucket(noted: dict[float, int], median_s: float) -> None:
    histogram = SecondsHistogram()
    for seconds, number in noted.items():
        histogram.note_many(seconds, number)
    assert histogram.median_s() == pytest.approx(median_s)
    assert sum(histogram.counts) == sum(noted.values())
    assert histogram.sum_s == sum(seconds * number for seconds, number in noted.items())
