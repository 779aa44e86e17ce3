"""Compare processes' descriptors, threads and memory before and after many faults.

A router, two prefill and two decode nodes with NIXL serve the demo model on this machine, to
requests with known answers. The first run stops the nodes p0 and d0 in turns. The second run, a
soak, causes a fault at regular intervals: p1 and d1 are killed and restarted, p0 and d0 are stopped
for a while. The descriptors, threads and memory of the survivors (the router, p0, d0) are compared
while no request runs. The exit code is 1 if they have grown.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import psutil

from baton.deployment.local_deployment import LocalDeployment
from benchmarks.faults.chaos_load import BROKEN, Load, make_cases, under_load
from benchmarks.faults.chaos_site import Site, demo_deployment, wait_until_free
from benchmarks.runner.environment import DEMO_MODEL
from benchmarks.runner.run import Run

SURVIVORS = ("router", "p0", "d0")
STANDSTILL_S = 3.0
# Number of pauses of the load before counting begins, because processes open some files only once.
NUM_WARM_UP = 2
CONCURRENCY = 6
NUM_LOOKS = 5
SAMPLE_S = 5.0
MAX_GROWTH = {"descriptors": 0, "threads": 0}
MAX_GROWTH_MIB = 32.0
READY_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Usage:
    """A process's number of descriptors, threads and bytes of memory at one moment."""

    descriptors: int
    threads: int
    resident_mib: float

    @classmethod
    def of(cls, pid: int) -> Usage:
        """Read the usage of a living process."""
        process = psutil.Process(pid)
        resident_mib = round(process.memory_info().rss / 2**20, 1)
        return cls(process.num_fds(), process.num_threads(), resident_mib)


def look(site: Site) -> dict[str, Usage]:
    """Read the usage of all survivors (router, p0 and d0) now."""
    return {name: Usage.of(site.deployment.child(name).process.pid) for name in SURVIVORS}


def open_files(site: Site) -> dict[str, Counter[str]]:
    """Count each survivor's open files and sockets; a socket is named by its other end."""
    found = {}
    for name in SURVIVORS:
        pid = site.deployment.child(name).process.pid
        links = [str(one.readlink()) for one in Path(f"/proc/{pid}/fd").iterdir()]
        files = Counter(link for link in links if not link.startswith("socket:"))
        for one in psutil.Process(pid).net_connections("all"):
            ends = [
                str(end.port) if hasattr(end, "port") else end for end in (one.laddr, one.raddr)
            ]
            files[f"{one.family.name} {one.status} {ends[0]} {ends[1]}"] += 1
        found[name] = files
    return found


async def look_at_rest(site: Site) -> dict[str, Usage]:
    """Wait until no request runs, and return the survivors' lowest usage over some seconds."""
    await site.repair()
    await wait_until_free(site)
    looks = []
    for _ in range(NUM_LOOKS):  # the connection of this client adds descriptors to the router
        await asyncio.sleep(1.0)
        looks.append(look(site))
    return {name: min((one[name] for one in looks), key=order) for name in SURVIVORS}


def order(usage: Usage) -> tuple[int, int, float]:
    """Return a sort key: fewest descriptors and threads first."""
    return usage.descriptors, usage.threads, usage.resident_mib


async def stand_still(site: Site, name: str) -> None:
    """Stop a node for longer than the timeouts of the router and its peers."""
    await site.stand_still(name, STANDSTILL_S)
    await site.wait_ready()


async def stand_still_often(site: Site, number: int) -> list[str]:
    """Stop p0 and d0 in turns, ``number`` times."""
    for index in range(number):
        await stand_still(site, SURVIVORS[1 + index % 2])
    return ["stands still"] * number


async def soak(site: Site, minutes: float, every_s: float) -> list[str]:
    """Cause a fault at regular intervals; return the list of faults."""
    begun_at, done = time.monotonic(), list[str]()
    while (due := (len(done) + 1) * every_s) < minutes * 60:
        await asyncio.sleep(max(0.0, begun_at + due - time.monotonic()))
        name = ("p1", "d0", "d1", "p0")[len(done) % 4]
        if name in SURVIVORS:
            await stand_still(site, name)
            done.append("stands still")
        else:
            site.deployment.child(name).process.kill()
            await site.restart(name)
            await site.wait_ready()
            done.append("killed")
    await asyncio.sleep(max(0.0, begun_at + minutes * 60 - time.monotonic()))
    return done


