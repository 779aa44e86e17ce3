"""Policies against each other on simulated fleets: a check in seconds, in one process.

Policies see what they see in a router: its own ledgers, beats every 250 ms, receipts and the time
between steps. Prefill nodes compute one prompt after the other; decode nodes step all they have.
Timing as in `sim_node/timing.py` (one H100 per node, an 8B model). A prefix is a session's last
prompt and answer; nodes forget the sessions that they have not seen for longest.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
import random
import statistics
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

from baton.link import NodeBeat
from baton.outputs import DecodeReceipt, PrefillReceipt, PushReceipt
from environment import record_environment, write_results
from fleet_parts import BLOCK_SIZE, KV_BYTES_PER_TOKEN, make_fleet, make_loads, open_legs
from router.node_load import NodeLoad
from router.policies import POLICIES
from router.policies.base import Placement, RouteQuery

BYTES_PER_S = 41e9
CHUNK_TOKENS = 2048
BEAT_S = 0.25
NO_PUSH = PushReceipt(num_bytes=0, num_blocks=0, transport="", exposed_transfer_s=0.0)


def prefill_s(num_tokens: int, num_context: int) -> float:
    """One prompt of which so many tokens are computed, behind so many that are cached."""
    num_pairs = num_tokens * num_context + num_tokens * num_tokens / 2
    num_steps = math.ceil(num_tokens / CHUNK_TOKENS)
    return 0.004 * num_steps + num_tokens / 24_000 + num_pairs * 8.2e-10


@dataclass(eq=False)
class Job:
    """One request; ``num_new`` tokens of its prompt are no other's."""

    arrives_at: float
    session: int
    num_prompt: int
    num_output: int
    placement: Placement | None = None
    num_uncomputed: int = 0
    num_left: int = 0  # prompt tokens to be computed on the decode node
    num_computed: int = 0
    first_at: float = 0.0
    last_at: float = 0.0
    num_made: int = 0
    begun_at: float = 0.0


