"""Unit tests of the benchmarks on hosts: figures of short soaks, and ends that fail."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks.faults.long_run import Usage
from benchmarks.hosts.soak import SURVIVORS, Sample, growth, quarter_medians

FAILING_END = """
import threading, time
from benchmarks.hosts import kv_end
threading.Thread(target=kv_end.fail, args=(OSError("the connector died"),)).start()
time.sleep(30)
"""


def samples_of(*resident_mib: float) -> list[Sample]:
    return [
        Sample(float(at), {name: Usage(10, 5, mib) for name in SURVIVORS})
        for at, mib in enumerate(resident_mib)
    ]


@pytest.mark.parametrize(
    ("values", "medians"),
    [
        ([7.0], [7.0] * 4),
        ([1.0, 2.0], [1.0, 1.0, 2.0, 2.0]),
        ([1.0, 2.0, 3.0], [1.0, 1.0, 2.0, 3.0]),
        ([1.0, 3.0, 5.0, 7.0, 9.0, 11.0, 13.0, 15.0], [2.0, 6.0, 10.0, 14.0]),
    ],
)
def test_soaks_of_any_length_have_quarters(values: list[float], medians: list[float]) -> None:
    assert quarter_medians(samples_of(*values), "p0", "resident_mib") == medians


def test_growth_is_found_and_missing_samples_are_named() -> None:
    assert growth(samples_of(1.0, 1.0, 1.0)) == []
    assert growth(samples_of(1.0, 1.0, 1.0, 9.0)) == [
        f"{name}: resident_mib 1 -> 9" for name in SURVIVORS
    ]
    assert f"{SURVIVORS[0]}: threads was never sampled" in growth([])


@pytest.mark.medium
def test_an_end_whose_connector_died_ends_its_output() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FAILING_END],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert "the connector died" in done.stderr
