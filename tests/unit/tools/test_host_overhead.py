"""Tests that the recorded host times of GPU steps meet their targets and belong to the code."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine.rows import HOST
from benchmarks.page.page import outcomes

ROOT = Path(__file__).resolve().parents[3]
BENCHMARKS = ROOT / "benchmarks"
RECORD = BENCHMARKS / "results" / "host_overhead.json"


def recorded() -> dict[str, Any]:
    """Return the recorded measurements of the recorded revision."""
    found: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))["now"]
    return found


def test_what_is_recorded_holds_every_target() -> None:
    targets = [one for one in outcomes(HOST, {"now": recorded()}) if one.row.target]
    assert [one.verdict for one in targets] == ["yes"] * 3


@pytest.mark.large
@pytest.mark.timeout(400)
def test_launches_and_copies_are_as_recorded(tmp_path: Path) -> None:
    """Counted anew: Triton's own launch code, over a driver that only counts."""
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    into = tmp_path / "found.json"
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks", "--call"),
            *("benchmarks.engine.host_overhead:measure_into", str(into), "counts"),
        ],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"},
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found, before = json.loads(into.read_text(encoding="utf-8")), recorded()
    assert found == {part: before[part] for part in ("graph nodes", "eager step", "replayed step")}
