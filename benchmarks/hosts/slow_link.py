"""Compare a deployment whose second decode node has a slow link, with one without this node.

A client, a router, two prefill nodes and two decode nodes run on hosts of their own, which are
network namespaces of this machine (Linux, root, iproute2). The link of d1 has a fraction of the
rate of all other links, either from d1's start on, or only later. In the second case, only the
transfers of KV can show the router that the link is slow. The policy `cost` must avoid d1: as many
requests per second as without d1, and no request slower than over the slow link alone.
"""

from __future__ import annotations

import asyncio
import random
import signal
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace

import psutil

from baton import AsyncClient, Receipt, SamplingParams
from baton.api.errors import NodeUnavailableError
from baton.v1 import admin_pb2
from benchmarks.runner.programs import admin_of, count_pairs, wait_until_ready
from benchmarks.runner.run import Run
from tests.hosts.network import Network, why_no_hosts
from tests.hosts.programs import HostPrograms

FAST = ("p0", "p1", "d0")
SLOW = "d1"
HOSTS = ("client", "router", *FAST, SLOW)
PROMPT_TOKENS, VOCABULARY = 512, 4000
PARAMS = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
NODE_WORDS = ("--dtype", "float32", "--no-prefix-cache")
NUM_BLOCKS = 600
READY_TIMEOUT_S = 120.0
MIN_SHARE = 0.9
SETTLE_S = 5.0  # pause before a load, because nodes that have just connected poll often for a while


@dataclass(frozen=True, slots=True)
class Row:
    """Outcome of one load.

    Attributes:
        requests_per_s: number of open requests, divided by the median time of a request. The median
            changes little if other work stops all programs for a while.
        by_pair: number of requests by the nodes of the last attempt, such as p0>d0.
        num_retried: number of requests with several attempts.
        parts_ms: medians of the milliseconds until token 1, and from token 1 to the last token.
        p50_ms, max_ms: milliseconds from a request's arrival to its last token.
        cpu_ms: CPU milliseconds of all programs per request; other work on this machine changes
            this figure less than the times of requests.
    """

    requests_per_s: float
    by_pair: dict[str, int]
    num_retried: int
    parts_ms: tuple[float, float]
    p50_ms: float
    max_ms: float
    cpu_ms: float = 0.0


def wait_for_pairs(programs: HostPrograms, num_pairs: int) -> None:
    """Wait until exactly this many pairs are connected; raise TimeoutError with the logs."""
    wait_until_ready(programs, lambda: count_pairs(programs.router) == num_pairs, READY_TIMEOUT_S)


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


def cpu_seconds(programs: HostPrograms) -> float:
    """Return the CPU seconds that all programs have used so far."""
    times = [
        psutil.Process(pid).cpu_times()
        for name in programs.processes
        for pid in programs.pids(name)
    ]
    return float(sum(one.user + one.system for one in times))


async def measure(
    router: str, num_requests: int, concurrency: int, seed: int, params: SamplingParams = PARAMS
) -> Row:
    """Send requests with new prompts, ``concurrency`` at a time; return the outcome."""
    draw = random.Random(seed)
    prompts = [draw.choices(range(VOCABULARY), k=PROMPT_TOKENS) for _ in range(num_requests)]
    receipts: list[Receipt] = []

    async def run_lane(client: AsyncClient) -> None:
        while prompts:
            prompt = prompts.pop()
            try:
                receipt = (await client.generate(prompt, params)).receipt
            except NodeUnavailableError:
                prompts.append(prompt)
                await asyncio.sleep(1.0)
                continue
            assert receipt is not None
            receipts.append(receipt)

    async with AsyncClient(router) as client:
        await asyncio.gather(*(run_lane(client) for _ in range(concurrency)))
    times_ms = [1e3 * receipt.total_s for receipt in receipts]
    return Row(
        round(concurrency / statistics.median(receipt.total_s for receipt in receipts), 2),
        dict(Counter(f"{receipt.prefill_node}>{receipt.decode_node}" for receipt in receipts)),
        sum(receipt.num_attempts > 1 for receipt in receipts),
        (
            round(1e3 * statistics.median(receipt.ttft_s for receipt in receipts), 1),
            round(1e3 * statistics.median(one.total_s - one.ttft_s for one in receipts), 1),
        ),
        round(statistics.median(times_ms), 1),
        round(max(times_ms), 1),
    )


