"""What is recorded of the host's part of GPU steps holds its targets, and is what the code does."""

from __future__ import annotations

import copy
import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
BENCHMARKS = ROOT / "benchmarks"
RECORD = BENCHMARKS / "results" / "host_overhead.json"


@pytest.fixture
def host_overhead(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("host_overhead")


def recorded() -> dict[str, Any]:
    """Return the recorded measurements of the recorded revision."""
    found: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))["now"]
    return found


def test_what_is_recorded_holds_every_target(host_overhead: ModuleType) -> None:
    found = recorded()
    for what, (_, places) in host_overhead.TARGETS.items():
        assert {place[0] for place in places} <= set(found), f"{what} is not recorded"
    assert host_overhead.missed(found) == []


def test_each_target_that_is_missed_is_named(host_overhead: ModuleType) -> None:
    for what, (most, places) in host_overhead.TARGETS.items():
        for *folders, name in places:
            found = copy.deepcopy(recorded())
            inner = found
            for folder in folders:
                inner = inner[folder]
            inner[name] = most + 0.5
            (line,) = host_overhead.missed(found)
            assert line.startswith(f"{what}: at most {most:g}, got {most + 0.5:g}")


@pytest.mark.large
@pytest.mark.timeout(400)
def test_launches_and_copies_are_as_recorded(tmp_path: Path) -> None:
    """Counted anew: Triton's own launch code, over a driver that only counts."""
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    into = tmp_path / "found.json"
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    done = subprocess.run(
        [sys.executable, "benchmarks/host_overhead.py", "--into", str(into), "--parts", "counts"],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"},
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found, before = json.loads(into.read_text(encoding="utf-8")), recorded()
    assert found == {part: before[part] for part in ("graph nodes", "eager step", "replayed step")}
