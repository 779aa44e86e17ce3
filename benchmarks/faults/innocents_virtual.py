"""Kill and stop simulated nodes in virtual time: all harmless requests must succeed.

The router's real dispatcher and node pool run over simulated nodes (`virtual_fleet.py`). A seed
gives the same run every time, and many seeds take little time. In each drill every harmless request
must complete with the right tokens. A killer request kills each node that computes it; the
dispatcher must refuse this request after it has killed at most two nodes. `innocents.py` runs these
drills on real processes.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from baton.api.sampling_params import SamplingParams
from baton.link.words import BEAT_INTERVAL_S, NodeEvent, split_request_id
from benchmarks.faults.resilience_load import draw_case
from benchmarks.fleet.virtual_fleet import (
    MODEL,
    JoinedCluster,
    VirtualRouter,
    joined_cluster,
    on_virtual_time,
)
from benchmarks.runner.answers import Case
from benchmarks.runner.run import Document, Run
from sim_node.options import SimOptions
from sim_node.sim_model import output_tokens
from sim_node.timing import preset

OPTIONS = SimOptions(timing=preset("h100-8b").scaled(1.5))
NUM_REQUESTS, NUM_KILLS = 200, 20
RESTART_S = 2.0
TIMEOUT_S = 60.0
MOST_KILLED = 2
KILLER = "killer"
KILLER_PROMPT = [7] * 200
KILLER_TOKENS = 40

Row = dict[str, Any]
Fault = Callable[["Site"], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True)
class Drill:
    """The faults of one drill under load.

    Attributes:
        nodes: numbers of prefill and decode nodes.
        seconds: seconds during which requests arrive.
        kills_at: role ("p" or "d") of the nodes that the killer kills, and the index of the output
            token at which they die; None: no killer.
    """

    name: str
    act: Fault
    nodes: tuple[int, int] = (2, 2)
    seconds: float = 30.0
    kills_at: tuple[str, int] | None = None


@dataclass(slots=True)
class Site:
    """A simulated fleet under load.

    Attributes:
        killed_by_killer: names of the nodes that the killer request has killed.
        refusals: texts of the errors with which requests ended.
    """

    drill: Drill
    draw: random.Random
    joined: JoinedCluster = field(init=False)
    router: VirtualRouter = field(init=False)
    killed_by_killer: list[str] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    longest_s: float = 0.0
    jobs: list[asyncio.Task[None]] = field(default_factory=list)

    async def kill(self, name: str) -> None:
        """Kill a node, and restart it a little later."""
        await self.joined.cluster.kill(name)
        await asyncio.sleep(RESTART_S)
        await self.joined.cluster.restart(name)

    def is_deadly(self, name: str, event: NodeEvent) -> bool:
        """Return whether a node dies before it sends this event; if so, kill the node."""
        if self.drill.kills_at is None or not isinstance(event, tuple):
            return False
        role, index = self.drill.kills_at
        is_deadly = f"-{role}" in name and any(
            KILLER in split_request_id(delta.request_id)[0] and delta.output_index >= index
            for delta in event
        )
        if is_deadly:
            self.killed_by_killer.append(name)
            self.jobs.append(asyncio.create_task(self.kill(name)))
        return is_deadly

    async def ask(self, request_id: str, case: Case) -> None:
        """Send one request, and count its outcome."""
        answer = await self.router.ask(case, request_id=request_id, timeout_s=TIMEOUT_S)
        if answer.outcome not in ("complete", "wrong", "lost"):
            self.errors.append(f"{request_id}: {answer.outcome}: {answer.detail}")
        if request_id == KILLER:
            self.outcomes[f"{KILLER}: {answer.outcome}"] += 1
        else:
            self.longest_s = max(self.longest_s, answer.total_s)
            self.outcomes[answer.outcome] += 1


# ---------------------------------------------------------------- what happens


async def kill_in_turns(site: Site) -> None:
    """Kill prefill and decode nodes in turns, at random moments."""
    num_prefill, num_decode = site.drill.nodes
    for number in range(NUM_KILLS):
        await asyncio.sleep(site.draw.uniform(0.2, 2.0) * site.drill.seconds / NUM_KILLS)
        role, count = (("p", num_prefill), ("d", num_decode))[number % 2]
        names = [f"sim-{role}{index}" for index in range(count)]
        alive = [name for name in names if name in {n.name for n in site.joined.pool.nodes}]
        if alive:
            site.jobs.append(asyncio.create_task(site.kill(site.draw.choice(alive))))


async def break_links_twice(site: Site) -> None:
    """Cut two nodes' links for 0.3 s, one after another; both processes keep running."""
    await asyncio.sleep(site.draw.uniform(0.2, 0.4) * site.drill.seconds)
    for name in site.draw.sample(sorted(site.joined.links), 2):
        site.joined.links[name].break_for(0.3)
        await asyncio.sleep(site.draw.uniform(0.3, 2.5))


async def stand_still(site: Site) -> None:
    """Stop a prefill node and, a little later, a decode node, for 3 s each."""
    await asyncio.sleep(site.draw.uniform(0.2, 0.4) * site.drill.seconds)
    for name in (f"sim-{role}{site.draw.randrange(2)}" for role in "pd"):
        await site.joined.cluster.stall(name, 3.0)
        await asyncio.sleep(site.draw.uniform(0.0, 4.0))