class Cache:
    """Tokens that a node has of each session."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._sessions: OrderedDict[int, int] = OrderedDict()
        self._num_tokens = 0

    def hit(self, job: Job) -> int:
        cached = min(self._sessions.get(job.session, 0), job.num_prompt - 1)
        return cached // BLOCK_SIZE * BLOCK_SIZE

    def keep(self, session: int, num_tokens: int) -> None:
        self._num_tokens += num_tokens - self._sessions.pop(session, 0)
        self._sessions[session] = num_tokens
        while self._num_tokens > self._capacity:
            _, dropped = self._sessions.popitem(last=False)
            self._num_tokens -= dropped


@dataclass(eq=False)
class SimNode:
    """A node of either role; ``slowness`` multiplies all that it takes."""

    load: NodeLoad
    cache: Cache
    slowness: float = 1.0
    queue: deque[Job] = field(default_factory=deque)  # prompts to compute; or KV without room
    running: list[Job] = field(default_factory=list)
    computing: deque[Job] = field(default_factory=deque)  # local on D
    num_tokens: int = 0
    is_busy: bool = False


@dataclass(frozen=True)
class Scenario:
    """What arrives, and where."""

    name: str
    num_prefill: int
    num_decode: int
    rate: float  # sessions per second
    prompt: Callable[[random.Random], int]
    output: Callable[[random.Random], int]
    turns: int = 1
    slow: tuple[str, ...] = ()
    num_blocks: int = 26_000
    num_sessions: int = 600


class Simulation:
    """One scenario under one policy."""

    def __init__(self, scenario: Scenario, policy: str, seed: int = 1) -> None:
        self.now = 0.0
        self._scenario = scenario
        self._draw = random.Random(seed)
        self._policy = POLICIES.load(policy)()
        prefills, decodes = make_loads(
            scenario.num_prefill, scenario.num_decode, lambda: self.now, scenario.num_blocks
        )
        self._fleet = make_fleet(prefills, decodes, lambda: BYTES_PER_S)
        self._loads = {load.engine_id: load for load in (*prefills, *decodes)}
        self._nodes = {
            key: SimNode(
                load,
                Cache(scenario.num_blocks * BLOCK_SIZE),
                3.0 if load.node_name in scenario.slow else 1.0,
            )
            for key, load in self._loads.items()
        }
        self._decodes = [self._nodes[load.engine_id] for load in decodes]
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._num_open = 0
        self.done: list[Job] = []
        self.num_local = 0

    def run(self) -> None:
        at = 0.0
        for session in range(self._scenario.num_sessions):
            at += self._draw.expovariate(self._scenario.rate)
            self._add_turn(at, session, 0, self._scenario.turns)
        self._at(BEAT_S, self._beat)
        while self._num_open:
            self.now, _, action = heapq.heappop(self._events)
            action()

    def _at(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), action))

    def _add_turn(self, at: float, session: int, num_before: int, turns: int) -> None:
        draw, scenario = self._draw, self._scenario
        num_prompt = num_before + scenario.prompt(draw)
        job = Job(at, session, num_prompt, scenario.output(draw))
        self._num_open += 1
        self._at(at, lambda: self._place(job))
        if turns > 1:  # the next turn comes some time after this one must have ended
            think_s = job.num_output * 0.012 + 2.0 + draw.expovariate(0.5)
            self._add_turn(at + think_s, session, num_prompt + job.num_output, turns - 1)

    def _beat(self) -> None:
        for node in self._nodes.values():
            is_decode = node in self._decodes
            num_free = node.load.num_blocks - node.num_tokens // BLOCK_SIZE
            node.load.note_beat(
                NodeBeat(
                    num_running=len(node.running),
                    num_waiting_for_remote_kvs=len(node.queue) if is_decode else 0,
                    num_free_blocks=num_free,
                    num_uncomputed_tokens=sum(job.num_left for job in node.computing)
                    if is_decode
                    else sum(job.num_prompt - node.cache.hit(job) for job in node.queue),
                )
            )
        if self._num_open:
            self._at(self.now + BEAT_S, self._beat)

    # ------------------------------------------------------------------ the router

    def _place(self, job: Job) -> None:
        hits = {key: hit for key, node in self._nodes.items() if (hit := node.cache.hit(job))}
        query = RouteQuery(
            num_prompt_tokens=job.num_prompt,
            max_tokens=1024,
            session_id=str(job.session),
            now=self.now,
            find_cached_tokens=lambda: hits,
        )
        placement = job.placement = self._policy.pick(query, self._fleet)
        assert placement is not None
        job.num_uncomputed = open_legs(placement, query, self._loads)
        if placement.prefill is None:
            self.num_local += 1
            decode = self._nodes[placement.decode.engine_id]
            job.num_left = job.num_computed = job.num_prompt - decode.cache.hit(job)
            self._enter(decode, job)
        else:
            prefill = self._nodes[placement.prefill.engine_id]
            prefill.queue.append(job)
            self._compute_next(prefill)

    # ------------------------------------------------------------------ prefill nodes

    def _compute_next(self, node: SimNode) -> None:
        if node.is_busy or not node.queue:
            return
        node.is_busy = True
        job = node.queue[0]
        cached = node.cache.hit(job)
        job.num_computed = job.num_prompt - cached
        seconds = prefill_s(job.num_computed, cached) * node.slowness
        self._at(self.now + seconds, lambda: self._computed(node, job, seconds))

    def _computed(self, node: SimNode, job: Job, seconds: float) -> None:
        node.queue.popleft()
        node.is_busy = False
        node.cache.keep(job.session, job.num_prompt)
        node.load.note_prefilled(
            PrefillReceipt(
                queue_s=0,
                prefill_s=seconds,
                num_chunks=1,
                num_computed_tokens=job.num_computed,
                num_cached_tokens=job.num_prompt - job.num_computed,
            )
        )
        node.load.note_closed(job.num_uncomputed, num_uncomputed=job.num_uncomputed)
        job.first_at, job.num_made = self.now, 1
        assert job.placement is not None
        decode = self._nodes[job.placement.decode.engine_id]
        num_bytes = (job.num_prompt - decode.cache.hit(job)) * KV_BYTES_PER_TOKEN
        tail_bytes = min(num_bytes, CHUNK_TOKENS * KV_BYTES_PER_TOKEN) / 4
        exposed_s = max(tail_bytes / BYTES_PER_S, num_bytes / BYTES_PER_S - seconds)
        self._at(self.now + 0.0005 + exposed_s, lambda: self._enter(decode, job))
        self._compute_next(node)

    # ------------------------------------------------------------------ decode nodes

    def _enter(self, node: SimNode, job: Job) -> None:
        """A prompt's KV, or a prompt to compute, comes; it may have to wait for room."""
        node.queue.append(job)
        self._admit(node)

    def _admit(self, node: SimNode) -> None:
        capacity = node.load.num_blocks * BLOCK_SIZE
        while node.queue:
            job = node.queue[0]
            if node.num_tokens + job.num_prompt + job.num_output > capacity:
                break
            node.queue.popleft()
            node.num_tokens += job.num_prompt + job.num_output
            (node.computing if job.num_left else node.running).append(job)
        self._step(node)

    def _step(self, node: SimNode) -> None:
        if node.is_busy or not (node.running or node.computing):
            return
        node.is_busy = True
        num_kv = sum(job.num_prompt + job.num_made for job in node.running)
        seconds = 0.0067 + 4.2e-5 * len(node.running) + 5.6e-8 * num_kv
        num_tokens = 0
        if node.computing:
            job = node.computing[0]
            num_tokens = min(job.num_left, CHUNK_TOKENS)
            seconds += prefill_s(num_tokens, job.num_prompt - job.num_left)
        self._at(
            self.now + seconds * node.slowness,
            lambda: self._stepped(node, list(node.running), num_tokens),
        )

    def _stepped(self, node: SimNode, batch: list[Job], num_tokens: int) -> None:
        node.is_busy = False
        if num_tokens:
            job = node.computing[0]
            job.num_left -= num_tokens
            if not job.num_left:
                node.running.append(node.computing.popleft())
                job.first_at = self.now
                batch.append(job)
        for job in batch:
            if not job.begun_at:
                job.begun_at = self.now
                is_local = job.placement is not None and job.placement.prefill is None
                node.load.note_begun(job.num_prompt, job.num_uncomputed if is_local else 0)
            job.num_made += 1
        node.load.note_step()
        for job in batch:
            if job.num_made >= job.num_output:
                self._finish(node, job)
        self._admit(node)

    def _finish(self, node: SimNode, job: Job) -> None:
        node.running.remove(job)
        node.num_tokens -= job.num_prompt + job.num_output
        node.cache.keep(job.session, job.num_prompt + job.num_output)
        receipt = DecodeReceipt(
            parked_s=0,
            first_step_s=0,
            steps_until_first=1,
            num_prompt_tokens_computed=0,
            num_forwards=job.num_output - 1,
            num_preemptions=0,
            push=NO_PUSH,
        )
        node.load.note_decoded(receipt, self.now - job.begun_at)
        node.load.note_closed(job.num_prompt + 1024, begun=True)
        job.last_at = self.now
        self.done.append(job)
        self._num_open -= 1