@contextmanager
def running(
    network: Network, connector: str, nodes: Sequence[str] = FAST, num_blocks: int = NUM_BLOCKS
) -> Iterator[HostPrograms]:
    """Run a router and some nodes; yield when all pairs are connected."""
    with HostPrograms(network) as programs:
        programs.start_router("--no-local-prefill")
        for name in nodes:
            start_node(programs, name, connector, num_blocks)
        network.enter("client")  # before gRPC starts threads, which keep their network
        num_prefills = sum(name.startswith("p") for name in nodes)
        wait_for_pairs(programs, num_prefills * (len(nodes) - num_prefills))
        yield programs


def start_node(
    programs: HostPrograms, name: str, connector: str, num_blocks: int = NUM_BLOCKS
) -> None:
    """Start a node with a KV connector."""
    listen = ["--kv-listen", programs.network.at(name, 0)] if connector == "tls" else []
    words = [*NODE_WORDS, "--num-blocks", str(num_blocks)]
    programs.start_node(name, *words, "--kv-connector", connector, *listen)


class Site:
    """The programs, and the outcomes of loads by name."""

    def __init__(
        self, run: Run, programs: HostPrograms, requests: int, concurrency: int, seed: int
    ) -> None:
        self._run, self._programs = run, programs
        self._requests, self._concurrency, self._seed = requests, concurrency, seed
        self.rows: dict[str, list[Row]] = {}
        self.known: dict[str, dict[str, float]] = {}

    def load(self, name: str) -> None:
        """Send requests; record their outcome, and the bandwidths that the router knows then."""
        self._seed += 1
        router = self._programs.router
        cpu_s = cpu_seconds(self._programs)
        row = asyncio.run(measure(router, self._requests, self._concurrency, self._seed))
        cpu_s = cpu_seconds(self._programs) - cpu_s
        row = replace(row, cpu_ms=round(1e3 * cpu_s / self._requests, 1))
        self.rows.setdefault(name, []).append(row)
        self.known[name] = bandwidths(router)
        self._run.console.print(f"{name:24} {row}\n{'':24} {self.known[name]}")

    def compare(self, name: str, turns: int) -> None:
        """Send requests with and without d1, in turns, because the machine has other work."""
        for _ in range(turns):
            self._programs.signal(SLOW, signal.SIGSTOP)
            wait_for_pairs(self._programs, 2)
            time.sleep(SETTLE_S)
            self.load(f"{name}: without d1")
            self._programs.signal(SLOW, signal.SIGCONT)
            wait_for_pairs(self._programs, 4)
            time.sleep(SETTLE_S)
            self.load(name)

    def problems(self, name: str) -> list[str]:
        """Return the promises that did not hold."""
        with_d1, without = (
            statistics.median(row.requests_per_s for row in self.rows[which])
            for which in (name, f"{name}: without d1")
        )
        slowest_ms = max(row.max_ms for row in self.rows["slow link alone"])
        found = []
        if with_d1 < MIN_SHARE * without:
            found.append(f"{name}: {with_d1 / without:.2f} of the requests per second without d1")
        if max(row.max_ms for row in self.rows[name]) > slowest_ms:
            found.append(f"{name}: a request was slower than over the slow link alone")
        return found


def run(
    run: Run,
    rate: float = 400.0,
    slowness: float = 20.0,
    requests: int = 40,
    turns: int = 3,
    concurrency: int = 4,
    connector: str = "nixl",
    seed: int = 0,
) -> dict[str, object] | None:
    """Measure with d1 on a slow link and without d1, in turns, and over the slow link alone.

    Args:
        rate: Mbit/s of the nodes' links.
        slowness: the link of d1 has this fraction of the rate.
        requests: number of requests of each turn.
        turns: number of turns with and without d1.
        concurrency: number of open requests.
        connector: nixl or tls.
    """
    if reason := why_no_hosts():
        run.problems.append(reason)
        return None
    with Network(HOSTS, ["ipv4"]) as network, running(network, connector) as programs:
        for name in FAST:
            network.limit(name, rate * 1e6)
        network.limit(SLOW, rate * 1e6)
        start_node(programs, SLOW, connector)
        wait_for_pairs(programs, 4)
        site = Site(run, programs, requests, concurrency, seed)
        site.load("d1 as fast as d0")
        network.limit(SLOW, rate / slowness * 1e6)
        site.load("d1 just slowed down")
        site.compare("d1 slow", turns)
        programs.kill(SLOW)
        wait_for_pairs(programs, 2)
        start_node(programs, SLOW, connector)
        wait_for_pairs(programs, 4)
        site.compare("d1 slow from its start", turns)
        programs.kill("d0")
        wait_for_pairs(programs, 2)
        site.load("slow link alone")
    for name in ("d1 slow", "d1 slow from its start"):
        run.problems += site.problems(name)
    rows = {name: [asdict(row) for row in rows] for name, rows in site.rows.items()}
    return {"rows": rows, "mbit_per_s": site.known}
