"""Compare two decode nodes of which one has a slow link, with the other decode node alone.

A client, a router, two prefill nodes and two decode nodes run on hosts of their own, which are
network namespaces of this machine (Linux, root, iproute2). The link of d1 has a fraction of the
rate of all other links, either before the nodes meet, or only later: then only the KV that is sent
can tell the router. The policy `cost` must avoid d1: as many requests per second as without d1, and
no request slower than over the slow link alone.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import grpc

from baton import AsyncClient, Receipt, SamplingParams
from baton.api.errors import NodeUnavailableError
from baton.v1 import admin_pb2
from benchmarks.runner.programs import admin_of
from benchmarks.runner.run import Run
from tests.hosts.network import Network, why_no_hosts
from tests.hosts.programs import HostPrograms

FAST = ("p0", "p1", "d0")
SLOW = "d1"
HOSTS = ("client", "router", *FAST, SLOW)
PROMPT_TOKENS, VOCABULARY = 512, 4000
PARAMS = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
NODE_WORDS = ("--dtype", "float32", "--num-blocks", "600", "--no-prefix-cache")
READY_TIMEOUT_S = 120.0
MIN_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class Row:
    """Outcome of one load.

    Attributes:
        requests_per_s: number of open requests, divided by the median time of a request. Other
            work on this machine, which may stop all programs for a while, changes the median
            little.
        by_node: number of requests by decode node.
        ttft_p50_ms, ttft_max_ms: milliseconds until token 1 reached the client.
    """

    requests_per_s: float
    by_node: dict[str, int]
    ttft_p50_ms: float
    ttft_max_ms: float


def wait_for_pairs(programs: HostPrograms, num_pairs: int) -> None:
    """Wait until exactly this many pairs are connected; raise TimeoutError with the logs."""
    give_up_at = time.monotonic() + READY_TIMEOUT_S
    while _count_pairs(programs.router) != num_pairs:
        if programs.ended() or time.monotonic() > give_up_at:
            raise TimeoutError("\n".join(programs.log(n)[-2000:] for n in programs.processes))
        time.sleep(0.1)


def _count_pairs(router: str) -> int:
    try:
        with admin_of(router) as admin:
            nodes = admin.ListNodes(admin_pb2.ListNodesRequest(), timeout=5).nodes
    except grpc.RpcError:
        return 0
    num_connected: int = sum(peer.connected for node in nodes for peer in node.peers)
    return num_connected // 2


def bandwidths(router: str) -> dict[str, float]:
    """Return the bandwidth of each pair in Mbit/s, as the router knows it."""
    with admin_of(router) as admin:
        nodes = admin.ListNodes(admin_pb2.ListNodesRequest(), timeout=5).nodes
    return {
        f"{node.node_name}>{peer.node_name}": round(peer.bandwidth_bytes_per_s * 8 / 1e6, 1)
        for node in nodes
        if node.node_name.startswith("p")
        for peer in node.peers
    }


async def measure(router: str, num_requests: int, concurrency: int, seed: int) -> Row:
    """Send requests with new prompts in some lanes; return the outcome."""
    draw = random.Random(seed)
    prompts = [draw.choices(range(VOCABULARY), k=PROMPT_TOKENS) for _ in range(num_requests)]
    receipts: list[Receipt] = []

    async def run_lane(client: AsyncClient) -> None:
        while prompts:
            prompt = prompts.pop()
            try:
                receipt = (await client.generate(prompt, PARAMS)).receipt
            except NodeUnavailableError:
                prompts.append(prompt)
                await asyncio.sleep(1.0)
                continue
            assert receipt is not None
            receipts.append(receipt)

    async with AsyncClient(router) as client:
        await asyncio.gather(*(run_lane(client) for _ in range(concurrency)))
    ttfts_ms = [1e3 * receipt.ttft_s for receipt in receipts]
    return Row(
        round(concurrency / statistics.median(receipt.total_s for receipt in receipts), 2),
        dict(Counter(receipt.decode_node for receipt in receipts)),
        round(statistics.median(ttfts_ms), 1),
        round(max(ttfts_ms), 1),
    )


@contextmanager
def running(network: Network, connector: str) -> Iterator[HostPrograms]:
    """Run all programs but d1, and yield when they have met."""
    with HostPrograms(network) as programs:
        programs.start_router("--no-local-prefill")
        for name in FAST:
            start_node(programs, name, connector)
        network.enter("client")  # before gRPC has threads: they stay where they begin
        wait_for_pairs(programs, 2)
        yield programs


def start_node(programs: HostPrograms, name: str, connector: str) -> None:
    """Start a node with a transport."""
    listen = ["--kv-listen", programs.network.at(name, 0)] if connector == "tls" else []
    programs.start_node(name, *NODE_WORDS, "--kv-connector", connector, *listen)


def run(
    run: Run,
    rate: float = 400.0,
    slowness: float = 20.0,
    requests: int = 120,
    concurrency: int = 4,
    connector: str = "nixl",
    seed: int = 0,
) -> dict[str, object] | None:
    """Measure without d1, with d1 on a slow link, after the link got slow, and over it alone.

    Args:
        rate: Mbit/s of the nodes' links.
        slowness: the link of d1 has this fraction of the rate.
        requests: number of requests of each load.
        concurrency: number of open requests.
        connector: nixl or tls.
    """
    if reason := why_no_hosts():
        run.problems.append(reason)
        return None
    rows: dict[str, Row] = {}
    known: dict[str, dict[str, float]] = {}
    with Network(HOSTS, ["ipv4"]) as network, running(network, connector) as programs:
        router = programs.router

        def load(name: str, number: int) -> None:
            rows[name] = asyncio.run(measure(router, number, concurrency, seed + len(rows)))
            known[name] = bandwidths(router)
            run.console.print(f"{name:24} {rows[name]} {known[name]}")

        for name in FAST:
            network.limit(name, rate * 1e6)
        load("warm-up", requests // 4)
        load("without d1", requests)
        network.limit(SLOW, rate * 1e6)
        start_node(programs, SLOW, connector)
        wait_for_pairs(programs, 4)
        load("d1 as fast as d0", requests)
        network.limit(SLOW, rate / slowness * 1e6)
        load("d1 just slowed down", requests // 2)
        load("d1 slow", requests)
        programs.kill(SLOW)
        wait_for_pairs(programs, 2)
        start_node(programs, SLOW, connector)
        wait_for_pairs(programs, 4)
        load("d1 slow from its start", requests)
        programs.kill("d0")
        wait_for_pairs(programs, 2)
        load("slow link alone", max(concurrency, requests // 10))
    slowest_ms = rows["slow link alone"].ttft_max_ms
    for name in ("d1 slow", "d1 slow from its start"):
        share = rows[name].requests_per_s / rows["without d1"].requests_per_s
        if share < MIN_SHARE:
            run.problems.append(f"{name}: {share:.2f} of the requests per second without d1")
        if rows[name].ttft_max_ms > slowest_ms:
            run.problems.append(f"{name}: a request was slower than over the slow link alone")
    return {"rows": {name: asdict(row) for name, row in rows.items()}, "mbit_per_s": known}
