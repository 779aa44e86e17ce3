"""Test of two sites with a slow trunk: KV crosses it only if no node at home has room."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys

import pytest

from tests.fakes.time.waiting import wait_until
from tests.hosts.network import Network, why_no_hosts
from tests.hosts.programs import HostPrograms

pytestmark = [
    pytest.mark.large,
    pytest.mark.timeout(500),  # seconds; more than all waits together
    pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "hosts can be made"),
]

LINK, TRUNK = 400e6, 20e6  # bits per second
NEAR, FAR = ("p0", "d0"), ("p1", "d1")
PROMPT_TOKENS = 400
NODE_WORDS = ("--dtype", "float32", "--num-blocks", "200", "--no-prefix-cache")
seeds = itertools.count()


def pairs(programs: HostPrograms, num_requests: int, lanes: int) -> set[str]:
    """Send requests; return the pair of nodes that answered each."""
    draw = random.Random(next(seeds))
    prompts = [draw.choices(range(4000), k=PROMPT_TOKENS) for _ in range(num_requests)]
    words = [programs.router, json.dumps(prompts), lanes]
    command = [sys.executable, "-m", "tests.hosts.ask", *map(str, words)]
    output = subprocess.run(
        programs.network.command("client", *command), capture_output=True, check=True, timeout=120
    ).stdout
    return {f"{answer['prefill_node']}>{answer['decode_node']}" for answer in json.loads(output)}


def test_kv_crosses_the_trunk_only_if_no_node_at_home_can_take_it() -> None:
    hosts = ["router", "client", *NEAR, *FAR]
    with Network(hosts, ["ipv4"], far=FAR) as network, HostPrograms(network) as programs:
        network.limit_trunk(TRUNK)
        programs.start_router("--no-local-prefill")

        def start(name: str) -> None:
            network.limit(name, LINK)
            programs.start_node(name, *NODE_WORDS)

        def wait_for_self_tests(name: str, number: int) -> None:
            wait_until(
                lambda: programs.log(name).count("self-test with") >= number,
                f"{number} self-tests of {name}",
                timeout_s=90,
            )

        for name in ("p0", "d0", "d1"):
            start(name)
        wait_for_self_tests("p0", 2)
        assert pairs(programs, 6, lanes=1) == {"p0>d0"}
        programs.kill("d0")
        assert pairs(programs, 2, lanes=1) == {"p0>d1"}
        start("d0")
        start("p1")
        wait_for_self_tests("p0", 3)
        wait_for_self_tests("p1", 2)
        assert pairs(programs, 12, lanes=2) <= {"p0>d0", "p1>d1"}
        assert not programs.ended()
