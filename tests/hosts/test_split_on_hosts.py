"""A split system whose programs run on hosts of their own: tokens, the path of KV, names."""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from functools import partial

import pytest

from baton import SamplingParams
from engine.offline.llm import LLM
from tests.fakes.checkpoints.demo_model import DEMO_MODEL
from tests.fakes.time.waiting import wait_until
from tests.hosts.ask import MAX_TOKENS
from tests.hosts.network import Family, Network, why_no_hosts
from tests.hosts.programs import ROUTER_PORT, HostPrograms

pytestmark = [
    pytest.mark.large,
    pytest.mark.timeout(500),  # more than all waits together
    pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "hosts can be made"),
]

LENGTHS = (3, 40, 300)
NODE_WORDS = ("--dtype", "float32", "--num-blocks", "200")


def prompts() -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(4000) for _ in range(length)] for length in LENGTHS]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
    llm = LLM(str(DEMO_MODEL), dtype="float32", device="cpu", kv_cache_bytes=2**25)
    return [list(output.token_ids) for output in llm.generate(prompts(), params)]


@contextlib.contextmanager
def split(family: Family) -> Iterator[HostPrograms]:
    """Run a router, a prefill node and a decode node; yield when they have met."""
    hosts = ["router", "p0", "d0", "client"]
    with Network(hosts, [family]) as network, HostPrograms(network) as programs:
        programs.start_router("--no-local-prefill")
        for name in ("p0", "d0"):
            programs.start_node(name, *NODE_WORDS)
        wait_until(lambda: "self-test with" in programs.log("p0"), "a pair", timeout_s=90)
        yield programs


def has_joined(programs: HostPrograms, router: str) -> bool:
    return "node d0 joined" in programs.log(router)


@pytest.mark.parametrize("family", ["ipv4", "ipv6"])
def test_answers_equal_one_process_and_kv_crosses_the_network(
    family: Family, expected: list[list[int]]
) -> None:
    with split(family) as programs:
        network = programs.network
        before = network.sent_bytes("p0")
        command = [sys.executable, "-m", "tests.hosts.ask", programs.router, json.dumps(prompts())]
        output = subprocess.run(
            network.command("client", *command), capture_output=True, check=True, timeout=60
        ).stdout
        answers = json.loads(output)
        assert [answer["token_ids"] for answer in answers] == expected
        assert {answer["transport"] for answer in answers} == {"nixl/ucx tcp"}
        num_bytes = sum(answer["num_bytes"] for answer in answers)
        assert num_bytes > 0
        assert network.sent_bytes("p0") - before >= num_bytes
        assert "0 references" in programs.run("client", "admin", "audit", "p0", "--router",
                                              programs.router)  # fmt: skip
        assert not programs.ended()


def test_a_node_joins_all_routers_that_a_name_stands_for() -> None:
    with Network(["router", "r1", "d0"]) as network, HostPrograms(network) as programs:
        both = [network.address("router"), network.address("r1")]
        network.name_addresses("fleet", both)
        words = ["--model", DEMO_MODEL, "--http-listen", "", "--insecure"]
        for host in ("router", "r1"):
            programs.start(host, "router", *words, "--listen", network.at(host, ROUTER_PORT))
        programs.start_node("d0", *NODE_WORDS, router=f"fleet:{ROUTER_PORT}")
        for host in ("router", "r1"):
            wait_until(partial(has_joined, programs, host), f"d0 at {host}", timeout_s=60)
