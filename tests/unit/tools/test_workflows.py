"""The forge's files name targets, scripts, rooms and versions that exist."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from tools.check_layout import PACKAGES

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


def test_every_room_has_owners_and_every_line_names_one_place() -> None:
    """Regression: one line named four places, and all but the first were read as owners."""
    lines = (ROOT / ".github" / "CODEOWNERS").read_text().splitlines()
    owned = dict(line.split(maxsplit=1) for line in lines if not line.startswith("#"))
    assert all(re.fullmatch(r"(@[\w-]+/[\w-]+ ?)+", owners) for owners in owned.values())
    places = [place for place in owned if place != "*"]
    assert [place for place in places if not (ROOT / place.strip("/")).exists()] == []
    rooms = {folder.partition("/")[0] for folder in PACKAGES.values()}
    assert rooms <= {place.strip("/") for place in places}


def test_the_tests_run_on_every_python_version_that_the_package_names() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    prefix = "Programming Language :: Python :: "
    named = {one.removeprefix(prefix) for one in project["classifiers"] if one.startswith(prefix)}
    check = (ROOT / ".github" / "workflows" / "check.yml").read_text()
    (matrix,) = re.findall(r"python-version: \[(.*?)\]", check)
    assert set(re.findall(r"3\.\d+", matrix)) == named - {"3 :: Only"}
    assert project["requires-python"] == f">={min(named - {'3 :: Only'}, key=_minor)}"


def _minor(version: str) -> int:
    return int(version.partition(".")[2])
