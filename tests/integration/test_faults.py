"""Real processes over a connector that loses, delays, doubles and swaps messages on purpose."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from tests.fakes.checkpoints.demo_model import DEMO_MODEL
from tests.fakes.processes.deployments import run_deployment
from tests.integration.test_storm import assert_nothing_is_held, storm

pytestmark = [pytest.mark.large, pytest.mark.nixl, pytest.mark.timeout(200)]


def test_a_storm_over_a_bad_network_ends_and_leaves_nothing_held() -> None:
    faults = "drop=0.03,delay=0ms-20ms,duplicate=0.05,reorder=0.05,fail_post=0.02,seed=4"
    with run_deployment(
        "--num-blocks", "150", "--max-num-requests", "16", "--inject-faults", faults,
        local_prefill=True,
        # Nobody hears of a lost message: the request ends at its deadline.
        router_args=["--request-timeout-s", "8"],
    ) as deployment:  # fmt: skip
        ends = asyncio.run(storm(deployment.config.listen, seed=3))
        assert ends.count("whole") > 0
        errors = {"DeadlineExceededError", "NodeUnavailableError", "OverloadedError"}
        assert set(ends) <= {"whole", "left"} | errors
        assert_nothing_is_held(deployment, num_nodes=2)
        for child in deployment.children:
            if child.name != "router":
                assert "FAULTS ARE INJECTED" in child.log.read_text(encoding="utf-8")


def test_a_malformed_spec_ends_a_node_with_one_line() -> None:
    command = [sys.executable, "-m", "baton", "decode", "--model", str(DEMO_MODEL)]
    command += ["--inject-faults", "drop=lots"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1
    assert "--inject-faults: drop must be a probability from 0 to 1, got 'lots'" in lines[0]
