"""Measure a router with many nodes: joining, beats, and a restart with many cached blocks.

Simulated nodes, half of them prefill nodes and half decode nodes, run in one process, each with a
connection of its own to a real router process. When the router restarts, all nodes join again at
once, report all pairs, and send the hashes of all blocks in their prefix caches. Compare CPU
seconds of the router, because the simulated nodes need about as much of the machine.
"""

from __future__ import annotations

import asyncio
import random
import re
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from typing import Any

import psutil
import uvloop

from baton.processes.free_address import free_address
from benchmarks.runner.environment import DEMO_MODEL, ROOT
from benchmarks.runner.own_process import call_words, own_environment
from benchmarks.runner.programs import Programs
from benchmarks.runner.run import Document, Run
from sim_node.cluster import SimCluster

HASH_BYTES = 32
QUIET_S, STEADY_S = 1.0, 5.0
LIMIT_S = 300.0
# The router counts as quiet again if it needs at most this multiple of its CPU time before.
QUIET_FACTOR = 1.5


async def serve_nodes(address: str, num_nodes: int, num_blocks: int) -> None:
    """Join all nodes and print the seconds; fill their caches on a line of standard input."""
    begin = time.perf_counter()
    half = num_nodes // 2
    cluster = SimCluster(
        address, str(DEMO_MODEL), num_prefill=half, num_decode=half, join_timeout_s=LIMIT_S
    )
    async with cluster:
        print(f"joined {time.perf_counter() - begin:.2f}", flush=True)
        running = asyncio.create_task(cluster.run())
        await asyncio.to_thread(sys.stdin.readline)
        for name in cluster.names:
            draw, pool = random.Random(name), cluster.engine(name).block_pool
            block_ids = pool.allocate(num_blocks)
            assert block_ids is not None
            pool.cache(block_ids, [draw.randbytes(HASH_BYTES) for _ in block_ids], None)
            pool.release(reversed(block_ids))
            await asyncio.sleep(0)
        print("filled", flush=True)
        await running


def run_nodes(address: str, num_nodes: str, num_blocks: str) -> None:
    """Run the simulated nodes in this process until it is ended."""
    uvloop.run(serve_nodes(address, int(num_nodes), int(num_blocks)))


@dataclass(slots=True)
class Fleet:
    """A router process, and the process of the simulated nodes."""

    programs: Programs
    address: str
    http_address: str
    num_nodes: int

    def start_router(self) -> None:
        words = ("--listen", self.address, "--http-listen", self.http_address)
        self.programs.start("router", "router", "--model", DEMO_MODEL, *words)

    @property
    def router(self) -> psutil.Process:
        return psutil.Process(self.programs.processes["router"].pid)

    def cpu_s(self) -> float:
        """Return the CPU seconds that the router has used."""
        return float(sum(self.router.cpu_times()[:2]))

    def rss_mib(self) -> float:
        return round(self.router.memory_info().rss / 2**20, 1)

    def num_pairs(self) -> int:
        """Return the number of connected pairs by the router's metrics; 0 if it does not answer."""
        try:
            with urllib.request.urlopen(f"http://{self.http_address}/metrics", timeout=60) as page:
                text = page.read().decode()
        except OSError:
            return 0
        found = re.search(r'^baton_router_pairs\{state="connected"\} (\S+)$', text, re.MULTILINE)
        return int(float(found[1])) if found else 0

    def wait_for_pairs(self) -> float:
        """Wait until all pairs are connected; return the seconds."""
        begin = time.monotonic()
        while self.num_pairs() < (self.num_nodes // 2) ** 2:
            if time.monotonic() > begin + LIMIT_S:
                raise TimeoutError(
                    f"{self.num_pairs()} pairs\n" + self.programs.log("router")[-2000:]
                )
            time.sleep(0.25)
        return time.monotonic() - begin

    def wait_until_quiet(self, steady: float) -> None:
        """Wait until the router uses little more than ``steady`` CPU seconds per second again."""
        give_up_at = time.monotonic() + LIMIT_S
        while time.monotonic() < give_up_at:
            if self.cpu_share(QUIET_S) < QUIET_FACTOR * steady + 0.02:
                return
        raise TimeoutError("the router stays busy")

    def cpu_share(self, seconds: float) -> float:
        """Return the router's CPU seconds per second."""
        before, begin = self.cpu_s(), time.monotonic()
        time.sleep(seconds)
        return (self.cpu_s() - before) / (time.monotonic() - begin)


def measure(num_nodes: int, num_blocks: int) -> Document:
    """Measure one number of nodes, each with this number of cached blocks."""
    with Programs() as programs:
        fleet = Fleet(programs, free_address(), free_address(), num_nodes)
        fleet.start_router()
        words = call_words(f"{__name__}:run_nodes", fleet.address, num_nodes, num_blocks)
        nodes = subprocess.Popen(
            words, cwd=ROOT, env=own_environment(), text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            return _play(fleet, nodes, num_blocks)
        finally:
            nodes.kill()
            nodes.wait()


def _play(fleet: Fleet, nodes: subprocess.Popen[str], num_blocks: int) -> dict[str, Any]:
    assert nodes.stdin is not None
    assert nodes.stdout is not None
    joined = nodes.stdout.readline().split()
    if joined[:1] != ["joined"]:
        raise TimeoutError(fleet.programs.log("router")[-2000:])
    print_stage(fleet, f"joined after {joined[1]} s")
    fleet.wait_for_pairs()
    join_cpu_s = fleet.cpu_s()
    print_stage(fleet, "all pairs are connected")
    steady = fleet.cpu_share(STEADY_S)
    rss_mib = fleet.rss_mib()
    nodes.stdin.write("fill\n")
    nodes.stdin.flush()
    nodes.stdout.readline()
    print_stage(fleet, "caches are filled")
    fleet.wait_until_quiet(steady)
    fill_cpu_s, full_mib = fleet.cpu_s(), fleet.rss_mib()
    fleet.programs.kill("router")
    begin = time.monotonic()
    fleet.start_router()
    fleet.wait_for_pairs()
    paired_s = time.monotonic() - begin
    print_stage(fleet, f"all pairs are connected {paired_s:.1f} s after the restart")
    fleet.wait_until_quiet(steady)
    return {
        "nodes": fleet.num_nodes,
        "blocks": fleet.num_nodes * num_blocks,
        "join_s": float(joined[1]),
        "join_cpu_s": round(join_cpu_s, 2),
        "steady_cpu_per_node_ms_per_s": round(1e3 * steady / fleet.num_nodes, 3),
        "rss_mib": rss_mib,
        "fill_cpu_s": round(fill_cpu_s - join_cpu_s - steady * STEADY_S, 2),
        "rss_filled_mib": full_mib,
        "restart_paired_s": round(paired_s, 2),
        "restart_quiet_s": round(time.monotonic() - begin - QUIET_S, 2),
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
