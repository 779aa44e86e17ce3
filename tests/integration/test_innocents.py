"""Kill nodes, break links, stop processes: the router refuses only requests that kill nodes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.large, pytest.mark.timeout(560)]


def run(drill: str, *options: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", drill, *options],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all promises kept" in done.stdout


def test_no_innocent_request_is_refused_on_simulated_nodes() -> None:
    """Run kills in turns, broken links, standstills and killer requests in fleets of 2 to 8."""
    run("innocents_virtual", "--seeds", "1")


@pytest.mark.nixl
@pytest.mark.parametrize("only", ["kills of", "0.3 s", "3 s, six", "10 s", "kills p", "kills d"])
def test_no_innocent_request_is_refused_on_real_nodes(only: str) -> None:
    options = ["--kills", "4", "--requests", "60", "--seeds", "1"]
    run("innocents", "--only", only, *options)
