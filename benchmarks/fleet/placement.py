"""Measure the router's microseconds per placement of a request, by policy and fleet size.

Every request has a new length. For three of ten requests, three tenths of the nodes have a part of
the prompt cached. Half of the nodes are prefill nodes, the others decode nodes; each pair has its
own bandwidth. Placed requests stay open for a while, so that loads differ between nodes. Wall time
includes the time that other processes take; CPU time does not.
"""

from __future__ import annotations

import collections
import random
import statistics
import time

from benchmarks.fleet.fleet_parts import make_fleet, make_loads, open_legs
from benchmarks.runner.run import Document, Run
from router.fleet.load.node_load import Account, NodeLoad
from router.policies import POLICIES
from router.policies.base import RouteQuery

SIZES = (16, 64, 512)
HIT_SHARE = 0.3
NUM_OPEN_PER_NODE = 4


def measure(name: str, num_nodes: int, num_decisions: int) -> dict[str, float]:
    """Return the median and the p99 of wall time and of CPU time per placement, in us."""
    draw = random.Random(1)
    prefills, decodes = make_loads(num_nodes // 2, num_nodes // 2, lambda: 0.0)
    fleet = make_fleet(prefills, decodes, lambda: draw.uniform(30e9, 41e9))
    loads = {load.engine_id: load for load in (*prefills, *decodes)}
    policy = POLICIES.load(name)()
    placed: collections.deque[list[tuple[NodeLoad, Account]]] = collections.deque()
    walls, cpus = [], []
    # The first requests are not measured, because they fill the fleet
    for number in range(num_decisions + num_nodes):
        query = make_query(draw, list(loads), number)
        wall, cpu = time.perf_counter(), time.thread_time()
        placement = policy.pick(query, fleet)
        cpus.append((time.thread_time() - cpu) * 1e6)
        walls.append((time.perf_counter() - wall) * 1e6)
        assert placement is not None
        placed.append(open_legs(placement, query, loads))
        if len(placed) > NUM_OPEN_PER_NODE * num_nodes:
            for load, account in placed.popleft():
                load.note_closed(account)
    return {
        "p50_us": _percentile(walls[num_nodes:], 50),
        "p99_us": _percentile(walls[num_nodes:], 99),
        "cpu_p50_us": _percentile(cpus[num_nodes:], 50),
        "cpu_p99_us": _percentile(cpus[num_nodes:], 99),
    }


def make_query(draw: random.Random, engine_ids: list[str], number: int) -> RouteQuery:
    num_tokens = draw.randint(64, 16_000)
    cached: dict[str, int] = {}
    if draw.random() < HIT_SHARE:
        holders = draw.sample(engine_ids, round(HIT_SHARE * len(engine_ids)))
        cached = {holder: 16 * draw.randint(1, num_tokens // 16) for holder in holders}
    return RouteQuery(
        num_prompt_tokens=num_tokens,
        max_tokens=draw.randint(16, 1024),
        session_id=f"s{number % 100}",
        now=1.0,
        find_cached_tokens=lambda: cached,
    )


def _percentile(samples: list[float], percent: int) -> float:
    return round(statistics.quantiles(samples, n=100, method="inclusive")[percent - 1], 1)


def run(run: Run, decisions: int = 3000) -> Document:
    """Measure every policy with fleets of each size."""
    results = {
        name: {str(size): measure(name, size, decisions) for size in SIZES}
        for name in POLICIES.names()
    }
    for name, rows in results.items():
        run.show(name, rows)
    shape = {"decisions": decisions, "hit_share": HIT_SHARE, "sizes": SIZES}
    return {"shape": shape, "results": results}
