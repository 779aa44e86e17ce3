"""Run two drills with a real router: nodes die under load, and load is three times too high.

    deaths     simulated nodes vanish and come back, 1,000 times: no request may fail
    overload   0.5, 3 and 0.5 times the capacity: accepted requests keep their deadlines, other
               requests are refused at once, and afterwards times are as before

The router, the simulated nodes and this client are three processes. The client measures times that
are too long if its timers are late or if other programs load the machine, so timer lag and load are
printed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import psutil
import uvloop

from baton import AsyncClient
from baton.checkpoint.model_folder import read_limits
from baton.v1 import admin_pb2
from benchmarks.faults.resilience_load import make_load, watch_lag
from benchmarks.runner.answers import Answer, OpenLoad
from benchmarks.runner.environment import DEMO_MODEL
from benchmarks.runner.programs import SimFleet, admin_of
from benchmarks.runner.run import Run

# Nodes are slower than an H100 with an 8B model, so that their steps load the machine less
TIME_SCALE = 5.0
SETTLE_S = 3.0
BUSY = 0.5  # share of the capacity that is in use while nodes die
# Offered load, as a multiple of the rate at which the nodes complete requests without deadlines, 32
# at a time per pair. Within deadlines they complete fewer, so these loads are 0.7 and 4 times the
# rate that they complete in time (docs/log.md).
NORMAL, OVERLOAD = 0.5, 3.0
WINDOW_S = 5
# A median TTFT counts as normal again up to this multiple of the median before the overload
NORMAL_TTFT = 1.5
# Rough number of requests per second that one pair of these nodes completes; sets the load of the
# deaths drill.
PAIR_RATE = 3.5

PHASES = ("before", "overload", "after")

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The lengths of the drills, and the promised figures."""

    num_pairs_deaths: int = 16
    deaths: int = 1000
    deaths_per_s: float = 4.0
    restart_s: float = 0.4
    num_pairs_overload: int = 4
    saturate_s: float = 10.0
    before_s: float = 10.0
    overload_s: float = 60.0
    after_s: float = 20.0
    timeout_s: float = 5.0
    # The promised figures. A quick run does not check times and exact numbers, which depend on the
    # machine.
    least_kept: float = 1.0
    refusal_limit_s: float = 0.05


QUICK = Sizes(
    num_pairs_deaths=8,
    deaths=30,
    deaths_per_s=2.5,
    num_pairs_overload=2,
    saturate_s=4.0,
    before_s=4.0,
    overload_s=6.0,
    after_s=8.0,
    least_kept=0.9,
    refusal_limit_s=math.inf,
)


class Site(SimFleet):
    """A router over simulated nodes, and the figures that the router reports."""

    def num_deaths(self) -> int:
        """Return how many nodes have died so far."""
        return self.log("nodes").count(" is killed")  # lines of `SimCluster`'s log

    def stats(self) -> admin_pb2.GetStatsResponse:
        with admin_of(self.address) as admin:
            stats: admin_pb2.GetStatsResponse = admin.GetStats(
                admin_pb2.GetStatsRequest(), timeout=10
            )
        return stats

    def num_open_legs(self) -> int:
        """Return the number of open requests; a request counts once on each of its nodes."""
        return sum(node.num_requests for node in self.nodes())

    @property
    def router(self) -> psutil.Process:
        return psutil.Process(self.processes["router"].pid)

    def router_rss_mib(self) -> float:
        """Return the router's resident memory in MiB."""
        return float(self.router.memory_info().rss) / 2**20


# ---------------------------------------------------------------- deaths


