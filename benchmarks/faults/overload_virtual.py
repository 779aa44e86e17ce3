"""Play three times too much load on virtual time: the overload drill of `resilience.py`.

The real gate, dispatcher and policy over simulated nodes in one process (`virtual_fleet.py`), and
the same requests. Of a seed the same numbers come every time, however busy the machine; what the
router's own processor time does to deadlines is not seen here, and refusals take no time.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import statistics
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from baton.api.errors import BatonError, OverloadedError
from benchmarks.faults.resilience import NORMAL, OVERLOAD, WINDOW_S, normal_again_s
from benchmarks.faults.resilience_load import draw_case
from benchmarks.fleet.virtual_fleet import MODEL, joined_fleet
from benchmarks.runner.run import Document, Run
from router.calls.call import Call, Terms
from router.calls.dispatcher import Dispatcher
from router.calls.wake_ups import WakeUps
from router.fleet.node_pool import NodePool
from router.gate.admission import Admission
from router.gate.capacity import Capacity
from router.gate.ticket import Ticket
from router.policies import POLICIES
from sim_node.options import SimOptions
from sim_node.timing import preset
from sim_node.virtual_time import VirtualTimeLoop

OPTIONS = SimOptions(timing=preset("h100-8b").scaled(5.0))
FLEETS = {"4P+4D": (4, 4), "2P+6D": (2, 6)}
SEEDS = (1, 2, 3, 4, 5)
DEADLINE_S = 5.0
SATURATE_S, SETTLE_S, BEFORE_S, AFTER_S = 10.0, 3.0, 10.0, 20.0
NO_DEADLINE_S = 1e6
# Steady loads; the one with most deadlines kept shows what the fleet can do in time.
STEADY, STEADY_S = (0.6, 0.7, 0.8, 1.0, 1.2, 1.5), 40.0
LEAST_KEPT, LEAST_GOODPUT = 0.99, 0.9

PHASES = ("before", "overload", "after")
COLUMNS = ("kept_share", "kept_per_s", "local_share", "ttft_ms", "decode_ms")

Row = dict[str, Any]
T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class Answer:
    """The outcome of one request; times are seconds of virtual time.

    Attributes:
        outcome: complete, refused, or the type of the error.
        expected_ttft_s, expected_decode_s: the gate's estimates when the request came.
        is_local: whether its prompt was computed on the decode node.
    """

    sent_at: float
    expected_decode_s: float
    outcome: str = "complete"
    ttft_s: float = 0.0
    total_s: float = 0.0
    num_tokens: int = 0
    expected_ttft_s: float = 0.0
    is_local: bool = False

    @property
    def is_kept(self) -> bool:
        return self.outcome == "complete" and self.total_s <= DEADLINE_S


class _Gate(Admission):
    """A gate that reports its expectation of each request."""

    def __init__(self, capacity: Capacity) -> None:
        super().__init__(capacity)
        self.expected_ttft_s: dict[str, float] = {}

    def note_first_token(self, ticket: Ticket) -> None:
        self.expected_ttft_s[ticket.request_id] = ticket.expected_wait_s
        super().note_first_token(ticket)


class Load:
    """Requests to one router, answered on virtual time."""

    def __init__(self, pool: NodePool, seed: int) -> None:
        self._capacity = Capacity(lambda: pool.fleet, clock=pool.clock)
        self._gate = _Gate(self._capacity)
        self._dispatcher = Dispatcher(pool, POLICIES.load("cost")(), admission=self._gate)
        self._loop = asyncio.get_running_loop()
        clock = self._loop.time
        self._dispatcher.wake_ups = WakeUps(clock=clock, cpu_clock=clock)
        self._draw = random.Random(seed)
        self._numbers = itertools.count()

    async def arrive(self, rate: float, seconds: float) -> list[asyncio.Task[Answer]]:
        """Begin so many requests per second, by chance (Poisson), for so long."""
        tasks = []
        due = self._loop.time()
        ends_at = due + seconds
        while (due := due + self._draw.expovariate(rate)) < ends_at:
            await asyncio.sleep(due - self._loop.time())
            tasks.append(asyncio.create_task(self.ask(DEADLINE_S)))
        await asyncio.sleep(ends_at - self._loop.time())
        return tasks

    async def saturate(self, num_lanes: int, seconds: float) -> float:
        """Requests per second that end while so many are always open; a third is run-up."""
        ends_at = self._loop.time() + seconds
        ended_at = []

        async def lane() -> None:
            while self._loop.time() < ends_at:
                await self.ask(NO_DEADLINE_S)
                ended_at.append(self._loop.time())

        await asyncio.gather(*(lane() for _ in range(num_lanes)))
        counted_s = seconds * 2 / 3
        return sum(ends_at - counted_s <= at < ends_at for at in ended_at) / counted_s

    async def ask(self, timeout_s: float) -> Answer:
        """Send one request; follow it to its end."""
        case, clock = draw_case(self._draw, MODEL["vocab_size"]), self._loop.time
        answer = Answer(
            sent_at=clock(), expected_decode_s=self._capacity.decode_s(case.params.max_tokens)
        )
        call = Call(
            request_id=f"r{next(self._numbers)}",
            prompt_token_ids=case.prompt,
            sampling_params=case.params,
            terms=Terms(received_at=0.0),
            timeout_s=timeout_s,
        )
        receipt = None
        try:
            async with contextlib.aclosing(self._dispatcher.run(call)) as outputs:
                async for item in outputs:
                    answer.ttft_s = answer.ttft_s or clock() - answer.sent_at
                    answer.num_tokens += len(item.token_ids)
                    receipt = item.receipt
        except OverloadedError:
            answer.outcome = "refused"
        except BatonError as error:
            answer.outcome, receipt = type(error).__name__, error.receipt
        answer.total_s = clock() - answer.sent_at
        answer.is_local = bool(receipt and receipt.decode_node and not receipt.prefill_node)
        answer.expected_ttft_s = self._gate.expected_ttft_s.pop(call.request_id, 0.0)
        return answer

    def num_open(self) -> int:
        return self._dispatcher.num_open


def run_drill(
    seed: int, fleet: tuple[int, int], overload_s: float, *, local_prefill: bool, log: bool = False
) -> Row:
    """Saturate the fleet, then send half, three times and half of the saturated rate."""

    async def drill() -> Row:
        async with joined_fleet(*fleet, OPTIONS, local_prefill=local_prefill) as pool:
            load = Load(pool, seed)
            rate = await load.saturate(16 * sum(fleet), SATURATE_S)
            await asyncio.sleep(SETTLE_S)
            before = await load.arrive(NORMAL * rate, BEFORE_S)
            during = await load.arrive(OVERLOAD * rate, overload_s)
            ended_at = asyncio.get_running_loop().time()
            after = await load.arrive(NORMAL * rate, AFTER_S)
            phases = [await asyncio.gather(*tasks) for tasks in (before, during, after)]
            if log:
                for phase in phases:
                    _print_late(phase)
            return {
                "capacity_per_s": round(rate, 1),
                "before": summarize(phases[0], BEFORE_S),
                "overload": summarize(phases[1], overload_s),
                "after": summarize(phases[2], AFTER_S),
                "normal_again_s": normal_again_s(phases[0], phases[2], ended_at),
                "open_after": load.num_open(),
            }

    return _on_virtual_time(drill)


def run_steady(seed: int, fleet: tuple[int, int], rate: float, *, local_prefill: bool) -> float:
    """Deadlines kept per second of a steady load with the gate; the first quarter is run-up."""

    async def steady() -> float:
        async with joined_fleet(*fleet, OPTIONS, local_prefill=local_prefill) as pool:
            load = Load(pool, seed)
            await asyncio.gather(*await load.arrive(rate, STEADY_S / 3))
            answers = await asyncio.gather(*await load.arrive(rate, STEADY_S))
            return sum(answer.is_kept for answer in answers) / STEADY_S

    return _on_virtual_time(steady)


def summarize(answers: Sequence[Answer], seconds: float) -> Row:
    """Summarize one phase; times in ms are medians of the accepted requests."""
    accepted = [answer for answer in answers if answer.outcome != "refused"]
    kept = [answer for answer in accepted if answer.is_kept]
    return {
        "requests": len(answers),
        "accepted": len(accepted),
        "kept": len(kept),
        "kept_share": round(len(kept) / max(len(accepted), 1), 4),
        "kept_per_s": round(len(kept) / seconds, 2),
        "local_share": round(sum(a.is_local for a in accepted) / max(len(accepted), 1), 3),
        "ttft_ms": _median_ms([a.ttft_s for a in accepted if a.ttft_s]),
        "decode_ms": _median_ms([a.total_s - a.ttft_s for a in kept]),
        "outcomes": dict(Counter(answer.outcome for answer in answers)),
    }


def _median_ms(seconds: Sequence[float]) -> int:
    return round(1e3 * statistics.median(seconds)) if seconds else 0


def _print_late(answers: Sequence[Answer]) -> None:
    for a in answers:
        if a.outcome != "refused" and not a.is_kept:
            print(
                f"late: {a.outcome} sent {a.sent_at:.1f} ttft {a.ttft_s:.2f} (expected "
                f"{a.expected_ttft_s:.2f}) total {a.total_s:.2f} decode expected "
                f"{a.expected_decode_s:.2f} tokens {a.num_tokens} local {a.is_local}"
            )


def _on_virtual_time(make: Callable[[], Coroutine[None, None, T]]) -> T:
    loop = VirtualTimeLoop()
    try:
        return loop.run_until_complete(make())
    finally:
        loop.close()


def problems_of(row: Row) -> list[str]:
    """Return a line for each broken promise."""
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
    """Run all seeds, and measure how much work of steady loads is done in time."""
    fleet, local_prefill = FLEETS[name], not options.no_local_prefill
    rows: dict[str, Row] = {}
    for seed in options.seeds:
        row = run_drill(
            seed, fleet, options.overload_s, local_prefill=local_prefill, log=options.log
        )
        rows[str(seed)] = {**row, "problems": problems_of(row)}
    result: Row = {"drills": rows}
    if not options.no_steady:
        rate = statistics.fmean(row["capacity_per_s"] for row in rows.values())
        steady = {
            f"{factor:g}": round(
                run_steady(1, fleet, factor * rate, local_prefill=local_prefill), 2
            )
            for factor in STEADY
        }
        kept = statistics.fmean(row["overload"]["kept_per_s"] for row in rows.values())
        best = max(steady.values())
        result |= {"steady_kept_per_s": steady, "kept_of_best": round(kept / best, 3)}
        if kept < LEAST_GOODPUT * best:
            result["problems"] = [f"{kept:.1f} of {best:.1f} deadlines kept per second"]
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Seeds, fleets and phases of the drill.

    Attributes:
        log: print a line for each deadline missed.
    """

    seeds: Sequence[int] = SEEDS
    fleets: Sequence[Literal["4P+4D", "2P+6D"]] = ("4P+4D", "2P+6D")
    overload_s: float = 60.0
    no_local_prefill: bool = False
    no_steady: bool = False
    log: bool = False


def run(run: Run, options: Options) -> Document:
    """Play every fleet with every seed."""
    results = {name: run_fleet(name, options) for name in options.fleets}
    for name, result in results.items():
        run.problems += [f"{name}: {problem}" for problem in result.get("problems", ())]
        for seed, row in result["drills"].items():
            run.show(f"{name}, seed {seed}", {phase: row[phase] for phase in PHASES})
            run.problems += [f"{name}, seed {seed}: {problem}" for problem in row["problems"]]
    return {"fleets": results, "problems": list(run.problems)}
