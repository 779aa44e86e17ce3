"""Blocks that a lost prefill node on another host may still write become free soon."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.fakes.time.waiting import wait_until
from tests.hosts.network import Network, why_no_hosts
from tests.hosts.programs import HostPrograms

pytestmark = [
    pytest.mark.large,
    pytest.mark.timeout(500),  # more than all waits together
    pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "hosts can be made"),
]

SLOW = 1e6  # bits per second, so that KV is in flight for long
NUM_BLOCKS = 60
NODE_WORDS = ("--dtype", "float32", "--num-blocks", str(NUM_BLOCKS), "--no-prefix-cache")
FREE_S = 30.0


def blocks_of(programs: HostPrograms) -> str:
    words = ("admin", "requests", "d0", "--router", programs.router)
    return " ".join(programs.run("client", *words).split())


def wait_until_free(programs: HostPrograms) -> None:
    free = f"{NUM_BLOCKS} of {NUM_BLOCKS} blocks free"
    wait_until(lambda: free in blocks_of(programs), "all blocks are free", timeout_s=FREE_S)


def wait_for_self_test(programs: HostPrograms, number: int) -> None:
    wait_until(
        lambda: programs.log("p0").count("self-test with") >= number,
        f"{number} self-tests",
        timeout_s=90,
    )


@contextmanager
def sending(programs: HostPrograms) -> Iterator[None]:
    """Send requests until p0 has written a part of their KV to d0; end them afterwards."""
    draw = random.Random(0)
    prompts = json.dumps([[draw.randrange(4000) for _ in range(300)] for _ in range(2)])
    command = [sys.executable, "-m", "tests.hosts.ask", programs.router, prompts, "2"]
    with subprocess.Popen(
        programs.network.command("client", *command), stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as client:  # fmt: skip
        try:
            before = programs.network.received_bytes("d0")
            wait_until(
                lambda: programs.network.received_bytes("d0") - before > 150_000,
                "KV arrives",
                timeout_s=FREE_S,
            )
            yield
        finally:
            client.kill()


@pytest.mark.parametrize("is_killed", [True, False])
def test_blocks_are_free_after_a_prefill_node_was_killed_or_its_host_cut_off(
    is_killed: bool,
) -> None:
    hosts = ["router", "p0", "d0", "client"]
    with Network(hosts, ["ipv4"]) as network, HostPrograms(network) as programs:
        programs.start_router("--no-local-prefill")
        for name in ("p0", "d0"):
            programs.start_node(name, *NODE_WORDS)
        wait_for_self_test(programs, 1)
        network.limit("p0", SLOW)
        with sending(programs):
            if is_killed:
                programs.kill("p0")
            else:
                network.set_link("p0", up=False)
        wait_until(lambda: " 0 requests" in " " + blocks_of(programs), "they end", timeout_s=FREE_S)
        wait_until_free(programs)
        network.limit("p0", None)
        if is_killed:
            programs.start_node("p0", *NODE_WORDS)
        else:
            network.set_link("p0", up=True)
        wait_for_self_test(programs, 2)
        words = (programs.router, json.dumps([[1, 2, 3] * 40]))
        command = network.command("client", sys.executable, "-m", "tests.hosts.ask", *words)
        subprocess.run(command, capture_output=True, check=True, timeout=60)
        wait_until_free(programs)
        assert not programs.ended()