async def run_deaths(sizes: Sizes, seed: int) -> Row:
    pairs = sizes.num_pairs_deaths
    kill = sizes.deaths_per_s * 60 / (2 * pairs)  # deaths per node and minute
    faults = f"kill={kill:g},restart_s={sizes.restart_s:g},seed={seed}"
    with Site(pairs, pairs, "--time-scale", TIME_SCALE, "--faults", faults) as site:
        await asyncio.to_thread(site.wait_ready, 0.5)  # some nodes are dead already
        num_before = site.num_deaths()
        async with AsyncClient(site.address) as client, watch_lag() as lags:
            load = make_load(client, read_limits(DEMO_MODEL).vocab_size, seed)
            enough = asyncio.Event()
            arriving = asyncio.create_task(load.arrive(BUSY * PAIR_RATE * pairs, until=enough))
            rss = [site.router_rss_mib()]
            while site.num_deaths() - num_before < sizes.deaths and not arriving.done():
                await asyncio.sleep(1.0)
                rss.append(site.router_rss_mib())
            num_deaths = site.num_deaths() - num_before
            enough.set()
            await arriving
            await load.finish()
            await asyncio.sleep(SETTLE_S)
            return {
                "nodes": 2 * pairs,
                "deaths": num_deaths,
                "seconds": len(rss) - 1,
                **_outcomes(load.answers),
                "attempts": dict(sorted(Counter(a.attempts for a in load.answers).items())),
                "longest_pause_s": round(max(a.longest_gap_s for a in load.answers), 2),
                "open_requests_after": site.stats().num_open,
                "open_legs_after": site.num_open_legs(),
                # Samples at equal intervals over the drill, in which a leak shows as steady growth.
                "router_rss_mib": [round(rss[(len(rss) - 1) * i // 9], 1) for i in range(10)],
                "router_cpu_s": round(sum(site.router.cpu_times()[:2]), 1),
                "client_lag_ms_p99": _ms(_quantile(lags, 0.99)),
            }


def problems_of_deaths(row: Row, sizes: Sizes) -> list[str]:
    """Return a line for each promise that was broken while nodes died."""
    problems = [
        f"{row[name]} {name}" for name in ("open_requests_after", "open_legs_after") if row[name]
    ]
    if row["deaths"] < sizes.deaths:
        problems.append(f"only {row['deaths']} deaths")
    if row["complete"] != row["requests"]:
        problems.append(f"{row['complete']} of {row['requests']} requests complete")
    return problems


# ---------------------------------------------------------------- overload


async def run_overload(sizes: Sizes, seed: int) -> Row:
    pairs = sizes.num_pairs_overload
    vocab_size = read_limits(DEMO_MODEL).vocab_size
    with Site(pairs, pairs, "--time-scale", TIME_SCALE) as site:
        await asyncio.to_thread(site.wait_ready)
        async with AsyncClient(site.address) as client, watch_lag() as lags:
            load = make_load(client, vocab_size, seed)
            rate = await load.saturate(32 * pairs, sizes.saturate_s)
            await asyncio.sleep(SETTLE_S)
            lags.clear()
            rss_before = site.router_rss_mib()
            load = make_load(client, vocab_size, seed + 1, sizes.timeout_s)
            seconds = (sizes.before_s, sizes.overload_s, sizes.after_s)
            phases, over_at = await play_phases(load, rate, seconds)
            return {
                "nodes": 2 * pairs,
                "capacity_per_s": round(rate, 1),
                **{name: _phase(phases[name], sizes) for name in PHASES},
                "normal_again_s": normal_again_s(phases["before"], phases["after"], over_at),
                "queued_after": site.stats().num_queued,
                "open_legs_after": site.num_open_legs(),
                "router_rss_mib": [round(rss_before, 1), round(site.router_rss_mib(), 1)],
                "client_lag_ms_p99": _ms(_quantile(lags, 0.99)),
                "client_lag_ms_max": _ms(max(lags)),
            }


async def play_phases(
    load: OpenLoad, rate: float, seconds: Sequence[float]
) -> tuple[dict[str, list[Answer]], float]:
    """Send 0.5, 3, then 0.5 times a rate; return the answers, and when the overload ended."""
    clock, begins = asyncio.get_running_loop().time, list[float]()
    for factor, duration_s in zip((NORMAL, OVERLOAD, NORMAL), seconds, strict=True):
        begins.append(clock())
        await load.arrive(factor * rate, duration_s)
    await load.finish()
    spans = zip(PHASES, itertools.pairwise([*begins, math.inf]), strict=True)
    phases = {
        name: [answer for answer in load.answers if begin <= answer.sent_at < end]
        for name, (begin, end) in spans
    }
    return phases, begins[2]


def _phase(answers: list[Answer], sizes: Sizes) -> Row:
    """Summarize the outcomes of one phase of the overload drill."""
    refused = [answer for answer in answers if answer.outcome == "refused"]
    accepted = [answer for answer in answers if answer.outcome != "refused"]
    lateness = [answer.total_s - sizes.timeout_s for answer in accepted]
    kept = [a for a in accepted if a.outcome == "complete" and a.total_s <= sizes.timeout_s]
    refusal_s = [answer.total_s for answer in refused]
    return {
        **_outcomes(answers),
        "kept": len(kept),
        "kept_share": round(len(kept) / max(len(accepted), 1), 4),
        "lateness_s_p99": round(_quantile(lateness, 0.99), 3),
        "ttft_ms_p50": _ms(_quantile([a.ttft_s for a in accepted if a.ttft_s], 0.5)),
        "refusal_ms_p50": _ms(_quantile(refusal_s, 0.5)),
        "refusal_ms_p99": _ms(_quantile(refusal_s, 0.99)),
        "refusal_ms_max": _ms(max(refusal_s, default=0.0)),
        "refused_within_limit": sum(s <= sizes.refusal_limit_s for s in refusal_s),
        "refused_without_hint": sum(answer.retry_delay_s is None for answer in refused),
    }


def normal_again_s(before: Sequence[Answer], after: Sequence[Answer], ended_at: float) -> int:
    """Return the seconds from the overload's end until the median TTFT is normal again.

    Medians over windows of `WINDOW_S` are judged, because single seconds can be slow without any
    overload.
    """
    limit_s = NORMAL_TTFT * statistics.median(sent.ttft_s or math.inf for sent in before)
    by_second: dict[int, list[float]] = {}
    for sent in after:  # the TTFT of a request without a first token counts as infinite
        by_second.setdefault(int(sent.sent_at - ended_at), []).append(sent.ttft_s or math.inf)
    late = [-1]
    for first in range(max(by_second, default=0) - WINDOW_S + 2):
        window = [t for second in range(first, first + WINDOW_S) for t in by_second.get(second, ())]
        if window and statistics.median(window) > limit_s:
            late.append(first)
    return max(late) + 1


def problems_of_overload(row: Row, sizes: Sizes) -> list[str]:
    """Return a line for each promise that was broken during or after the overload."""
    problems = []
    for name in ("before", "overload", "after"):
        phase = row[name]
        assert isinstance(phase, dict)
        num_accepted = phase["requests"] - phase["refused"]
        if phase["kept"] < sizes.least_kept * num_accepted:
            problems.append(f"{name}: {phase['kept']} of {num_accepted} deadlines kept")
        if phase["refused_within_limit"] < phase["refused"]:
            problems.append(f"{name}: a refusal took {phase['refusal_ms_max']} ms")
        if phase["refused_without_hint"]:
            problems.append(f"{name}: refusals without a hint")
    if not row["overload"]["refused"]:
        problems.append("it was no overload")
    if row["normal_again_s"] > sizes.after_s - WINDOW_S:
        problems.append("it is not normal again")
    if row["queued_after"] or row["open_legs_after"]:
        problems.append("requests are left")
    return problems


# ---------------------------------------------------------------- both


def _outcomes(answers: list[Answer]) -> Row:
    """Count the answers by outcome, with an example of each unexpected outcome."""
    counts = Counter(answer.outcome for answer in answers)
    odd = {a.outcome: a.detail for a in answers if a.outcome not in ("complete", "refused")}
    return {
        "requests": len(answers),
        "complete": counts.pop("complete", 0),
        "refused": counts.pop("refused", 0),
        "other": dict(counts),
        "examples": odd,
    }


def _quantile(values: Sequence[float], share: float) -> float:
    """Return the quantile by nearest rank; 0 without values."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 1)


def run(
    run: Run,
    quick: bool = False,
    deaths: int = 0,
    only: Sequence[Literal["deaths", "overload"]] = ("deaths", "overload"),
    seed: int = 1,
) -> None:
    """Run the drills; a quick run, or a run of one drill, saves nothing.

    Args:
        quick: whether to run only about 40 s in all.
        deaths: number of nodes that die; 0: the default.
    """
    sizes = QUICK if quick else Sizes()
    sizes = dataclasses.replace(sizes, deaths=deaths or sizes.deaths)
    results: Row = {}
    drills = {
        "deaths": (run_deaths, problems_of_deaths),
        "overload": (run_overload, problems_of_overload),
    }
    for name in only:
        play, find_problems = drills[name]
        row = uvloop.run(play(sizes, seed))
        problems = find_problems(row, sizes)
        run.problems += [f"{name}: {problem}" for problem in problems]
        run.show(name, {key: value for key, value in row.items() if key not in PHASES})
        run.show("phase", {phase: row[phase] for phase in PHASES if phase in row})
        print(f"{name}: {'; '.join(problems) or 'all promises kept'}")
        results[name] = {**row, "problems": problems}
    if not quick and len(only) == len(drills):
        document = {"sizes": dataclasses.asdict(sizes), **results}
        run.judge(document)
        run.save(document)
