"""Cause each fault between hosts under load; exit 1 if a request is lost, wrong or hangs.

A client, a router, two prefill nodes and two decode nodes run on hosts of their own, which are
network namespaces of this machine (Linux, root, iproute2, a C compiler). KV travels over TCP.
`faults.py` lists the faults: one direction or both between two hosts, a link, a stopped process, a
clock that jumps, a full disk, no descriptors, a name or a node that moves, a node with a wrong
address. After each fault, every request must have ended with the tokens that one process gives, all
pairs of nodes must be connected, and every block of every node must be free. A client that a fault
cuts off may lose requests. A row of the result, which is one fault, is repeated if other work has
stopped this process meanwhile. All seeds run at the same time, each on its own hosts.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import re
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

from baton.v1 import admin_pb2
from benchmarks.faults.chaos_load import HUNG_S, Load, make_cases, under_load
from benchmarks.faults.chaos_site import held_blocks, list_nodes
from benchmarks.hosts.faults import (
    BOTH_WAYS,
    IDLE_PAIRS,
    LINKS,
    NEWCOMERS,
    NO_FAULT,
    NODES,
    PAIRS,
    ROUTER,
    STATES,
    Fault,
    Site,
    all_are_paired,
    find_fault,
    running_site,
    seconds_until,
)
from benchmarks.runner.answers import Case
from benchmarks.runner.environment import DEMO_MODEL
from benchmarks.runner.programs import admin_of
from benchmarks.runner.run import Run
from tests.hosts.network import Family, why_no_hosts

NUM_CASES = 24
RECOVERY_TIMEOUT_S, FREE_TIMEOUT_S = 30.0, 10.0
MOST_RECOVERY_S = 2.0  # promise: seconds from the mending of a link until all pairs are connected
SHORT_S = 5.0  # longest fault other than a fault of the network, in seconds
PAUSE_S = 0.3  # pause between two requests of a lane, so that the machine is not always busy
# A thread wakes every `TICK_S`. If it wakes later than `MOST_LATE_S`, other work has stopped this
# process, and the row is repeated, up to `MOST_REPEATS` times.
TICK_S, MOST_LATE_S, MOST_REPEATS = 0.1, 1.0, 4
GROUPS = {
    "directions": PAIRS, "pairs": BOTH_WAYS, "links": LINKS, "states": STATES,
    "newcomers": NEWCOMERS,
}  # fmt: skip
AFTER_S = 1.0  # load goes on for this long after the recovery
_NOTICED = re.compile(
    r"([pd]\d (?:cannot reach|gets no requests|stands still))|node ([pd]\d (?!joined)[^\d\n]{3,40})"
)


@dataclass(slots=True)
class Row:
    """Outcome of one fault.

    Attributes:
        fault: name of the fault.
        seconds: length of the fault.
        times: number of times that the fault occurs; the pauses between them are as long as the
            fault.
        restarts: whether the end of the fault starts a program.
        counts: number of requests by outcome.
        longest_pause_s: longest time without a token in any request.
        recovered_after_s: seconds from the fault's end until all pairs are connected; None: too
            late.
        free_after_s: seconds from the last answer until all blocks are free; None: too late.
        late_s: longest time for which other work stopped this process.
        noticed: the router's log lines about nodes.
        broken: promises that were broken.
    """

    fault: str
    seconds: float
    times: int
    seed: int
    restarts: bool = False
    counts: dict[str, int] = field(default_factory=dict)
    num_retried: int = 0
    longest_pause_s: float = 0.0
    recovered_after_s: float | None = None
    free_after_s: float | None = None
    late_s: float = 0.0
    noticed: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)


class Lateness(threading.Thread):
    """Measures the longest time for which this process was stopped or got no processor."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.late_s = 0.0
        self._over = threading.Event()

    def run(self) -> None:
        due = time.monotonic() + TICK_S
        while not self._over.wait(max(0.0, due - time.monotonic())):
            now = time.monotonic()
            self.late_s = max(self.late_s, now - due)
            due = now + TICK_S

    def end(self) -> None:
        """End the thread."""
        self._over.set()
        self.join()


