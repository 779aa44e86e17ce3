"""The short drills of nodes that die and of overload, with a real router process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

RESILIENCE = Path(__file__).parents[2] / "benchmarks" / "resilience.py"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


@pytest.mark.parametrize("name", ["deaths", "overload"])
def test_deaths_and_overload_break_no_promise(name: str) -> None:
    done = subprocess.run(
        [sys.executable, str(RESILIENCE), "--quick", "--only", name],
        capture_output=True,
        text=True,
        timeout=190,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{name}: all promises kept" in done.stdout
