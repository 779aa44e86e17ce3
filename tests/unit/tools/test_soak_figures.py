"""Unit tests of the figures of a soak run: few samples raise no error."""

from __future__ import annotations

import math

import pytest

from benchmarks.faults.long_run import Usage
from benchmarks.hosts.soak import Sample, quarter_medians


def samples(*threads: int) -> list[Sample]:
    return [
        Sample(float(index), {"router": Usage(5, number, 1.0)})
        for index, number in enumerate(threads)
    ]


@pytest.mark.parametrize(
    ("threads", "medians"),
    [
        ((1, 2, 3, 4, 5, 6, 7, 8), [1.5, 3.5, 5.5, 7.5]),
        ((1, 2, 3), [1, 1, 2, 3]),
        ((7,), [7, 7, 7, 7]),
    ],
)
def test_each_quarter_has_a_median(threads: tuple[int, ...], medians: list[float]) -> None:
    """Regression: fewer than four samples raised StatisticsError at the end of the run."""
    assert quarter_medians(samples(*threads), "router", "threads") == medians


def test_a_program_without_samples_has_no_numbers() -> None:
    found = quarter_medians(samples(1, 2), "decode", "threads")
    assert len(found) == 4
    assert all(map(math.isnan, found))
