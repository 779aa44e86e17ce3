"""Measure whether KV stays at its site: nodes at both ends of a slow trunk, a router at one end.

Hosts are network namespaces of this machine (Linux, root, iproute2). Client, router, p0 and d0 are
at home; p1 and d1 are far. The trunk between the sites has a fraction of the rate of the hosts'
links. No node has a label: the policy `cost` knows the measured bandwidth of each pair of nodes.
While home has room, no KV may cross the trunk. If home is full, KV must cross the trunk rather than
wait for long.

    home has room           four open requests, two prefill nodes and two decode nodes
    home is full            without p1, and more open requests than d0 has room for
    home is full, no trunk  as above, with d1 stopped
    trunk alone             without d0
"""

from __future__ import annotations

import asyncio
import signal
import time
from dataclasses import asdict

from baton import SamplingParams
from benchmarks.hosts.slow_link import (
    SETTLE_S,
    Row,
    bandwidths,
    measure,
    running,
    wait_for_pairs,
)
from benchmarks.runner.run import Run
from tests.hosts.network import Network, why_no_hosts

NEAR, FAR = ("p0", "d0"), ("p1", "d1")
HOSTS = ("client", "router", *NEAR, *FAR)
NUM_BLOCKS = 110  # room for three requests
SHORT = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
LONG = SamplingParams(max_tokens=96, temperature=0.0, ignore_eos=True)
OPEN_REQUESTS, MORE_OPEN_REQUESTS = 4, 10


def num_crossing(row: Row) -> int:
    """Return the number of requests whose KV was sent over the trunk."""
    return sum(number for pair, number in row.by_pair.items() if pair not in ("p0>d0", "p1>d1"))


def run(
    run: Run,
    rate: float = 400.0,
    slowness: float = 20.0,
    requests: int = 40,
    connector: str = "nixl",
    seed: int = 0,
) -> dict[str, object] | None:
    """Measure all loads.

    Args:
        rate: Mbit/s of the nodes' links.
        slowness: the trunk has this fraction of the rate.
        requests: number of requests of each load.
        connector: nixl or tls.
    """
    if reason := why_no_hosts():
        run.problems.append(reason)
        return None
    rows: dict[str, Row] = {}
    known: dict[str, dict[str, float]] = {}
    with Network(HOSTS, ["ipv4"], far=FAR) as network:
        network.limit_trunk(rate / slowness * 1e6)
        for name in (*NEAR, *FAR):
            network.limit(name, rate * 1e6)
        with running(network, connector, (*NEAR, *FAR), NUM_BLOCKS) as programs:

            def load(
                name: str, concurrency: int, params: SamplingParams, number: int = requests
            ) -> None:
                time.sleep(SETTLE_S)
                draw = seed + len(rows)
                row = asyncio.run(measure(programs.router, number, concurrency, draw, params))
                rows[name], known[name] = row, bandwidths(programs.router)
                run.console.print(f"{name:24} {row}\n{'':24} {known[name]}")

            load("home has room", OPEN_REQUESTS, SHORT)
            programs.kill("p1")
            wait_for_pairs(programs, 2)
            load("home is full", MORE_OPEN_REQUESTS, LONG)
            programs.signal("d1", signal.SIGSTOP)
            wait_for_pairs(programs, 1)
            load("home is full, no trunk", MORE_OPEN_REQUESTS, LONG)
            programs.signal("d1", signal.SIGCONT)
            wait_for_pairs(programs, 2)
            programs.kill("d0")
            wait_for_pairs(programs, 1)
            load("trunk alone", OPEN_REQUESTS, SHORT, requests // 4)
    crossing = {name: num_crossing(row) for name, row in rows.items()}
    if crossing["home has room"]:
        run.problems.append(f"{crossing['home has room']} requests left home, which had room")
    if not crossing["home is full"]:
        run.problems.append("no request left home, which was full")
    return {
        "rows": {name: asdict(row) for name, row in rows.items()},
        "crossing": crossing,
        "mbit_per_s": known,
    }
