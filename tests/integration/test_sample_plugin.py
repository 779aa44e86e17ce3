"""The sample plug-in is installed, listed, used by programs, and passes the contract suites."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.checkpoints.demo_model import DEMO_MODEL

pytestmark = [pytest.mark.large, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
SAMPLE = ROOT / "examples" / "plugin"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [
        *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"),
        *("--no-build-isolation", "--target", str(folder), str(SAMPLE)),
    ]
    subprocess.run(command, check=True, cwd=folder, timeout=200)
    return folder


def run(site: Path, *words: str, plugins: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join((str(site), str(ROOT)))
    variables = {"PYTHONPATH": path, "BATON_PLUGINS": plugins, "SAMPLE_MODEL": str(DEMO_MODEL)}
    return subprocess.run(
        [sys.executable, *words],
        env={**os.environ, **variables},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=350,
        check=False,
    )


@pytest.mark.parametrize(
    ("plugins", "state"),
    [("", "not in BATON_PLUGINS"), ("all", "usable"), ("Baton_Sample.Plugin", "usable")],
)
def test_it_is_listed_and_only_usable_if_it_is_allowed(
    site: Path, plugins: str, state: str
) -> None:
    listed = run(site, "-m", "baton", "plugins", "--json", plugins=plugins)
    rows = json.loads(listed.stdout)["plugins"]
    own = [row for row in rows if row["package"] == "baton-sample-plugin"]
    assert len(own) == 7
    assert {row["state"] for row in own} == {state}


def test_programs_take_its_names_only_if_it_is_allowed(site: Path) -> None:
    words = ("-m", "baton", "router", "--model", str(DEMO_MODEL), "--policy", "fewest_requests")
    refused = run(site, *words, "--listen", "x", plugins="")
    assert "fewest_requests" in refused.stderr
    assert "policy" in refused.stderr
    taken = run(site, *words, "--listen", "x", plugins="all")
    assert "listen" in taken.stderr  # the next option that is wrong
    assert "policy" not in taken.stderr


def test_it_passes_the_suites(site: Path) -> None:
    command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(SAMPLE))
    result = run(
        site, *command, "--noconftest", str(SAMPLE / "tests"), plugins="baton-sample-plugin"
    )
    assert result.returncode == 0, result.stdout[-3000:]
    assert " passed" in result.stdout
