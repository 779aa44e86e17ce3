"""Tests of a pair of nodes after a network cut: lost connections fail soon and are replaced."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial

import pytest

from tests.fakes.time.waiting import wait_until
from tests.hosts.network import Network, why_no_hosts
from tests.hosts.programs import HostPrograms

pytestmark = [
    pytest.mark.large,
    pytest.mark.timeout(500),  # more than all waits together
    pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "hosts can be made"),
]

TIMEOUT_S = 60.0


def count(programs: HostPrograms, text: str) -> int:
    return programs.log("p0").count(text)


def has_more(programs: HostPrograms, text: str, before: int) -> bool:
    return count(programs, text) > before


def test_connecting_neither_blocks_nor_leaves_sockets_open() -> None:
    environment = {**os.environ, "UCX_NET_DEVICES": "eth0"}

    def command(host: str, *words: str) -> list[str]:
        return network.command(host, sys.executable, "-m", "tests.hosts.dial", *words)

    def dial() -> dict[str, list[int]]:
        words = command("a", "dial", metadata)
        ended = subprocess.run(words, env=environment, capture_output=True, check=True, timeout=60)
        found: dict[str, list[int]] = json.loads(ended.stdout.splitlines()[-1])
        return found

    with Network(["a", "b"], ["ipv4"]) as network:
        listener = subprocess.Popen(
            command("b", "listen"), env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        try:
            assert listener.stdout is not None
            metadata = listener.stdout.readline().strip()
            with network.cutting("a", "b"):
                # A call that waited for the connection would fail, because the network is cut.
                assert dial()["accepted"][0]
            listener.communicate(timeout=TIMEOUT_S)
        finally:
            listener.kill()
            listener.wait()
        sockets = dial()["sockets"]
        assert max(sockets) <= sockets[0] + 1  # at most the socket of the present try is open


@pytest.mark.parametrize("connector", ["nixl", "tls"])
def test_a_silent_connection_is_given_up_and_replaced(connector: str) -> None:
    """TCP alone keeps a silent connection for minutes, and rarely tries to send its bytes again."""
    hosts = ["router", "p0", "d0"]
    with Network(hosts, ["ipv4"]) as network, HostPrograms(network) as programs:
        programs.start_router("--no-local-prefill")
        for name in ("p0", "d0"):
            listen = ["--kv-listen", network.at(name, 0)] if connector == "tls" else []
            words = ["--dtype", "float32", "--num-blocks", "50", "--kv-connector", connector]
            programs.start_node(name, *words, *listen)
        met = partial(has_more, programs, "self-test with")
        wait_until(partial(met, 0), "a pair", timeout_s=90)
        for sender, receiver in (("p0", "d0"), ("d0", "p0")):
            failures, tests = count(programs, "cannot reach"), count(programs, "self-test with")
            with network.cutting(sender, receiver):
                wait_until(
                    partial(has_more, programs, "cannot reach", failures),
                    "the old connection's end",
                    timeout_s=TIMEOUT_S,
                )
            wait_until(partial(met, tests), "a new self-test", timeout_s=TIMEOUT_S)
        assert not programs.ended()