@contextmanager
def measuring_lateness(row: Row) -> Iterator[None]:
    """Note in a row how long other work stops this process during the ``with`` block."""
    lateness = Lateness()
    lateness.start()
    try:
        yield
    finally:
        lateness.end()
        row.late_s = round(lateness.late_s, 2)


def unowned_blocks(router: str) -> list[str]:
    """Return the nodes whose references to blocks and their owners do not agree."""
    with admin_of(router) as admin:
        found = admin.Audit(admin_pb2.AuditRequest(), timeout=10).nodes
    return [
        f"{one.node_name}: {one.problem or 'blocks with a wrong number of owners'}"
        for one in found
        if one.problem or one.ledger.orphans or one.ledger.overdrawn
    ]


async def run_row(site: Site, row: Row, concurrency: int) -> None:
    """Cause and end a row's fault under load, and fill in the row's outcome."""
    fault = find_fault(row.fault)
    draw = random.Random(f"{row.fault} {row.seconds:g} {row.seed}")
    mark = len(site.programs.log(ROUTER))
    load = Load(
        site.router, site.cases, concurrency, draw.randrange(2**32),
        leaving=0.0, patience_s=row.seconds + HUNG_S, pause_s=PAUSE_S,
    )  # fmt: skip
    with measuring_lateness(row):
        async with under_load(load):
            await asyncio.sleep(draw.uniform(0.3, 0.8))
            for number in range(row.times):
                if number:
                    await asyncio.sleep(row.seconds)
                await cause(site, fault, row.seconds)
            row.recovered_after_s = await asyncio.to_thread(
                seconds_until, lambda: all_are_paired(site.router), RECOVERY_TIMEOUT_S
            )
            await asyncio.sleep(AFTER_S)
        row.free_after_s = await asyncio.to_thread(
            seconds_until, lambda: not held_blocks(site.router, set(NODES)), FREE_TIMEOUT_S
        )
    row.counts = dict(load.counts())
    row.num_retried = sum(answer.attempts > 1 for answer in load.answers)
    row.longest_pause_s = max((a.longest_gap_s for a in load.answers), default=0.0)
    found = _NOTICED.findall(site.programs.log(ROUTER)[mark:])
    row.noticed = sorted({" ".join(filter(None, words)).strip() for words in found})
    row.broken = [*_broken(row, fault, site)]
    details = {f"{a.outcome}: {a.detail}"[:200] for a in load.answers if a.outcome != "complete"}
    if row.broken:
        row.broken += sorted(details)[:3]


async def cause(site: Site, fault: Fault, seconds: float) -> None:
    """Cause a fault, and end it after its time."""
    try:
        await asyncio.to_thread(fault.begin, site)
        await asyncio.sleep(seconds)
    finally:
        await asyncio.to_thread(fault.end, site)


def _broken(row: Row, fault: Fault, site: Site) -> list[str]:
    """Return the promises that did not hold."""
    broken = [
        f"{number} {outcome}"
        for outcome, number in row.counts.items()
        if outcome in ("hung", "wrong") or (outcome != "complete" and not fault.is_clients)
    ]
    if row.recovered_after_s is None:
        broken.append(f"not all paired: {list_nodes(site.router)}")
    elif row.recovered_after_s > MOST_RECOVERY_S and not fault.restarts:
        broken.append(f"all paired only after {row.recovered_after_s:.2f} s")
    if row.free_after_s is None:
        broken.append(f"held: {held_blocks(site.router, set(NODES))}")
    return broken + unowned_blocks(site.router) + [f"{n} ended" for n in site.programs.ended()]


@dataclass(frozen=True, slots=True)
class Plan:
    """The work of one process: faults with their lengths, on one site.

    Attributes:
        faults: names and seconds, in order.
        limit_s: seconds after which no further fault begins; 0: all faults.
        logs: whether to print the logs of a broken row's programs.
    """

    seed: int
    faults: Sequence[tuple[str, float]]
    times: int
    concurrency: int
    family: Family
    connector: str
    limit_s: float
    logs: bool


