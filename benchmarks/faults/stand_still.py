"""Stop nodes for a while, or kill two at once, under load; exit 1 if a request fails.

A router, two prefill and three decode nodes with NIXL serve the demo model on this machine, to
requests with known answers. A seed chooses the load and the moment of the fault. After each drill
every request must be complete and right, and every block of every living node must be free.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field

from rich.console import Console

from baton.deployment.local_deployment import LocalDeployment
from benchmarks.faults.chaos_load import CHUNK_TOKENS, Load, make_cases, under_load
from benchmarks.faults.chaos_site import Site, demo_deployment, wait_until_free
from benchmarks.runner.answers import Case
from benchmarks.runner.environment import DEMO_MODEL
from benchmarks.runner.run import Run

NODE_ARGS = ("--long-prefill-token-threshold", str(CHUNK_TOKENS))
AFTER_S = 2.0
APART_S = 0.8  # seconds between two deaths
READY_TIMEOUT_S = 120.0
DRILLS = (
    *(f"{name} stands still for {stop_s:g} s" for name in ("d0", "p0") for stop_s in (0.5, 3, 10)),
    "d0 and d1 die within a second",
    "d0 and p0 die within a second",
)


@dataclass(slots=True)
class Row:
    """The result of a drill; ``errors`` has examples of failed requests."""

    drill: str
    seed: int
    counts: dict[str, int] = field(default_factory=dict)
    num_retried: int = 0
    longest_pause_s: float = 0.0
    free_after_s: float | None = None
    errors: list[str] = field(default_factory=list)

    @property
    def num_errors(self) -> int:
        return sum(self.counts.values()) - self.counts.get("complete", 0)


async def die_together(site: Site, names: list[str]) -> None:
    for name in names:
        site.deployment.child(name).process.kill()
        await asyncio.sleep(site.draw.uniform(0, APART_S))


async def run_drill(site: Site, drill: str, concurrency: int, seed: int) -> Row:
    row = Row(drill, seed)
    load = Load(site.address, site.cases, concurrency, seed, leaving=0.0)
    async with under_load(load):
        await site.some_time()
        words = drill.split()
        if "die" in words:
            await die_together(site, [words[0], words[2]])
        else:
            await site.stand_still(words[0], float(words[-2]))
        await asyncio.sleep(AFTER_S)
    row.counts = dict(sorted(load.counts().items()))
    row.num_retried = sum(answer.attempts > 1 for answer in load.answers)
    row.longest_pause_s = round(max(answer.longest_gap_s for answer in load.answers), 2)
    odd = Counter(f"{a.outcome}: {a.detail}" for a in load.answers if a.outcome != "complete")
    row.errors = [f"{count}x {what}" for what, count in odd.most_common(3)]
    row.free_after_s, held = await wait_until_free(site)
    if held:
        row.errors.append(f"held: {held}")
    return row


async def run_seed(
    drills: list[str], cases: list[Case], concurrency: int, seed: int, console: Console
) -> list[Row]:
    """Run all drills with one seed on one deployment, which is repaired before each drill."""
    rows = []
    with LocalDeployment(demo_deployment(3, NODE_ARGS)) as deployment:
        site = Site(deployment, cases, seed)
        await asyncio.to_thread(deployment.wait_ready, READY_TIMEOUT_S)
        for drill in drills:
            begun_at = time.monotonic()
            rows.append(row := await run_drill(site, drill, concurrency, seed))
            console.print(
                f"seed {seed}: {drill}: {row.counts}, {row.num_retried} retried, longest pause "
                f"{row.longest_pause_s} s {row.errors} ({time.monotonic() - begun_at:.0f} s)"
            )
            await site.repair()
    return rows


def run(
    run: Run, seeds: int = 20, first_seed: int = 1, concurrency: int = 32, only: str = ""
) -> None:
    """Run the drills with every seed.

    Args:
        only: part of the names of the drills to run; nothing is saved.
    """
    drills = [drill for drill in DRILLS if only in drill]
    cases = make_cases(str(DEMO_MODEL), 32, first_seed)
    rows: list[Row] = []
    for seed in range(first_seed, first_seed + seeds):
        rows += asyncio.run(run_seed(drills, cases, concurrency, seed, run.console))
    summary = {}
    for drill in drills:
        those = [row for row in rows if row.drill == drill]
        summary[drill] = {
            "seeds": len(those),
            "requests": sum(sum(row.counts.values()) for row in those),
            "errors": sum(row.num_errors for row in those),
            "retried": sum(row.num_retried for row in those),
            "longest_pause_s": max(row.longest_pause_s for row in those),
            "examples": [error for row in those for error in row.errors][:5],
        }
    run.show("drill", summary)
    run.problems += [f"{row.drill}: {row.errors}" for row in rows if row.errors]
    if not only:
        run.save({"concurrency": concurrency, "drills": summary})
