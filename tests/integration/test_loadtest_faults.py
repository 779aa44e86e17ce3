"""`baton loadtest run --up`: real processes, killed and made to fail while they are measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.fakes.checkpoints.demo_model import DEMO_MODEL
from tests.integration.test_loadtest import ANY_LAG, baton

pytestmark = [pytest.mark.nixl, pytest.mark.large, pytest.mark.timeout(300)]


def test_faults_come_at_their_times_and_leave_no_block(tmp_path: Path) -> None:
    options = ["--rate", "3", "--duration-s", "16", "--warmup-s", "2", "--slo", "ttft=5",
               "--input-tokens", "100", "--output-tokens", "5"]  # fmt: skip
    up = ["--up", str(DEMO_MODEL), "--prefill", "2", "--node-args", "--dtype float32",
          "--router-args", "--no-local-prefill"]  # fmt: skip
    faults = ["--fault", "drop 100% of pushes @4-6s", "--fault", "kill p1 @9s"]
    done = baton("loadtest", "run", *up, *options, *faults, *ANY_LAG, "--json", "r.json",
                 "--html", "r.html", cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "r.json").read_text())
    pushes, kill = document["faults"]
    assert 4 <= pushes["began_s"] <= kill["began_s"] - 4.9
    assert pushes["num_lost"] + pushes["num_retried"] > 0
    assert set(pushes["errors"]) <= {"UNAVAILABLE"}
    assert [pushes["num_orphans"], kill["num_orphans"]] == [0, 0]
    audit = document["audit"]
    assert (audit["num_held"], audit["num_orphans"], audit["problems"]) == (0, 0, [])
    assert "blocks after the run: 0 still held, 0 of nobody" in done.stdout
    summary = document["summary"]
    assert summary["num_ok"] + sum(summary["errors"].values()) == summary["num_requests"] > 20
    assert "kill p1 @9s" in (tmp_path / "r.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--target", "x", "--up", "y"], "target, up: exactly one of them must be given"),
        ([], "target, up: exactly one of them must be given"),
        (["--target", "grpc://127.0.0.1:1", "--fault", "kill p0 @1s"], "p0 must be one of nobody"),
        (["--target", "grpc://127.0.0.1:1", "--fault", "drop 1% of pushes @1-2s"], r"(--up)"),
        (["--target", "x", "--fault", "kill p0 @8s"], "must end before --duration-s (5.0)"),
        (["--up", "no/such/model"], "no/such/model"),
        (["--target", "x", "--find-max-goodput"], "--find-max-goodput: needs --slo, and --rate"),
        (
            ["--target", "x", "--find-max-goodput", "--slo", "ttft=1", "--save-requests", "r"],
            "--save-requests: is for a single run",
        ),
    ],
)
def test_what_cannot_be_is_one_line(options: list[str], problem: str, tmp_path: Path) -> None:
    done = baton("loadtest", "run", *options, "--rate", "1", "--duration-s", "5", cwd=tmp_path)
    assert done.returncode == 1
    assert problem in done.stderr
    assert done.stderr.count("\n") == 1
