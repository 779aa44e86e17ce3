"""`baton bench quick` with real processes: a system that it starts, and one that runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from baton.processes.free_address import free_address
from tests.fakes.checkpoints.demo_model import DEMO_MODEL

pytestmark = [pytest.mark.large, pytest.mark.nixl, pytest.mark.timeout(240)]

ROOT = Path(__file__).parents[2]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "baton", "bench", "quick", *arguments],
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_a_system_is_started_measured_and_stopped() -> None:
    done = bench("--model", str(DEMO_MODEL), "--part-s", "4", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["verdict"]["grade"] != "failed"
    assert document["one"]["num_requests"] > 0
    assert document["many"]["num_requests"] >= 8
    assert document["one"]["read_bytes_per_s"] > 0
    assert document["share_of_memory_speed"] > 0
    assert [line.partition(":")[0] for line in done.stderr.splitlines()][-3:] == [
        "starting a router, a prefill and a decode node",
        "one reader, 4 s",
        "8 readers, 4 s",
    ]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--target", "grpc://HERE"), "error: UNAVAILABLE: "),
        (("--target", "http://HERE"), "error: "),
        (("--target", "ftp://HERE"), "error: unknown scheme of a target 'ftp'"),
        (("--target", "grpc://HERE", "--model", "x"), "error: --target: measures a running system"),
        (("--model", "no/such/folder"), "error: "),
    ],
)
def test_a_mistake_is_one_line(arguments: tuple[str, ...], line: str) -> None:
    here = free_address()
    done = bench(*(word.replace("HERE", here) for word in arguments), "--part-s", "2")
    assert done.returncode in (1, 2)
    assert done.stdout == ""
    assert done.stderr.splitlines()[-1].startswith(line), done.stderr
