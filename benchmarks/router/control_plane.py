"""Measure a router with many nodes: joins at once, beats, and a restart with many cached blocks.

Simulated nodes, half of them prefill nodes and half decode nodes, run in one process, each with a
connection of its own to a real router process. All nodes join at once. When the router restarts,
all nodes join again at once, report the peers to which they are connected, and send the hashes of
all blocks in their prefix caches. The simulated nodes need about as much of the machine as the
router.
"""

from __future__ import annotations

import asyncio
import gc
import random
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass, field
from typing import IO, Any

import psutil
import uvloop

from baton.processes.free_address import free_address
from benchmarks.runner.environment import DEMO_MODEL, ROOT
from benchmarks.runner.own_process import call_words, own_environment
from benchmarks.runner.programs import Programs
from benchmarks.runner.run import Document, Run
from sim_node.cluster import SimCluster
from sim_node.options import SimOptions

HASH_BYTES = 32
# A metrics page takes about 50 us of the router per node. Until the router knows `FAR_SHARE` of the
# fleet, the benchmark waits for `FAR_POLL_S_PER_NODE` seconds per node between two readings.
POLL_S, FAR_POLL_S_PER_NODE, FAR_SHARE = 0.5, 0.001, 0.7
STEADY_S, FILL_PAUSE_S = 5.0, 0.01
LIMIT_S, FILL_LIMIT_S = 60.0, 240.0


async def serve_nodes(address: str, num_nodes: int, num_blocks: int) -> None:
    """Make all nodes, print a line, and join; fill the caches when standard input has a line."""
    half = num_nodes // 2
    cluster = SimCluster(
        address, str(DEMO_MODEL), num_prefill=half, num_decode=half, join_timeout_s=LIMIT_S,
        options=SimOptions(num_blocks=num_blocks + 1), max_joining=num_nodes,
    )  # fmt: skip
    starting = asyncio.create_task(cluster.start())
    for _ in range(3):  # rounds of the event loop in which all nodes are made
        await asyncio.sleep(0)
    # All nodes are in this process, so the garbage collector would visit millions of blocks.
    gc.freeze()
    print("made", flush=True)
    try:
        await starting
        running = asyncio.create_task(cluster.run())
        await asyncio.to_thread(sys.stdin.readline)
        for name in cluster.names:
            draw, pool = random.Random(name), cluster.engine(name).block_pool
            block_ids = pool.allocate(num_blocks)
            assert block_ids is not None
            pool.cache(block_ids, [draw.randbytes(HASH_BYTES) for _ in block_ids], None)
            pool.release(reversed(block_ids))
            # Leave time for beats, or the router takes the nodes for dead.
            await asyncio.sleep(FILL_PAUSE_S)
        await running
    finally:
        await cluster.stop()


def run_nodes(address: str, num_nodes: str, num_blocks: str) -> None:
    """Run the simulated nodes in this process until it is ended."""
    uvloop.run(serve_nodes(address, int(num_nodes), int(num_blocks)))


