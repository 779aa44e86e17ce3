"""The forge's workflows call targets and scripts that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def test_workflows_call_targets_that_the_makefile_has() -> None:
    called = {
        target for path in WORKFLOWS for target in re.findall(r"\bmake ([a-z-]+)", path.read_text())
    }
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"check", "test", "docs", "release-check"} <= called
    assert called <= targets


def test_workflows_call_scripts_that_exist() -> None:
    called = {
        script
        for path in WORKFLOWS
        for script in re.findall(r"\btools/[\w.]+|\btests/[\w./]+\.py", path.read_text())
    }
    assert called
    assert [script for script in sorted(called) if not (ROOT / script).exists()] == []
