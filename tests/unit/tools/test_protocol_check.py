"""Tests of the quick model check of the hand-off: it passes, and finds each seeded mistake."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CHECK = Path(__file__).parents[3] / "tools" / "protocol_check.py"


@pytest.mark.timeout(600)  # on a busy machine
@pytest.mark.skipif(shutil.which("spin") is None, reason="spin is not installed")
def test_the_model_holds_and_its_mistakes_are_found() -> None:
    done = subprocess.run([sys.executable, str(CHECK), "--quick"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" holds") == 3
    assert done.stdout.count(" found: ") == 8