@dataclass(slots=True)
class Fleet:
    """A router process, and the process of the simulated nodes.

    Attributes:
        num_blocks: number of cached blocks of each node.
        nodes: the process of the simulated nodes.
        errors: file with the warnings and errors of this process.
    """

    programs: Programs
    errors: IO[str]
    address: str
    http_address: str
    num_nodes: int
    num_blocks: int
    nodes: subprocess.Popen[str] = field(init=False)

    def start_nodes(self) -> None:
        words = call_words(f"{__name__}:run_nodes", self.address, self.num_nodes, self.num_blocks)
        self.nodes = subprocess.Popen(
            words, cwd=ROOT, env=own_environment(), text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors,
        )  # fmt: skip

    def start_router(self) -> None:
        words = ("--listen", self.address, "--http-listen", self.http_address)
        self.programs.start("router", "router", "--model", DEMO_MODEL, *words)

    @property
    def router(self) -> psutil.Process:
        return psutil.Process(self.programs.processes["router"].pid)

    def cpu_s(self) -> float:
        """Return the CPU seconds that the router has used."""
        return cpu_s_of(self.router)

    def rss_mib(self) -> float:
        return round(self.router.memory_info().rss / 2**20, 1)

    def count(self) -> dict[str, int]:
        """Return the numbers of connected pairs and of known blocks; 0 while no router answers."""
        try:
            with urllib.request.urlopen(f"http://{self.http_address}/metrics", timeout=60) as page:
                text = page.read().decode()
        except OSError:
            text = ""
        names = {"pairs": r'pairs\{state="connected"\}', "blocks": "prefix_index_blocks"}
        found = {
            name: re.search(rf"^baton_router_{pattern} (\S+)$", text, re.MULTILINE)
            for name, pattern in names.items()
        }
        return {name: int(float(one[1])) if one else 0 for name, one in found.items()}

    def router_answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self.http_address}/metrics", timeout=60):
                return True
        except OSError:
            return False

    def wait_until_known(self, *names: str, limit_s: float = LIMIT_S) -> dict[str, float]:
        """Wait until all pairs or blocks are known; return after how many seconds each was.

        Raises:
            RuntimeError: the process of the simulated nodes has ended.
            TimeoutError: they were not known within ``limit_s``.
        """
        begin, after = time.monotonic(), dict[str, float]()
        every = {"pairs": (self.num_nodes // 2) ** 2, "blocks": self.num_nodes * self.num_blocks}
        while len(after) < len(names):
            counts, now = self.count(), time.monotonic() - begin
            for name in names:
                if counts[name] >= every[name]:
                    after.setdefault(name, round(now, 2))
            if self.nodes.poll() is not None:
                raise RuntimeError(f"the nodes have ended, {counts}:\n{self.last_errors()}")
            if now > limit_s:
                log = self.programs.log("router")[-2000:]
                raise TimeoutError(f"{counts}\n{self.last_errors()}\n{log}")
            is_far = any(counts[name] < FAR_SHARE * every[name] for name in names)
            far_poll_s = max(POLL_S, FAR_POLL_S_PER_NODE * self.num_nodes)
            time.sleep(far_poll_s if is_far else POLL_S)
        return after

    def last_errors(self) -> str:
        """Return the last warnings and errors of the simulated nodes."""
        self.errors.seek(0)
        return self.errors.read()[-4000:]


def cpu_s_of(process: psutil.Process) -> float:
    return float(sum(process.cpu_times()[:2]))


def cpu_shares(*processes: psutil.Process) -> list[float]:
    """Return the CPU seconds per second that the idle processes use."""
    before, begin = [cpu_s_of(one) for one in processes], time.monotonic()
    time.sleep(STEADY_S)
    wall_s = time.monotonic() - begin
    return [(cpu_s_of(one) - cpu_s) / wall_s for one, cpu_s in zip(processes, before, strict=True)]


def measure(num_nodes: int, num_blocks: int) -> Document:
    """Measure one number of nodes, each with this number of cached blocks."""
    with Programs() as programs, tempfile.TemporaryFile("w+") as errors:
        fleet = Fleet(programs, errors, free_address(), free_address(), num_nodes, num_blocks)
        fleet.start_router()
        while not fleet.router_answers():
            time.sleep(POLL_S)
        fleet.start_nodes()
        try:
            return _play(fleet, fleet.nodes)
        finally:
            fleet.nodes.kill()
            fleet.nodes.wait()


def _play(fleet: Fleet, nodes: subprocess.Popen[str]) -> dict[str, Any]:
    assert nodes.stdin is not None
    assert nodes.stdout is not None
    empty_mib, empty_cpu_s = fleet.rss_mib(), fleet.cpu_s()
    nodes.stdout.readline()
    print_stage(fleet, "made")
    joined = fleet.wait_until_known("pairs")
    join_cpu_s = fleet.cpu_s() - empty_cpu_s
    print_stage(fleet, f"all pairs are connected after {joined['pairs']} s")
    share, nodes_share = cpu_shares(fleet.router, psutil.Process(nodes.pid))
    paired_mib = fleet.rss_mib()
    nodes.stdin.write("fill\n")
    nodes.stdin.flush()
    filled = fleet.wait_until_known("blocks", limit_s=FILL_LIMIT_S)
    print_stage(fleet, f"caches are filled after {filled['blocks']} s")
    full_mib = fleet.rss_mib()
    fleet.programs.kill("router")
    fleet.start_router()
    known = fleet.wait_until_known("pairs", "blocks")
    print_stage(fleet, f"known again after {known} s")
    num_nodes = fleet.num_nodes
    return {
        "nodes": num_nodes,
        "pairs": (num_nodes // 2) ** 2,
        "blocks": num_nodes * fleet.num_blocks,
        "join_s": joined["pairs"],
        "join_cpu_s": round(join_cpu_s, 2),
        "steady_cpu_ms_per_node_and_s": round(1e3 * share / num_nodes, 3),
        "node_steady_cpu_ms_per_s": round(1e3 * nodes_share / num_nodes, 3),
        "rss_mib": {"empty": empty_mib, "paired": paired_mib, "with blocks": full_mib},
        "rss_kib_per_node": round(1024 * (paired_mib - empty_mib) / num_nodes, 1),
        "rss_bytes_per_block": round(
            2**20 * (full_mib - paired_mib) / (num_nodes * fleet.num_blocks), 1
        ),
        "restart_s": known,
        "restart_cpu_s": round(fleet.cpu_s(), 2),
        "restart_rss_mib": fleet.rss_mib(),
    }


def print_stage(fleet: Fleet, what: str) -> None:
    """Print what has happened, and the router's CPU seconds and memory so far."""
    print(f"{fleet.num_nodes} nodes: {what}; {fleet.cpu_s():.1f} CPU s, {fleet.rss_mib()} MiB",
          flush=True)  # fmt: skip


def run(run: Run, nodes: int = 1000, blocks: int = 2000) -> Document:
    """Measure a tenth of the nodes, and then all.

    Args:
        nodes: number of simulated nodes.
        blocks: number of cached blocks of each node.
    """
    rows = {}
    for number in (nodes // 10, nodes):
        rows[f"{number} nodes"] = row = measure(number, blocks)
        run.console.print(row)
    return {"rows": rows}