def carry_out(plan: Plan, cases: list[Case]) -> tuple[list[Row], list[str]]:
    """Cause the faults of a plan; return the rows and the changes of the network."""
    rows: list[Row] = []
    with running_site(cases, plan.connector, plan.family) as site:
        begin = time.monotonic()
        for name, seconds in plan.faults:
            if plan.limit_s and time.monotonic() > begin + plan.limit_s:
                break
            blank = Row(name, seconds, plan.times, plan.seed, find_fault(name).restarts)
            row = undisturbed_row(site, blank, plan.concurrency)
            rows.append(row)
            print_row(row)
            if row.broken and plan.logs:
                print(*(site.programs.log(n)[-6000:] for n in (ROUTER, *NODES)), sep="\n\n")
            if row.broken and not all_are_paired(site.router):
                break
        return rows, [f"{event.at_s:.2f} {event.text}" for event in site.network.events]


def run(
    run: Run,
    seconds: Sequence[float] = (0.2, 1.0, 3.0),
    faults: Sequence[str] = tuple(GROUPS),
    times: int = 1,
    seeds: Sequence[int] = (0,),
    concurrency: int = 3,
    family: Family = "ipv4",
    connector: Literal["nixl", "tls"] = "nixl",
    limit: float = 0.0,
    logs: bool = False,
) -> dict[str, object] | None:
    """Cause each fault once for each length that suits the fault.

    Args:
        seconds: lengths of the faults; only faults of the network take more than 5 s. A fault that
            starts a program has one length, the longest of at most 5 s.
        faults: names of faults such as p0>d0, or of groups: directions, pairs, links,
            states, newcomers.
        times: number of times that each fault occurs; the pauses between them are as long as the
            fault.
        seeds: each seed has its own requests and moments of faults; all seeds run at the same time.
        concurrency: number of open requests.
        family: kind of the hosts' addresses, ipv4 or ipv6.
        connector: nixl or tls.
        limit: seconds after which no further fault begins; 0: no limit.
        logs: print the logs of a broken row's programs.
    """
    if reason := why_no_hosts():
        run.problems.append(reason)
        return None
    names = [name for one in faults for name in GROUPS.get(one, (one,))]
    planned = [(NO_FAULT, min(seconds, key=lambda one: abs(one - AFTER_S)))]
    planned += [(name, one) for name in names for one in lengths(name, seconds)]
    plans = [
        Plan(seed, planned, times, concurrency, family, connector, limit, logs) for seed in seeds
    ]  # fmt: skip
    cases = make_cases(str(DEMO_MODEL), NUM_CASES, seed=0)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(len(plans), mp_context=context) as processes:
        done = list(processes.map(carry_out, plans, [cases] * len(plans)))
    rows = [row for some, _ in done for row in some]
    run.problems += [
        f"{row.fault} {row.seconds:g} s, seed {row.seed}: {'; '.join(row.broken)}"
        for row in rows
        if row.broken
    ]
    events = {plan.seed: events for plan, (_, events) in zip(plans, done, strict=True)}
    return {"rows": [asdict(row) for row in rows], "events": events, "connector": connector}


def lengths(name: str, seconds: Sequence[float]) -> list[float]:
    """Return the fault's length in seconds in each row; raise ValueError for an unknown name."""
    find_fault(name)
    if name in LINKS or (name in PAIRS + BOTH_WAYS and name not in IDLE_PAIRS):
        return list(seconds)
    short = [one for one in seconds if one <= SHORT_S]
    return short[-1:] if name in NEWCOMERS else short


def undisturbed_row(site: Site, blank: Row, concurrency: int) -> Row:
    """Return a filled row; fill it again if other work has stopped this process meanwhile."""
    for _ in range(MOST_REPEATS):
        row = replace(blank, counts={}, noticed=[], broken=[])
        asyncio.run(run_row(site, row, concurrency))
        if row.late_s <= MOST_LATE_S:
            break
        print(f"{row.fault}: repeated, because this process stood still for {row.late_s} s")
    return row


def print_row(row: Row) -> None:
    """Print one row."""
    recovered = "-" if row.recovered_after_s is None else f"{row.recovered_after_s:.2f} s"
    print(
        f"seed {row.seed} {row.fault:22} {row.times} x {row.seconds:4g} s | {row.counts} | "
        f"tried again {row.num_retried} | longest pause {row.longest_pause_s:.2f} s | "
        f"whole after {recovered} | "
        f"{', '.join(row.noticed) or 'nothing noticed'}"
        f"{' | BROKEN ' + '; '.join(row.broken) if row.broken else ''}",
        flush=True,
    )
