"""The short suite goes on behind a benchmark that fails, and ends what takes too long."""

from __future__ import annotations

import importlib
import io
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.page.write_performance import SUBJECTS

pytestmark = pytest.mark.medium

# It starts a child that would stay, says who that is, and waits.
SLOW = """
import pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
part = pathlib.Path(__file__).with_name("pid.part")
part.write_text(str(child.pid))
part.rename(part.with_suffix(""))
time.sleep(600)
"""


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch) -> Any:
    return importlib.import_module("benchmarks.runner.short_suite")


def test_every_part_is_there(suite: Any) -> None:
    names = {part.name for part in suite.PARTS}
    assert names <= {one.name for subject in SUBJECTS for one in subject.measurements}


def test_what_fails_is_named_and_the_rest_still_runs(suite: Any, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("raise SystemExit(3)")
    (tmp_path / "good.py").write_text(
        "import sys, pathlib; pathlib.Path(__file__).with_name('ran').write_text(sys.argv[1])"
    )
    out = io.StringIO()
    parts = [suite.Part("bad"), suite.Part("none"), suite.Part("good", ("--quick",))]
    failed = suite.run_all(parts, 60.0, Console(file=out, width=100), tmp_path)
    assert failed == ["bad", "none"]
    assert (tmp_path / "ran").read_text() == "--quick"
    assert "exit code 3" in out.getvalue()
    assert "s in all" in out.getvalue()


def test_without_time_nothing_is_begun(suite: Any, tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text("")
    out = io.StringIO()
    failed = suite.run_all([suite.Part("good")], 0.0, Console(file=out, width=100), tmp_path)
    assert failed == ["good"]
    assert "not begun" in out.getvalue()


def test_what_takes_too_long_ends_with_all_that_it_started(suite: Any, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    limit_s = 0.5
    while not (tmp_path / "pid").exists():  # on a busy machine it may not have got so far
        limit_s *= 2
        assert suite.run(suite.Part("slow"), limit_s, tmp_path) == "stopped, the time was up"
    status = Path("/proc") / (tmp_path / "pid").read_text() / "stat"
    while is_alive(status):  # until the test's own time is up
        time.sleep(0.01)


def is_alive(status: Path) -> bool:
    """A zombie is not: only nobody has asked for its exit code yet."""
    try:
        return status.read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