async def cut_the_only_decode_node(site: Site) -> None:
    """Cut the link of the only decode node for 10 s."""
    await asyncio.sleep(0.3 * site.drill.seconds)
    site.joined.links["sim-d0"].break_for(10.0)


async def send_killer(site: Site) -> None:
    """Send a request that kills each node that computes it."""
    await asyncio.sleep(site.draw.uniform(0.2, 0.6) * site.drill.seconds)
    expected = output_tokens(KILLER_PROMPT, KILLER_TOKENS, vocab_size=MODEL["vocab_size"])
    params = SamplingParams(max_tokens=KILLER_TOKENS, ignore_eos=True)
    await site.ask(KILLER, Case(KILLER_PROMPT, params, expected))


def drills() -> list[Drill]:
    """Return all drills."""
    killers = [
        Drill(f"a killer at {role}'s token {index}, {p}P+{d}D", send_killer, (p, d), 15.0,
              kills_at=(role, index))
        for role, index in (("p", 0), ("d", 1), ("d", 5))
        for p, d in ((1, 1), (2, 2), (2, 6))
    ]  # fmt: skip
    return [
        Drill("20 kills of P and D in turns, 2P+2D", kill_in_turns, (2, 2), 40.0),
        Drill("20 kills of P and D in turns, 1P+1D", kill_in_turns, (1, 1), 160.0),
        Drill("20 kills of P and D in turns, 3P+5D", kill_in_turns, (3, 5), 20.0),
        Drill("two links broken for 0.3 s", break_links_twice, seconds=10.0),
        Drill("a standstill of 3 s of P and D", stand_still, seconds=10.0),
        Drill("the only decode node cut for 10 s", cut_the_only_decode_node, (1, 1), 20.0),
        *killers,
    ]


# ---------------------------------------------------------------- what must hold


async def run_drill(drill: Drill, seed: int) -> Row:
    """Run a drill under load; return the outcomes of all requests."""
    site = Site(drill, random.Random(f"{drill.name} {seed}"))
    cluster = joined_cluster(*drill.nodes, OPTIONS, local_prefill=False, is_dropped=site.is_deadly)
    async with cluster as site.joined:
        site.router = VirtualRouter(site.joined.pool)
        watch = asyncio.create_task(_count_missed_beats(site))
        site.jobs.append(asyncio.create_task(drill.act(site)))
        calls = []
        for number in range(NUM_REQUESTS):
            await asyncio.sleep(site.draw.expovariate(NUM_REQUESTS / drill.seconds))
            case = draw_case(site.draw, MODEL["vocab_size"])
            calls.append(asyncio.create_task(site.ask(f"r{number}", case)))
        await asyncio.gather(*calls)
        while site.jobs:
            await site.jobs.pop()
        watch.cancel()
        return {
            "outcomes": dict(site.outcomes),
            "errors": site.errors,
            "killed_by_killer": len(site.killed_by_killer),
            "longest_s": round(site.longest_s, 2),
            "quarantined": len(site.router.dispatcher.recoveries.suspects.quarantined),
        }


async def _count_missed_beats(site: Site) -> None:
    while True:
        await asyncio.sleep(BEAT_INTERVAL_S)
        site.joined.pool.count_missed_beats()


def problems_of(drill: Drill, row: Row) -> list[str]:
    """Return a line for each broken promise of a drill."""
    problems = [error for error in row["errors"] if not error.startswith(f"{KILLER}:")]
    if row["outcomes"].get("complete", 0) != NUM_REQUESTS:
        problems.append(f"{row['outcomes'].get('complete', 0)} of {NUM_REQUESTS} complete")
    is_killer = drill.kills_at is not None
    if row["quarantined"] != int(is_killer):
        problems.append(f"{row['quarantined']} quarantined")
    if is_killer and f"{KILLER}: PoisonRequestError" not in row["outcomes"]:
        problems.append("the killer was not refused")
    if row["killed_by_killer"] > MOST_KILLED:
        problems.append(f"the killer ended {row['killed_by_killer']} nodes")
    return problems


def run(run: Run, seeds: int = 20, only: str = "") -> Document:
    """Run every drill with every seed.

    Args:
        seeds: number of seeds.
        only: part of the names of the drills to run.
    """
    results: Row = {}
    for drill in drills():
        if only not in drill.name:
            continue
        rows = [on_virtual_time(run_drill(drill, seed)) for seed in range(1, seeds + 1)]
        found = {
            seed: broken for seed, row in enumerate(rows, 1) if (broken := problems_of(drill, row))
        }
        run.problems += [f"{drill.name}, seed {seed}: {'; '.join(b)}" for seed, b in found.items()]
        results[drill.name] = {
            "requests": NUM_REQUESTS * len(rows),
            "complete": sum(row["outcomes"].get("complete", 0) for row in rows),
            "most_killed_by_killer": max(row["killed_by_killer"] for row in rows),
            "longest_s": max(row["longest_s"] for row in rows),
            "problems": found,
        }
    run.show("drill", results)
    return {"seeds": seeds, "drills": results}
