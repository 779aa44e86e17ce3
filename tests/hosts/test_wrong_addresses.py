"""Nodes with wrong addresses are named in logs, get no requests, and disturb no other node."""

from __future__ import annotations

import json
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

# Nodes on loopback use no digests by default, and would not be paired with the others.
NODE_WORDS = ("--dtype", "float32", "--num-blocks", "100", "--kv-digests")
WRONG_PORT = 50999


def test_other_nodes_serve_beside_nodes_with_wrong_addresses() -> None:
    hosts = ["router", "p0", "p1", "d0", "d1", "client"]
    with Network(hosts, ["ipv4"]) as network, HostPrograms(network) as programs:
        programs.start_router("--no-local-prefill")
        for name in ("p0", "d0"):
            programs.start_node(name, *NODE_WORDS)
        # d1 gives its peers an address of its loopback device
        programs.start_node("d1", *NODE_WORDS, variables={"UCX_NET_DEVICES": "lo"})
        wrong = network.at("router", WRONG_PORT)
        programs.start_node("p1", *NODE_WORDS, router=wrong)
        expected = (
            ("router", "node d1 joined"),
            ("router", "p0 cannot reach"),
            ("p1", wrong),
            ("p0", "self-test with"),
        )
        for name, text in expected:
            wait_until(
                lambda name=name, text=text: text in programs.log(name),  # type: ignore[misc]
                f"{text!r} in the log of {name}",
                timeout_s=90,
            )
        prompts = json.dumps([[number] * 40 for number in range(1, 7)])
        command = [sys.executable, "-m", "tests.hosts.ask", programs.router, prompts]
        answers = json.loads(
            subprocess.run(
                network.command("client", *command), capture_output=True, check=True, timeout=60
            ).stdout
        )
        assert [answer["decode_node"] for answer in answers] == ["d0"] * 6
        assert not programs.ended()
