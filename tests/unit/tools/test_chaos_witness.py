"""Unit tests of the drills' witness: real programs that work, wait and write their stacks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.faults import chaos_witness
from benchmarks.faults.chaos_witness import Witness, read_stolen_s, read_times
from tests.fakes.time.waiting import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

PROGRAM = """
import asyncio
from baton.processes.process import run_program

async def wait_for_ever():
    print("ready", flush=True)
    await asyncio.Event().wait()

raise SystemExit(run_program(wait_for_ever))
"""


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Any]:
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=output, stderr=output)
    wait_until(lambda: b"ready" in log.read_bytes(), "the program is ready")
    yield SimpleNamespace(children=[SimpleNamespace(name="router", process=process, log=log)])
    process.kill()
    process.wait()


def test_a_long_wait_is_explained(deployment: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chaos_witness, "TICK_S", 0.01)
    monkeypatch.setattr(chaos_witness, "DUMP_TIME_S", 0.5)
    waits = [0.0]
    with Witness(deployment, lambda: waits[0]) as witness:
        wait_until(lambda: len(witness.tell()) > 2, "some seconds are recorded")
        assert not witness.stacks
        waits[0] = chaos_witness.LONG_WAIT_S + 1
        wait_until(lambda: bool(witness.stacks), "the program has written its stacks")
    told = "\n".join(witness.tell())
    assert "router S cpu" in told
    assert "drill " in told
    assert "--- router" in told
    assert "wait_for_ever" in witness.stacks["router"]
    assert deployment.children[0].process.poll() is None, "the program goes on"


def test_ended_processes_have_no_times(deployment: Any) -> None:
    process = deployment.children[0].process
    assert read_times(process.pid) is not None
    process.kill()
    process.wait()
    assert read_times(process.pid) is None
    assert read_stolen_s() >= 0.0
