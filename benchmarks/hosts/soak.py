"""Cause a fault every 20 s under mixed load; exit 1 if a program's memory or handles keep growing.

A client, a router, two prefill nodes and two decode nodes run on hosts of their own, which are
network namespaces of this machine (Linux, root, iproute2). Faults in turns: p1 or d1 is killed and
restarted, p0 or d0 is stopped for 3 s, one direction between two hosts is cut for 3 s, the link of
a host is down for 3 s. Memory, descriptors and threads of every program are sampled. In the second
half of the run, the figures of the programs that are never restarted (router, p0, d0) must be flat.
At the end, all blocks must be free, and every reference to a block must have an owner.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import psutil

from benchmarks.faults.chaos_load import BROKEN, HUNG_S, Load, make_cases, under_load
from benchmarks.faults.chaos_site import held_blocks
from benchmarks.faults.long_run import Usage
from benchmarks.hosts.faults import (
    NODES,
    ROUTER,
    Site,
    all_are_paired,
    find_fault,
    running_site,
)
from benchmarks.hosts.partitions import RECOVERY_TIMEOUT_S, cause, unowned_blocks
from benchmarks.hosts.soak_plot import draw_soak
from benchmarks.runner.environment import DEMO_MODEL
from benchmarks.runner.run import Run
from tests.hosts.network import why_no_hosts
from tests.hosts.programs import HostPrograms

SURVIVORS = (ROUTER, "p0", "d0")
FAULT_S, SAMPLE_S = 3.0, 2.0
CONCURRENCY, NUM_CASES, LEAVING = 6, 32, 0.05
FREE_TIMEOUT_S = 15.0
READY_TIMEOUT_S = 60.0
# Limits of the growth from the third to the fourth quarter. The numbers of descriptors and threads
# depend on which connections are open at the moment.
MAX_GROWTH = {"resident_mib": 4.0, "descriptors": 2.0, "threads": 1.0}
# Maximum number of a program's descriptors above its median. A restart ends a leak, so the quarters
# of a restarted program may be equal in spite of a leak.
MAX_PEAK_DESCRIPTORS = 15


@dataclass(frozen=True, slots=True)
class Sample:
    """The usage of all running programs, ``at_s`` seconds after the load began."""

    at_s: float
    usage: dict[str, Usage]


def look(programs: HostPrograms, begun_at: float) -> Sample:
    """Return the present usage of all running programs."""
    usage = {}
    for name, process in list(programs.processes.items()):
        try:
            # the program is a child of the process that enters its host
            child = psutil.Process(process.pid).children()[0]
            usage[name] = Usage.of(child.pid)
        except (psutil.Error, IndexError):  # the process was just killed
            continue
    return Sample(round(time.monotonic() - begun_at, 2), usage)


async def sample(programs: HostPrograms, begun_at: float, samples: list[Sample]) -> None:
    """Append the usage of all programs to ``samples`` at intervals, until cancelled."""
    while True:
        samples.append(await asyncio.to_thread(look, programs, begun_at))
        await asyncio.sleep(SAMPLE_S)


class Faults:
    """The faults of a soak, one after another in a fixed order."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self.done: list[tuple[float, str]] = []
        self._in_turn = itertools.cycle(self._all())

    def _all(self) -> list[tuple[str, Callable[[], Awaitable[None]]]]:
        def of(name: str) -> tuple[str, Callable[[], Awaitable[None]]]:
            return name, partial(cause, self._site, find_fault(name), FAULT_S)

        return [
            ("p1 killed", partial(self._restart, "p1")),
            of("p0>d0"),
            of("d0 stopped"),
            of("d0>router"),
            ("d1 killed", partial(self._restart, "d1")),
            of("p0 link"),
            of("p0 stopped"),
            of("d0>p0"),
        ]

    async def run(self, begun_at: float, seconds: float, every_s: float) -> None:
        """Cause a fault at regular intervals until ``seconds`` have passed."""
        due = every_s
        while due < seconds - every_s / 2:
            await asyncio.sleep(max(0.0, begun_at + due - time.monotonic()))
            name, cause = next(self._in_turn)
            self.done.append((round(time.monotonic() - begun_at, 2), name))
            print(f"{self.done[-1][0]:7.1f} s: {name}", flush=True)
            await cause()
            due += every_s
        await asyncio.sleep(max(0.0, begun_at + seconds - time.monotonic()))

    async def _restart(self, name: str) -> None:
        await asyncio.to_thread(self._site.programs.kill, name)
        await asyncio.to_thread(self._site.start_node, name)


