"""A decode node behind a slow link: the router learns the link's bandwidth, and avoids the node."""

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
    pytest.mark.timeout(500),  # more than all waits together
    pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "hosts can be made"),
]

FAST, SLOW = 400e6, 20e6  # bits per second
NODE_WORDS = ("--dtype", "float32", "--num-blocks", "200", "--no-prefix-cache")
seeds = itertools.count()


def decode_nodes(programs: HostPrograms, num_requests: int) -> list[str]:
    """Send requests one after the other; return the decode node of each."""
    draw = random.Random(next(seeds))
    prompts = [[draw.randrange(4000) for _ in range(400)] for _ in range(num_requests)]
    command = [sys.executable, "-m", "tests.hosts.ask", programs.router, json.dumps(prompts)]
    output = subprocess.run(
        programs.network.command("client", *command), capture_output=True, check=True, timeout=120
    ).stdout
    return [answer["decode_node"] for answer in json.loads(output)]


def test_a_slow_link_is_avoided_whether_it_was_slow_at_first_or_got_slow() -> None:
    hosts = ["router", "p0", "d0", "d1", "client"]
    with Network(hosts, ["ipv4"]) as network, HostPrograms(network) as programs:
        programs.start_router("--no-local-prefill")
        for name in ("p0", "d0", "d1"):
            network.limit(name, FAST)
            programs.start_node(name, *NODE_WORDS)

        def wait_for_self_tests(number: int) -> None:
            wait_until(
                lambda: programs.log("p0").count("self-test with") >= number,
                f"{number} self-tests",
                timeout_s=90,
            )

        wait_for_self_tests(2)
        # Simultaneous self-tests share the link of p0, so one node may seem faster.
        slow = decode_nodes(programs, 4)[-1]
        network.limit(slow, SLOW)
        assert slow not in decode_nodes(programs, 16)[-4:]
        num_before = programs.log("p0").count("self-test with")
        programs.kill(slow)
        programs.start_node(slow, *NODE_WORDS)
        wait_for_self_tests(num_before + 1)
        assert slow not in decode_nodes(programs, 4)
        assert not programs.ended()
