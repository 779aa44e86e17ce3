"""The GPU suite, tried on a CPU: parts run apart, and what fails in one of them is kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [pytest.mark.large, pytest.mark.timeout(400)]

ROOT = Path(__file__).resolve().parents[2]


def run(
    *arguments: str, name: str = "gpu_suite", **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", name, "--device", "cpu", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )


def commands_of_processes() -> Iterator[str]:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended meanwhile
            yield path.read_text(encoding="utf-8", errors="replace")


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


@pytest.mark.lengthy
def test_every_row_of_the_kernels_can_be_measured(tmp_path: Path) -> None:
    """In Triton's interpreter: what only a GPU would tell must be about the GPU."""
    pytest.importorskip("triton")
    out = tmp_path / "suite.json"
    done = run("--only", "kernels", "attention", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    parts = json.loads(out.read_text(encoding="utf-8"))["parts"]
    kernels, attention = (list(parts[name]) for name in ("kernels", "attention"))
    assert sum(figure.startswith("stream: ") for figure in kernels) == 7
    assert sum(figure.startswith("launch: ") for figure in kernels) == 3
    assert sum(figure.startswith("sampling: ") for figure in kernels) == 6
    assert sum(figure.startswith("attention: prefill") for figure in attention) == 2
    assert sum(figure.startswith("attention: decode") for figure in attention) == 2


@pytest.mark.lengthy
def test_tokens_can_be_compared_in_one_process_and_in_two(tmp_path: Path) -> None:
    out = tmp_path / "suite.json"
    done = run("--only", "engine", "graphs", "push", "split", "company", "--out", str(out))
    parts = json.loads(out.read_text(encoding="utf-8"))["parts"]
    with_nixl = find_spec("nixl") is not None
    assert done.returncode == (0 if with_nixl else 1), done.stdout + done.stderr
    for name in ("engine", "graphs", *(("push", "split", "company") if with_nixl else ())):
        assert parts[name]["ok"], parts[name]
    assert parts["engine"]["equal"] == "6 of 6"
    assert parts["company"]["in chunks: equal"] == "9 of 9"


def test_what_a_gpu_runs_first_is_tried_here_and_told_beside_earlier_figures(
    tmp_path: Path,
) -> None:
    out = tmp_path / "first.json"
    done = run("--only", "adapters", "two ranks", "--out", str(out), name="gpu_first")
    assert done.returncode == 0, done.stdout + done.stderr
    parts = json.loads(out.read_text(encoding="utf-8"))["parts"]
    assert list(parts) == ["adapters", "two ranks"]
    assert parts["adapters"]["adapter c: equal"] == "3 of 3"
    assert parts["two ranks"]["equal"] == "3 of 3"


@pytest.mark.lengthy
def test_own_sums_and_what_needs_two_gpus_are_tried_here(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    out = tmp_path / "first.json"
    done = run("--only", "own sums", "sum times", "--out", str(out), name="gpu_first")
    assert done.returncode == 1, done.stdout + done.stderr
    parts = json.loads(out.read_text(encoding="utf-8"))["parts"]
    assert parts["own sums"]["counts"] == {"passed": 1}
    assert parts["own sums"]["rank_sums own: equal"] == "3 of 3"
    assert parts["sum times"]["not run"].startswith("two GPUs are needed")


NO_NIXL = "raise ModuleNotFoundError(\"No module named 'nixl'\", name='nixl')"
CRASH = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"


@pytest.mark.parametrize(
    ("code", "key", "said"), [(NO_NIXL, "not run", "nixl"), (CRASH, "failed", "exit code -11")]
)
def test_a_part_without_its_packages_or_that_crashes_hides_no_other(
    tmp_path: Path, code: str, key: str, said: str
) -> None:
    out, hidden = tmp_path / "suite.json", tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "nixl").mkdir()
    (hidden / "nixl" / "__init__.py").write_text(code, encoding="utf-8")
    done = run("--only", "push", "nano", "--out", str(out), PYTHONPATH=str(hidden))
    assert done.returncode == 1
    parts = json.loads(out.read_text(encoding="utf-8"))["parts"]
    assert not parts["push"]["ok"]
    assert said in parts["push"][key]
    assert parts["nano"]["ok"]
    table = done.stdout[done.stdout.index("part  ") :]
    assert "push" in table
    assert "nano       ok" in table


def test_a_part_that_takes_too_long_is_stopped(tmp_path: Path) -> None:
    out = tmp_path / "suite.json"
    done = run("--only", "ops", "--budget", "6", "--out", str(out))
    assert done.returncode == 1
    parts = json.loads(out.read_text(encoding="utf-8"))["parts"]
    assert parts["ops"]["failed"].startswith("stopped after")
    done = run("--only", "ops", "--budget", "4", "--out", str(out))
    assert done.returncode == 1
    parts = json.loads(out.read_text(encoding="utf-8"))["parts"]
    assert parts["ops"] == {"ok": False, "not run": "no time was left"}


def test_a_suite_that_is_stopped_ends_its_part_and_prints_its_table(tmp_path: Path) -> None:
    """The part is in a session of its own: nobody else would end it, and it may hold the GPU."""
    command = [sys.executable, "-m", "benchmarks", "gpu_suite", "--device", "cpu", "--only", "ops"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as suite:
        while not list(tmp_path.glob("*/report.json")):  # the part is at work
            assert suite.poll() is None
            time.sleep(0.05)
        suite.terminate()
        assert suite.stdout is not None
        assert "figure" in suite.stdout.read()
    assert suite.returncode == 1
    assert not any(str(tmp_path) in command for command in commands_of_processes())
