"""The page's `baton loadtest compare`, with real processes: same requests, same cores."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.fakes.checkpoints.demo_model import DEMO_MODEL
from tests.integration.test_loadtest import ANY_LAG, COMMANDS, at, baton

pytestmark = [pytest.mark.nixl, pytest.mark.large, pytest.mark.timeout(400)]


@pytest.mark.lengthy
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores to divide")
def test_the_command_of_the_page_gives_a_verdict(tmp_path: Path) -> None:
    command = at({"examples/demo_model": str(DEMO_MODEL)}, COMMANDS[-1])
    assert command[:2] == ["loadtest", "compare"]
    done = baton(*command, *ANY_LAG, "--json", "c.json", cwd=tmp_path, timeout_s=300)
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "c.json").read_text())
    assert document["verdict"]["answer"] in ("disaggregate", "colocate", "undecided")
    assert document["verdict_text"][0].split(":")[0] in done.stdout
    colocated, split = document["deployments"]
    for one in (colocated, split):
        assert [run["repeat"] for run in one["runs"]] == [0, 1]
        assert all(run["summary"]["num_ok"] > 0 for run in one["runs"])
    requests = [
        [run["summary"]["num_requests"] for run in one["runs"]] for one in (colocated, split)
    ]
    assert requests[0] == requests[1]
    # Who computed the prompts.
    latencies = [one["runs"][0]["summary"]["latencies"] for one in (colocated, split)]
    assert "prefill_s" not in latencies[0]
    assert latencies[1]["prefill_s"]["count"] == requests[1][0]
    page = (tmp_path / "compare.html").read_text(encoding="utf-8")
    assert document["verdict_text"][0].split(" (")[0] in page


def test_an_untold_slo_is_one_line(tmp_path: Path) -> None:
    options = ["--up", "x", "--rate", "1", "--duration-s", "5", "--slo", ""]
    done = baton("loadtest", "compare", *options, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, "error: --slo: must be given; goodput decides\n")
