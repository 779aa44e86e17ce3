"""Send simulated nodes three times their capacity, in virtual time (as `resilience.py` does).

The router's real gate, dispatcher and policy run over simulated nodes in one process
(`virtual_fleet.py`), with the requests of `resilience.py`. A seed gives the same figures every
time, on any machine. In virtual time the router itself needs no time, so its effect on deadlines is
not measured.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.faults.resilience import PHASES, WINDOW_S, normal_again_s, play_phases
from benchmarks.faults.resilience_load import draw_case
from benchmarks.fleet.virtual_fleet import MODEL, VirtualRouter, joined_fleet, on_virtual_time
from benchmarks.runner.answers import Answer, OpenLoad
from benchmarks.runner.run import Document, Run
from router.fleet.node_pool import NodePool
from router.gate.admission import Admission
from router.gate.capacity import Capacity
from sim_node.options import SimOptions
from sim_node.timing import preset

OPTIONS = SimOptions(timing=preset("h100-8b").scaled(5.0))
FLEETS = {"4P+4D": (4, 4), "2P+6D": (2, 6)}
SEEDS = (1, 2, 3, 4, 5)
DEADLINE_S = 5.0
SATURATE_S, SETTLE_S, BEFORE_S, AFTER_S = 10.0, 3.0, 10.0, 20.0
NO_DEADLINE_S = 1e6
# Steady loads; the best of them shows how many requests per second the fleet can complete in time.
STEADY, STEADY_S = (0.6, 0.7, 0.8, 1.0, 1.2, 1.5), 40.0
LEAST_KEPT, LEAST_GOODPUT = 0.99, 0.9

Row = dict[str, Any]


class Gated:
    """A router with its gate, and a source of random requests."""

    def __init__(self, pool: NodePool, seed: int) -> None:
        gate = Admission(Capacity(lambda: pool.fleet, clock=pool.clock))
        self.router = VirtualRouter(pool, admission=gate)
        self._draw = random.Random(seed)

    def load(self, timeout_s: float = DEADLINE_S) -> OpenLoad:
        """Make a load of random requests that have this deadline."""
        return OpenLoad(lambda: self._ask(timeout_s), self._draw)

    async def _ask(self, timeout_s: float) -> Answer:
        case = draw_case(self._draw, MODEL["vocab_size"])
        return await self.router.ask(case, timeout_s=timeout_s)


def is_kept(answer: Answer) -> bool:
    """Return whether a request completed within its deadline."""
    return answer.outcome == "complete" and answer.total_s <= DEADLINE_S


def is_local(answer: Answer) -> bool:
    """Return whether the request's prompt was computed on its decode node."""
    receipt = answer.receipt
    return bool(receipt and receipt.decode_node and not receipt.prefill_node)


async def run_drill(
    seed: int, fleet: tuple[int, int], overload_s: float, *, local_prefill: bool
) -> Row:
    """Measure the rate that saturates the fleet; then send 0.5, 3 and 0.5 times this rate."""
    async with joined_fleet(*fleet, OPTIONS, local_prefill=local_prefill) as pool:
        gated = Gated(pool, seed)
        rate = await gated.load(NO_DEADLINE_S).saturate(16 * sum(fleet), SATURATE_S)
        await asyncio.sleep(SETTLE_S)
        seconds = dict(zip(PHASES, (BEFORE_S, overload_s, AFTER_S), strict=True))
        phases, over_at = await play_phases(gated.load(), rate, list(seconds.values()))
        return {
            "capacity_per_s": round(rate, 1),
            **{name: summarize(phases[name], seconds[name]) for name in PHASES},
            "normal_again_s": normal_again_s(phases["before"], phases["after"], over_at),
            "open_after": gated.router.dispatcher.num_open,
        }


