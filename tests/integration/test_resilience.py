"""The short drill of nodes that die, with a real router process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

RESILIENCE = Path(__file__).parents[2] / "benchmarks" / "resilience.py"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


def test_nodes_that_die_lose_no_request() -> None:
    """(That of overload is about times, and so no test: `make resilience`.)"""
    done = subprocess.run(
        [sys.executable, str(RESILIENCE), "--quick", "--only", "deaths"],
        capture_output=True,
        text=True,
        timeout=190,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "deaths: all promises kept" in done.stdout
