"""Every kernel compiles ahead of time for real GPUs, and takes no more of one than is recorded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "compile_kernels.py"
RECORD = ROOT / "benchmarks" / "results" / "kernels_aot.json"


def run_tool(*arguments: str, path: str = "") -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": path} if path else {}
    return subprocess.run(
        [sys.executable, str(TOOL), *arguments], env=environment, capture_output=True, text=True
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("folder", ["", ".venv-triton"])
def test_kernels_take_no_more_registers_spills_and_shared_memory_than_recorded(
    folder: str,
) -> None:
    if not (ROOT / folder).is_dir():
        pytest.skip("make kernels has not fetched the other release of Triton")
    done = run_tool("--check", path=str(ROOT / folder) if folder else "")
    assert done.returncode == 0, done.stdout + done.stderr


def recorded_releases() -> dict[str, Any]:
    releases: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))["releases"]
    return releases


def test_the_oldest_release_of_triton_and_the_installed_one_are_recorded() -> None:
    assert {"3.6", ".".join(version("triton").split(".")[:2])} <= set(recorded_releases())
    first, *others = (set(found["kernels"]) for found in recorded_releases().values())
    assert all(kernels == first for kernels in others)


@pytest.mark.parametrize("release", recorded_releases())
def test_what_is_recorded_does_not_spill_where_it_should_be_fast(release: str) -> None:
    kernels = recorded_releases()[release]["kernels"]
    assert len(kernels) > 10
    spilling = [name for name, found in kernels.items() if found["sm_90"]["spill_bytes"]]
    assert spilling == []


def test_check_finds_a_kernel_that_got_worse(tmp_path: Path) -> None:
    recorded = json.loads(RECORD.read_text(encoding="utf-8"))
    release = ".".join(version("triton").split(".")[:2])
    kernel = recorded["releases"][release]["kernels"]["silu_mul bf16"]
    kernel["sm_80"]["registers"] -= 20
    del kernel["sm_90"]
    worse = tmp_path / "kernels_aot.json"
    worse.write_text(json.dumps(recorded), encoding="utf-8")
    done = run_tool("--check", "--only", "silu_mul", "--record", str(worse))
    assert done.returncode == 1, done.stderr
    assert "silu_mul bf16 on sm_80: registers: " in done.stdout
    assert "silu_mul bf16 on sm_90: is not in " in done.stdout


def test_the_interpreter_is_refused() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, str(TOOL)], env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout.startswith("error: TRITON_INTERPRET:")) == (2, True)
