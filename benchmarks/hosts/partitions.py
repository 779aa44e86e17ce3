"""Cut one direction between two hosts, under load; exit 1 if a request is lost, wrong or hangs.

A client, a router, two prefill nodes and two decode nodes run on hosts of their own, which are
network namespaces of this machine (Linux, root, iproute2). KV travels by NIXL over TCP. For a while
the network drops what one of client, router, p0 and d0 sends to another; the other direction works.
After each cut every request must have ended with the tokens of one process, all pairs of nodes must
be connected, and every block of every node must be free. A client that is itself cut off may lose
requests.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Literal

import grpc

from baton.v1 import admin_pb2
from benchmarks.faults.chaos_load import CHUNK_TOKENS, HUNG_S, Load, make_cases, under_load
from benchmarks.faults.chaos_site import held_blocks, list_nodes
from benchmarks.runner.answers import Case
from benchmarks.runner.environment import DEMO_MODEL
from benchmarks.runner.programs import admin_of
from benchmarks.runner.run import Run
from tests.hosts.network import Family, Network, why_no_hosts
from tests.hosts.programs import HostPrograms

CLIENT, ROUTER = "client", "router"
NODES = ("p0", "p1", "d0", "d1")
MEMBERS = (CLIENT, ROUTER, "p0", "d0")
PAIRS = tuple(f"{a}>{b}" for a, b in itertools.permutations(MEMBERS, 2))
LINKS = (ROUTER, "p0", "d0")
NO_CUT = "none"
NUM_CASES = 24
# Caches are much smaller than all prompts together, so that most KV travels.
NODE_WORDS = (
    *("--dtype", "float32", "--num-blocks", "160", "--max-num-requests", "16"),
    *("--long-prefill-token-threshold", str(CHUNK_TOKENS)),
)
READY_TIMEOUT_S, RECOVERY_TIMEOUT_S, FREE_TIMEOUT_S = 120.0, 30.0, 10.0
AFTER_S = 1.0  # load goes on for this long after the recovery
_NOTICED = re.compile(
    r"([pd]\d (?:cannot reach|gets no requests|stands still))|node ([pd]\d (?!joined)\D{3,40})"
)


@dataclass(slots=True)
class Row:
    """Outcome of one cut.

    Attributes:
        cut: a direction such as p0>d0, or a host whose link goes down.
        times: number of cuts; the network is whole between them for as long.
        counts: number of requests by outcome.
        longest_pause_s: longest time without a token in any request.
        recovered_after_s: seconds from the mended network until all pairs are connected; None: not
            in time.
        free_after_s: seconds from the last answer until all blocks are free; None: not in time.
        noticed: what the router's log says about nodes.
        broken: promises that did not hold.
    """

    cut: str
    seconds: float
    times: int
    seed: int
    counts: dict[str, int] = field(default_factory=dict)
    num_retried: int = 0
    longest_pause_s: float = 0.0
    recovered_after_s: float | None = None
    free_after_s: float | None = None
    noticed: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)


class Site:
    """The programs on their hosts, and the cases that the client asks for."""

    def __init__(self, network: Network, programs: HostPrograms, cases: list[Case]) -> None:
        self.network, self.programs, self.cases = network, programs, cases
        self.router = programs.router

    def start(self, connector: str) -> None:
        """Start all programs, and wait until all pairs are connected."""
        self.programs.start_router("--no-local-prefill")
        for name in NODES:
            self.start_node(name, connector)
        # Called before gRPC has threads, because threads stay in the network where they begin
        self.network.enter(CLIENT)
        if _seconds_until(lambda: all_are_paired(self.router), READY_TIMEOUT_S) is None:
            raise TimeoutError("\n".join(self.programs.log(name)[-2000:] for name in NODES))

    def start_node(self, name: str, connector: str) -> None:
        """Start a node."""
        kv = ["--kv-listen", self.network.at(name, 0)] if connector == "tls" else []
        self.programs.start_node(name, *NODE_WORDS, "--kv-connector", connector, *kv)


def all_are_paired(router: str) -> bool:
    """Return whether every node is known and connected to both nodes of the other role."""
    try:
        with admin_of(router) as admin:
            nodes = admin.ListNodes(admin_pb2.ListNodesRequest(), timeout=2).nodes
    except grpc.RpcError:
        return False
    whole = [n for n in nodes if not n.lost and sum(p.connected for p in n.peers) == 2]
    return {node.node_name for node in whole} == set(NODES)


def unowned_blocks(router: str) -> list[str]:
    """Return the nodes whose references to blocks and their owners do not agree."""
    with admin_of(router) as admin:
        found = admin.Audit(admin_pb2.AuditRequest(), timeout=10).nodes
    return [
        f"{one.node_name}: {one.problem or 'blocks with a wrong number of owners'}"
        for one in found
        if one.problem or one.ledger.orphans or one.ledger.overdrawn
    ]


def _seconds_until(condition: Callable[[], bool], limit_s: float) -> float | None:
    begin = time.monotonic()
    while not condition():
        if time.monotonic() > begin + limit_s:
            return None
        time.sleep(0.05)
    return time.monotonic() - begin


async def run_row(site: Site, row: Row, concurrency: int) -> None:
    """Run the load, cut and mend the network meanwhile, and fill the row."""
    draw = random.Random(f"{row.cut} {row.seconds:g} {row.seed}")
    mark = len(site.programs.log(ROUTER))
    load = Load(
        site.router, site.cases, concurrency, draw.randrange(2**32),
        leaving=0.0, patience_s=row.seconds + HUNG_S,
    )  # fmt: skip
    async with under_load(load):
        await asyncio.sleep(draw.uniform(0.3, 0.8))
        for number in range(row.times):
            if number:
                await asyncio.sleep(row.seconds)
            await cut_for(site.network, row.cut, row.seconds)
        row.recovered_after_s = await asyncio.to_thread(
            _seconds_until, lambda: all_are_paired(site.router), RECOVERY_TIMEOUT_S
        )
        await asyncio.sleep(AFTER_S)
    row.counts = dict(load.counts())
    row.num_retried = sum(answer.attempts > 1 for answer in load.answers)
    row.longest_pause_s = max((a.longest_gap_s for a in load.answers), default=0.0)
    row.free_after_s = await asyncio.to_thread(
        _seconds_until, lambda: not held_blocks(site.router, set(NODES)), FREE_TIMEOUT_S
    )
    told = _NOTICED.findall(site.programs.log(ROUTER)[mark:])
    row.noticed = sorted({" ".join(filter(None, words)).strip() for words in told})
    row.broken = [*_broken(row, site)]
    details = {f"{a.outcome}: {a.detail}"[:200] for a in load.answers if a.outcome != "complete"}
    if row.broken:
        row.broken += sorted(details)[:3]


async def cut_for(network: Network, cut: str, seconds: float) -> None:
    """Cut one direction, or take a host's link down, for a while."""
    if cut == NO_CUT:
        await asyncio.sleep(seconds)
        return
    if ">" in cut:
        pair = cut.split(">")
        begin, end = partial(network.cut, *pair), partial(network.mend, *pair)
    else:
        begin = partial(network.set_link, cut, up=False)
        end = partial(network.set_link, cut, up=True)
    await asyncio.to_thread(begin)
    try:
        await asyncio.sleep(seconds)
    finally:
        await asyncio.to_thread(end)


