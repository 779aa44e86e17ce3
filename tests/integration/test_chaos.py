"""The short chaos run: real processes die under load, and every promise holds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.nixl, pytest.mark.large, pytest.mark.timeout(300)]


# With a drafter, some drafts are made and some are right; a wrong token breaks a promise. The gate
# runs the drills without drafts, and with the drafter that keeps most state.
METHODS = [
    "none",
    "eagle",
    *(pytest.param(name, marks=pytest.mark.lengthy) for name in ("ngram", "medusa", "mtp")),
]


@pytest.mark.parametrize("method", METHODS)
def test_a_killed_and_restarted_node_and_a_killed_one_break_no_promise(method: str) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "benchmarks",
            "chaos",
            "--short",
            "--seed",
            "1",
            "--speculative-method",
            method,
        ],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "kill -9 of a prefill node, restart: " in done.stdout
    assert "kill -9 of a decode node: " in done.stdout