def quarter_medians(samples: list[Sample], name: str, figure: str) -> list[float]:
    """Return the medians of a program's figure in the four quarters of the run.

    With fewer than four samples, quarters share samples; without samples, all medians are NaN.
    """
    values = [getattr(one.usage[name], figure) for one in samples if name in one.usage]
    size = max(1, len(values) // 4)
    starts = [quarter * len(values) // 4 for quarter in range(4)]
    return [statistics.median(values[start : start + size] or [math.nan]) for start in starts]


def growth(samples: list[Sample]) -> list[str]:
    """List the figures that grew in the second half by more than their limits."""
    found = []
    for name, (figure, most) in itertools.product(SURVIVORS, MAX_GROWTH.items()):
        *_, third, fourth = quarter_medians(samples, name, figure)
        if fourth - third > most:
            found.append(f"{name}: {figure} {third:g} -> {fourth:g}")
    return found


def peaks(samples: list[Sample]) -> list[str]:
    """List the programs that had many more descriptors at some time than their median."""
    found = []
    for name in sorted({name for one in samples for name in one.usage}):
        counts = [one.usage[name].descriptors for one in samples if name in one.usage]
        median, most = statistics.median(counts), max(counts)
        if most > median + MAX_PEAK_DESCRIPTORS:
            found.append(f"{name}: {median:g} descriptors at most times, {most} at some")
    return found


async def wait_until_whole(site: Site) -> str:
    """Wait until all pairs are connected and all blocks are free; return what is not, or ""."""
    give_up_at = time.monotonic() + RECOVERY_TIMEOUT_S + FREE_TIMEOUT_S
    while time.monotonic() < give_up_at:
        if await asyncio.to_thread(all_are_paired, site.router):
            held = await asyncio.to_thread(held_blocks, site.router, set(NODES))
            if not held:
                return ""
        await asyncio.sleep(0.2)
    return held_blocks(site.router, set(NODES)) or "not all pairs are connected"


async def soak(
    site: Site, faults: Faults, seconds: float, every_s: float, seed: int
) -> tuple[Load, list[Sample]]:
    """Run load and faults for some seconds; return the answers and the samples."""
    load = Load(
        site.router, site.cases, CONCURRENCY, seed, leaving=LEAVING, patience_s=FAULT_S + HUNG_S
    )
    samples: list[Sample] = []
    async with under_load(load):
        begun_at = time.monotonic()
        sampling = asyncio.create_task(sample(site.programs, begun_at, samples))
        await faults.run(begun_at, seconds, every_s)
        sampling.cancel()
    return load, samples


def run(
    run: Run,
    seconds: float = 600.0,
    every: float = 20.0,
    connector: str = "nixl",
    seed: int = 0,
    plot: str = "build/soak.svg",
    skip: bool = False,
) -> dict[str, object] | None:
    """Run the soak, and write the plot.

    Args:
        seconds: length of the run.
        every: seconds between two faults.
        connector: nixl or tls.
        plot: file of the plot, an SVG.
        skip: if hosts cannot be made here, only print why.
    """
    if reason := why_no_hosts():
        if skip:
            print(f"no soak: {reason}")
        else:
            run.problems.append(reason)
        return None
    cases = make_cases(str(DEMO_MODEL), NUM_CASES, seed)
    with running_site(cases, connector) as site:
        faults = Faults(site)
        load, samples = asyncio.run(soak(site, faults, seconds, every, seed))
        left = asyncio.run(wait_until_whole(site))
        broken = [f"{number} {name}" for name, number in load.counts().items() if name in BROKEN]
        broken += [left] if left else []
        broken += unowned_blocks(site.router) + [f"{name} ended" for name in site.programs.ended()]
    names = sorted({name for one in samples for name in one.usage})
    figures = {
        name: {figure: quarter_medians(samples, name, figure) for figure in MAX_GROWTH}
        for name in names
    }
    grown = growth(samples) + peaks(samples)
    run.problems += broken + grown
    draw_soak(Path(plot), [(s.at_s, s.usage) for s in samples], faults.done)
    run.console.print(f"wrote {plot}")
    return {
        "requests": dict(sorted(load.counts().items())),
        "details": sorted({a.detail[:200] for a in load.answers if a.outcome in BROKEN}),
        "faults": Counter(name for _, name in faults.done),
        "num_retried": sum(answer.attempts > 1 for answer in load.answers),
        "longest_pause_s": max((answer.longest_gap_s for answer in load.answers), default=0.0),
        "quarter_medians": figures,
        "grown": grown,
        "broken": broken,
        "events": faults.done,
        "samples": [
            {"at_s": one.at_s, **{name: list(asdict(u).values()) for name, u in one.usage.items()}}
            for one in samples
        ],
    }
