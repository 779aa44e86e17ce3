"""The short drill of nodes that die, with a real router process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = [sys.executable, "-m", "benchmarks"]

pytestmark = [pytest.mark.large, pytest.mark.timeout(200)]


def test_nodes_that_die_lose_no_request() -> None:
    """(That of overload is about times, and so no test: `make resilience`.)"""
    done = subprocess.run(
        [*BENCHMARKS, "resilience", "--quick", "--only", "deaths"],
        capture_output=True,
        text=True,
        timeout=190,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "deaths: all promises kept" in done.stdout


@pytest.mark.parametrize("fleet", ["4P+4D", "2P+6D"])
def test_under_overload_what_is_accepted_keeps_its_deadline(fleet: str) -> None:
    """On virtual time: the same numbers on every machine."""
    options = ["--fleets", fleet, "--seeds", "1", "--overload-s", "8", "--no-steady", "--log"]
    done = subprocess.run(
        [*BENCHMARKS, "overload_virtual", *options],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all promises kept" in done.stdout