def between(low: int, high: int) -> Callable[[random.Random], int]:
    return lambda draw: draw.randint(low, high)


def long_or_short(draw: random.Random) -> int:
    return draw.randint(12_000, 20_000) if draw.random() < 0.15 else draw.randint(50, 600)


SCENARIOS = (
    Scenario("equal prompts, 60 % busy", 4, 4, 40, between(800, 1600), between(50, 250)),
    Scenario("equal prompts, 95 % busy", 4, 4, 66, between(800, 1600), between(50, 250)),
    Scenario("long and short prompts", 4, 4, 22, long_or_short, between(50, 250)),
    Scenario("a slow node of each role", 4, 4, 40, between(800, 1600), between(50, 250),
             slow=("p001", "d002")),
    Scenario("sessions of 5 turns", 4, 4, 5, between(1000, 5000), between(50, 300), turns=5,
             num_sessions=150),
    Scenario("sessions, little cache", 4, 4, 5, between(1000, 5000), between(50, 300), turns=5,
             num_sessions=150, num_blocks=8_000),
    Scenario("decode nodes short of room", 4, 4, 26, between(500, 6000), between(200, 900),
             num_blocks=4_000),
    Scenario("little to do", 4, 4, 3, between(200, 4000), between(50, 250), num_sessions=200),
    Scenario("1 prefill node for 3 decode nodes", 1, 3, 20, between(800, 1600), between(20, 100)),
)  # fmt: skip


def measure(scenario: Scenario, policy: str, num_seeds: int) -> dict[str, float]:
    """Milliseconds, over all requests of all runs."""
    ttfts, totals, tpots, num_local, num_done = [], [], [], 0, 0
    for seed in range(num_seeds):
        simulation = Simulation(scenario, policy, seed)
        simulation.run()
        num_local += simulation.num_local
        num_done += len(simulation.done)
        for job in simulation.done:
            ttfts.append(1e3 * (job.first_at - job.arrives_at))
            totals.append(1e3 * (job.last_at - job.arrives_at))
            tpots.append(1e3 * (job.last_at - job.first_at) / max(job.num_output - 1, 1))
    return {
        "ttft_mean_ms": round(statistics.fmean(ttfts), 1),
        "ttft_p99_ms": round(statistics.quantiles(ttfts, n=100)[98], 1),
        "tpot_mean_ms": round(statistics.fmean(tpots), 2),
        "total_mean_ms": round(statistics.fmean(totals), 1),
        "local_share": round(num_local / num_done, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--only", default="", help="Part of a scenario's name.")
    options = parser.parse_args()
    environment = record_environment()
    table = Table("scenario", "policy", "TTFT mean", "TTFT p99", "TPOT", "total mean", "local")
    results: dict[str, object] = {}
    for scenario in SCENARIOS:
        if options.only not in scenario.name:
            continue
        rows = {name: measure(scenario, name, options.seeds) for name in POLICIES.names()}
        results[scenario.name] = rows
        for name, row in rows.items():
            table.add_row(scenario.name, name, *(f"{value:g}" for value in row.values()))
        table.add_section()
    Console().print(table)
    if not options.only:
        write_results("policies_sim", environment, {"seeds": options.seeds, "results": results})


if __name__ == "__main__":
    main()