async def run_steady(
    seed: int, fleet: tuple[int, int], rate: float, *, local_prefill: bool
) -> float:
    """Return how many requests per second keep their deadlines under a steady load.

    The first quarter of the time is not counted.
    """
    async with joined_fleet(*fleet, OPTIONS, local_prefill=local_prefill) as pool:
        gated = Gated(pool, seed)
        for seconds in (STEADY_S / 3, STEADY_S):
            load = gated.load()
            await load.arrive(rate, seconds)
            await load.finish()
        return sum(map(is_kept, load.answers)) / STEADY_S


def summarize(answers: Sequence[Answer], seconds: float) -> Row:
    """Summarize one phase of a drill; times are medians over the accepted requests, in ms."""
    accepted = [answer for answer in answers if answer.outcome != "refused"]
    kept = [answer for answer in accepted if is_kept(answer)]
    return {
        "requests": len(answers),
        "accepted": len(accepted),
        "kept": len(kept),
        "kept_share": round(len(kept) / max(len(accepted), 1), 4),
        "kept_per_s": round(len(kept) / seconds, 2),
        "local_share": round(sum(map(is_local, accepted)) / max(len(accepted), 1), 3),
        "ttft_ms": _median_ms([a.ttft_s for a in accepted if a.ttft_s]),
        "decode_ms": _median_ms([a.total_s - a.ttft_s for a in kept]),
        "outcomes": dict(Counter(answer.outcome for answer in answers)),
    }


def _median_ms(seconds: Sequence[float]) -> int:
    return round(1e3 * statistics.median(seconds)) if seconds else 0


def problems_of(row: Row) -> list[str]:
    """Return a line for each promise that the drill broke."""
    problems = [
        f"{phase}: {row[phase]['kept']} of {row[phase]['accepted']} deadlines kept"
        for phase in PHASES
        if row[phase]["kept_share"] < LEAST_KEPT
    ]
    if row["overload"]["accepted"] == row["overload"]["requests"]:
        problems.append("it was no overload")
    if row["normal_again_s"] > AFTER_S - WINDOW_S:
        problems.append("it is not normal again")
    if row["open_after"]:
        problems.append("requests are left")
    return problems


def run_fleet(name: str, options: Options) -> Row:
    """Run all seeds on one fleet, and compare with the rates that steady loads reach."""
    fleet, local_prefill = FLEETS[name], not options.no_local_prefill
    rows: dict[str, Row] = {}
    for seed in options.seeds:
        drill = run_drill(seed, fleet, options.overload_s, local_prefill=local_prefill)
        row = on_virtual_time(drill)
        rows[str(seed)] = {**row, "problems": problems_of(row)}
    result: Row = {"drills": rows}
    if not options.no_steady:
        rate = statistics.fmean(row["capacity_per_s"] for row in rows.values())
        steady = {
            f"{factor:g}": round(on_virtual_time(playing), 2)
            for factor in STEADY
            for playing in (run_steady(1, fleet, factor * rate, local_prefill=local_prefill),)
        }
        kept = statistics.fmean(row["overload"]["kept_per_s"] for row in rows.values())
        best = max(steady.values())
        result |= {"steady_kept_per_s": steady, "kept_of_best": round(kept / best, 3)}
        if kept < LEAST_GOODPUT * best:
            result["problems"] = [f"{kept:.1f} of {best:.1f} deadlines kept per second"]
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The seeds, fleets and phases of the drill."""

    seeds: Sequence[int] = SEEDS
    fleets: Sequence[Literal["4P+4D", "2P+6D"]] = ("4P+4D", "2P+6D")
    overload_s: float = 60.0
    no_local_prefill: bool = False
    no_steady: bool = False


def run(run: Run, options: Options) -> Document:
    """Run every fleet with every seed."""
    results = {name: run_fleet(name, options) for name in options.fleets}
    for name, result in results.items():
        run.problems += [f"{name}: {problem}" for problem in result.get("problems", ())]
        for seed, row in result["drills"].items():
            run.show(f"{name}, seed {seed}", {phase: row[phase] for phase in PHASES})
            run.problems += [f"{name}, seed {seed}: {problem}" for problem in row["problems"]]
    return {"fleets": results, "problems": list(run.problems)}