def _broken(row: Row, site: Site) -> list[str]:
    """Return the promises that did not hold."""
    is_excused = CLIENT in row.cut.split(">") or row.cut == ROUTER
    broken = [
        f"{number} {outcome}"
        for outcome, number in row.counts.items()
        if outcome in ("hung", "wrong") or (outcome != "complete" and not is_excused)
    ]
    if row.recovered_after_s is None:
        broken.append(f"not all paired: {list_nodes(site.router)}")
    if row.free_after_s is None:
        broken.append(f"held: {held_blocks(site.router, set(NODES))}")
    return broken + unowned_blocks(site.router) + [f"{n} ended" for n in site.programs.ended()]


def run(
    run: Run,
    seconds: Sequence[float] = (0.2, 1.0, 3.0),
    cuts: Sequence[str] = (*PAIRS, *LINKS),
    times: int = 1,
    seeds: Sequence[int] = (0,),
    concurrency: int = 6,
    family: Family = "ipv4",
    connector: Literal["nixl", "tls"] = "nixl",
    rto_max_ms: int = 0,
    logs: bool = False,
) -> dict[str, object] | None:
    """Cut each direction for each time.

    Args:
        seconds: lengths of the cuts; 30 is worth a run of its own.
        cuts: directions such as p0>d0, or hosts whose link goes down; by default all directions
            between client, router, p0 and d0, and the links of the last three.
        times: number of cuts of each row; the network is whole between them for as long.
        seeds: each has its own requests and moments.
        concurrency: number of open requests.
        family: ipv4 or ipv6, the only addresses of all hosts.
        connector: nixl or tls.
        rto_max_ms: longest pause of TCP between two tries to send the same bytes, on all hosts
            (net.ipv4.tcp_rto_max_ms, Linux 6.15); 0: the kernel's default.
        logs: print the logs of a broken row's programs.
    """
    if reason := why_no_hosts():
        run.problems.append(reason)
        return None
    cases = make_cases(str(DEMO_MODEL), NUM_CASES, seed=0)
    rows: list[Row] = []
    with Network([CLIENT, ROUTER, *NODES], [family]) as network, HostPrograms(network) as programs:
        if rto_max_ms:
            network.set_kernel_option("net.ipv4.tcp_rto_max_ms", rto_max_ms)
        site = Site(network, programs, cases)
        site.start(connector)
        all_cuts = [(NO_CUT, max(seconds)), *itertools.product(cuts, seconds)]
        for seed, (cut, length) in itertools.product(seeds, all_cuts):
            row = Row(cut, length, times, seed)
            asyncio.run(run_row(site, row, concurrency))
            rows.append(row)
            print_row(row)
            if row.broken:
                run.problems.append(f"{cut} {length:g} s, seed {seed}: {'; '.join(row.broken)}")
                if logs:
                    print(*(programs.log(name)[-6000:] for name in (ROUTER, *NODES)), sep="\n\n")
                if not all_are_paired(site.router):
                    break
        events = [f"{event.at_s:.2f} {event.text}" for event in network.events]
    return {"rows": [asdict(row) for row in rows], "events": events, "connector": connector,
            "rto_max_ms": rto_max_ms}  # fmt: skip


def print_row(row: Row) -> None:
    """Print one row."""
    recovered = "-" if row.recovered_after_s is None else f"{row.recovered_after_s:.2f} s"
    print(
        f"{row.cut:15} {row.times} x {row.seconds:4g} s | {row.counts} | "
        f"tried again {row.num_retried} | longest pause {row.longest_pause_s:.2f} s | "
        f"whole after {recovered} | "
        f"{', '.join(row.noticed) or 'nothing noticed'}"
        f"{' | BROKEN ' + '; '.join(row.broken) if row.broken else ''}",
        flush=True,
    )
