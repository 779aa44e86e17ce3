"""The GPU suite, tried on a CPU: parts run apart, and what fails in one of them is kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SUITE = ROOT / "benchmarks" / "gpu_suite.py"


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SUITE), "--device", "cpu", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )


@pytest.mark.slow
def test_a_dry_run_measures_and_says_so_in_a_table(tmp_path: Path) -> None:
    out = tmp_path / "suite.json"
    done = run("--only", "decode", "nano", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    parts = json.loads(out.read_text(encoding="utf-8"))["parts"]
    assert list(parts) == ["decode", "nano"]
    assert parts["decode"]["tiny, batch 3: ms per step"] > 0
    assert parts["nano"]["output tokens per second"] > 0
    assert [line.split()[:2] for line in done.stdout.splitlines() if " ok " in line] == [
        ["decode", "ok"],
        ["nano", "ok"],
    ]


@pytest.mark.slow
def test_a_part_without_its_packages_says_which_and_hides_no_other(tmp_path: Path) -> None:
    out, hidden = tmp_path / "suite.json", tmp_path / "hidden"
    hidden.mkdir()
    missing = "raise ModuleNotFoundError(\"No module named 'nixl'\", name='nixl')\n"
    (hidden / "nixl.py").write_text(missing, encoding="utf-8")
    done = run("--only", "push", "nano", "--out", str(out), PYTHONPATH=str(hidden))
    assert done.returncode == 1
    parts = json.loads(out.read_text(encoding="utf-8"))["parts"]
    assert not parts["push"]["ok"]
    assert "nixl" in parts["push"]["failed"]
    assert parts["nano"]["ok"]


def test_a_part_that_takes_too_long_is_stopped(tmp_path: Path) -> None:
    out = tmp_path / "suite.json"
    done = run("--only", "ops", "nano", "--budget", "6", "--out", str(out))
    assert done.returncode == 1
    parts = json.loads(out.read_text(encoding="utf-8"))["parts"]
    assert parts["ops"]["failed"].startswith("stopped after")
    assert parts["nano"] == {"ok": False, "not run": "no time was left"}
