"""Measure what a router loses by sharing its core with a small program, a large one, or a router.

Two routers on one port and one core make fewer tokens per core-second than one router. If a program
that only computes costs a router as much, the loss comes from switching processes on the core, and
not from Baton. Each row counts only the CPU time of routers, and not that of the other program.
"""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.router.router_site import PARTS, Site, measure_rate, router_site, running

# Program that shares the router's core -> MiB that it reads again and again; None: no program
NEIGHBORS: dict[str, float | None] = {"alone": None, "beside 0 MiB": 0.0, "beside 64 MiB": 64.0}
TWO, OWN_CORES = "2 routers, one core", "2 routers, own cores"
MIN_CORES = 4  # two routers, their nodes, and the client


def compute(num_mib: str) -> None:
    """Compute without end on memory of this size, until this process is killed."""
    memory = np.ones(max(int(float(num_mib) * 2**17), 8))
    while True:
        memory.sum()


@contextlib.contextmanager
def neighbor(num_mib: float | None) -> Iterator[None]:
    """Run a computing program on the router's core; None: no program."""
    if num_mib is None:
        yield
        return
    with running([(0, [*PARTS, f"{__name__}:compute", str(num_mib)])]):
        yield


def place_routers(site: Site) -> None:
    """Give each of two routers a core, their nodes a third, and leave core 1 to the client."""
    routers = {router.pid: core for router, core in zip(site.measured, (0, 2), strict=True)}
    for child in psutil.Process().children():
        for thread in child.threads():
            os.sched_setaffinity(thread.id, {routers.get(child.pid, 3)})


async def measure_sharing(
    model: Path, *, num_streams: int, seconds: float, rounds: int
) -> dict[str, Any]:
    """Measure each way to share a core in turns, with as many tokens as nodes can send."""

    async def rate(site: Site) -> dict[str, float]:
        return await measure_rate(site, is_relay=False, num_streams=num_streams, seconds=seconds)

    rows: list[dict[str, Any]] = []
    for number in range(rounds):
        with router_site(model, 0.0) as one:
            for name, num_mib in NEIGHBORS.items():
                with neighbor(num_mib):
                    rows.append({"subject": name, "round": number, **await rate(one)})
                print(rows[-1], flush=True)
        with router_site(model, 0.0, 2) as two:
            rows.append({"subject": TWO, "round": number, **await rate(two)})
            print(rows[-1], flush=True)
            if (os.cpu_count() or 1) >= MIN_CORES:
                place_routers(two)
                rows.append({"subject": OWN_CORES, "round": number, **await rate(two)})
                print(rows[-1], flush=True)
    return {"rows": rows, "relative_to_alone": relative_to_alone(rows)}


def relative_to_alone(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return each subject's median tokens per core-second, divided by those of a router alone."""
    rates: dict[str, list[float]] = {}
    for row in rows:
        rates.setdefault(row["subject"], []).append(row["tokens_per_core_s"])
    alone = statistics.median(rates["alone"])
    return {name: round(statistics.median(found) / alone, 3) for name, found in rates.items()}