async def sample(site: Site, samples: list[dict[str, Usage]]) -> None:
    """Append the survivors' usage to ``samples`` at intervals, until cancelled."""
    while True:
        await asyncio.sleep(SAMPLE_S)
        samples.append(look(site))


async def measure(site: Site, what: str, options: Options) -> dict[str, object]:
    """Do the run ``what`` under load; compare the survivors' usage before and after it."""
    await stand_still_often(site, NUM_WARM_UP)
    await warm_up(site)
    before, files = await look_at_rest(site), open_files(site)
    samples: list[dict[str, Usage]] = []
    load = Load(site.address, site.cases, CONCURRENCY, options.seed, leaving=0.05)
    async with under_load(load):
        sampling = asyncio.create_task(sample(site, samples))
        if what == "standstills":
            faults = await stand_still_often(site, options.standstills)
        else:
            faults = await soak(site, options.minutes, options.every)
        sampling.cancel()
    after, opened = await look_at_rest(site), open_files(site)
    found: dict[str, object] = {
        "faults": dict(Counter(faults)),
        "requests": dict(sorted(load.counts().items())),
        "details": sorted(
            {a.detail for a in load.answers if a.outcome not in ("complete", "left")}
        ),
        "before": {name: asdict(one) for name, one in before.items()},
        "after": {name: asdict(one) for name, one in after.items()},
        "resident_mib_by_quarter": {
            name: [round(statistics.median(part), 1) for part in quarters(samples, name)]
            for name in SURVIVORS
        },
        "grown": grown(before, after),
        "opened": {name: sorted((now - files[name]).elements()) for name, now in opened.items()},
        "closed": {name: sorted((files[name] - now).elements()) for name, now in opened.items()},
        "broken": {name: load.counts()[name] for name in BROKEN if load.counts()[name]},
    }
    return found


async def warm_up(site: Site) -> None:
    """Send requests for a while, because the first requests make processes grow."""
    load = Load(site.address, site.cases, CONCURRENCY, 0, leaving=0.0, most=200)
    await load.run()


def quarters(samples: list[dict[str, Usage]], name: str) -> list[list[float]]:
    """Divide samples of a process's resident memory into four parts of equal length."""
    values = [one[name].resident_mib for one in samples]
    size = max(1, len(values) // 4)
    return [part for start in range(0, 4 * size, size) if (part := values[start : start + size])]


def grown(before: dict[str, Usage], after: dict[str, Usage]) -> list[str]:
    """List the figures that have grown by more than their limits."""
    found = []
    for name in SURVIVORS:
        for kind, most in MAX_GROWTH.items():
            growth = getattr(after[name], kind) - getattr(before[name], kind)
            if growth > most:
                found.append(f"{name}: {growth} {kind} more")
        growth_mib = after[name].resident_mib - before[name].resident_mib
        if growth_mib > MAX_GROWTH_MIB:
            found.append(f"{name}: {growth_mib:.1f} MiB more")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Which runs to do, and how long.

    Attributes:
        every: seconds between two faults.
        only: name of the run to do; empty: both.
    """

    standstills: int = 20
    minutes: float = 10.0
    every: float = 20.0
    seed: int = 1
    only: Literal["", "standstills", "soak"] = ""


def run(run: Run, options: Options) -> None:
    """Do each run on a fresh deployment."""
    cases = make_cases(str(DEMO_MODEL), 32, options.seed)
    for what in ("standstills", "soak"):
        if options.only not in ("", what):
            continue
        with LocalDeployment(demo_deployment(2)) as deployment:
            deployment.wait_ready(READY_TIMEOUT_S)
            site = Site(deployment, cases, options.seed)
            found = asyncio.run(measure(site, what, options))
        run.console.print(f"{what}:", found)
        run.problems += [f"{what}: {name}" for name in ("grown", "broken") if found[name]]
        run.save(found, f"long_run_{what}")
