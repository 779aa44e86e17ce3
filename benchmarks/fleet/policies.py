"""Compare routing policies with the real router over simulated fleets, in virtual time.

Fleets have 8+8 to 256+256 nodes (a 70B model on two H100 each, `sim_node/timing.py`), with four
kinds of traffic (`policies_traffic.py`) at 75 % of capacity, and two seeds. `virtual_fleet.py`
explains which parts are real. The first fifth of each trace is not measured. A run gives the same
figures every time, on any machine.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from baton.api.sampling_params import SamplingParams
from benchmarks.fleet.policies_traffic import (
    TPOT_LIMIT_S,
    TRAFFIC,
    TTFT_LIMIT_S,
    Traffic,
    load_of,
    make_trace,
    num_unmeasured,
)
from benchmarks.fleet.virtual_fleet import VirtualRouter, joined_fleet, on_virtual_time
from benchmarks.runner.answers import Answer, follow
from benchmarks.runner.run import Document, Run
from loadtest.load.traces import BLOCK_TOKENS, TraceRequest
from sim_node.options import SimOptions
from sim_node.timing import preset

LOAD = 0.75
SEEDS = (1, 2)
# Blocks of 64 tokens, because hashing smaller blocks would take most of the time.
OPTIONS = SimOptions(
    timing=preset("h100-70b"), block_size=64, num_blocks=6500, max_num_batched_tokens=2048
)
# Number of nodes per role -> number of requests in a trace.
SIZES = {8: 300, 32: 400, 64: 400, 256: 1000}
PAIRS_ONLY = "cost, pairs only"
POLICIES = ("cost", "prefix_aware", "least_tokens", "round_robin")
OTHERS: dict[int, tuple[str, ...]] = {8: (PAIRS_ONLY, "power_of_two", "session_affinity")}
TIE = 0.03

Row = dict[str, float]
# Number of nodes per role, traffic, policy, number of requests, seed
Job = tuple[int, Traffic, str, int, int]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one request of a trace."""

    num_prompt_tokens: int
    answer: Answer

    @property
    def ttft_s(self) -> float:
        """Return the seconds until the first token, or until the request failed."""
        return self.answer.ttft_s or self.answer.total_s

    @property
    def tpot_s(self) -> float:
        later_s = self.answer.total_s - self.ttft_s
        return later_s / max(len(self.answer.times) - 1, 1)

    @property
    def num_computed_tokens(self) -> int:
        """Return how many prompt tokens a node computed, which excludes cached tokens."""
        receipt = self.answer.receipt
        if receipt is not None and receipt.prefill is not None:
            return receipt.prefill.num_computed_tokens
        decode = receipt.decode if receipt else None
        return decode.num_prompt_tokens_computed if decode else self.num_prompt_tokens


async def play(
    trace: Sequence[TraceRequest], policy: str, num_nodes: int, *, local_prefill: bool
) -> list[Outcome]:
    """Send a trace to a router over ``num_nodes`` nodes per role; return all outcomes."""
    loop = asyncio.get_running_loop()
    async with joined_fleet(num_nodes, num_nodes, OPTIONS, local_prefill=local_prefill) as pool:
        router = VirtualRouter(pool, policy)

        async def ask(request: TraceRequest) -> Outcome:
            # Token ids of a block that are quick to make, and differ between blocks.
            text = b"".join(one.to_bytes(8) * (BLOCK_TOKENS // 8) for one in request.hash_ids)
            prompt = list(text[: request.input_length])
            params = SamplingParams(max_tokens=request.output_length, ignore_eos=True, seed=1)
            call = router.call(prompt, params, session_id=str(request.session))
            return Outcome(len(prompt), await follow(router.dispatcher.run(call)))

        began_s, asked = loop.time(), []
        for request in trace:
            await asyncio.sleep(began_s + request.timestamp_ms / 1000 - loop.time())
            asked.append(asyncio.create_task(ask(request)))
        return list(await asyncio.gather(*asked))


def run_job(job: Job) -> tuple[float, list[Outcome]]:
    """Play a trace; return its load and the outcomes of the measured requests."""
    num_nodes, traffic, policy, num_requests, seed = job
    trace = make_trace(traffic, num_nodes, num_requests, LOAD, OPTIONS.timing, seed)
    name = "cost" if policy == PAIRS_ONLY else policy
    playing = play(trace, name, num_nodes, local_prefill=policy == "cost")
    outcomes = on_virtual_time(playing)
    measured = outcomes[num_unmeasured(len(outcomes)) :]
    return load_of(trace, num_nodes, OPTIONS.timing), measured


def summarize(runs: Sequence[tuple[float, list[Outcome]]]) -> Row:
    """Summarize the runs of all seeds of one policy."""
    outcomes = [outcome for _, measured in runs for outcome in measured]
    ttfts, tpots = [o.ttft_s for o in outcomes], [o.tpot_s for o in outcomes]
    num_good = sum(
        o.answer.outcome == "complete" and o.ttft_s <= TTFT_LIMIT_S and o.tpot_s <= TPOT_LIMIT_S
        for o in outcomes
    )
    num_alone = sum(
        o.answer.receipt is not None and not o.answer.receipt.prefill_node for o in outcomes
    )
    num_computed = sum(o.num_computed_tokens for o in outcomes)
    return {
        "ttft_p50_ms": round(1e3 * statistics.median(ttfts)),
        "ttft_p99_ms": round(1e3 * statistics.quantiles(ttfts, n=100, method="inclusive")[98]),
        "tpot_p50_ms": round(1e3 * statistics.median(tpots), 1),
        "tpot_p99_ms": round(1e3 * statistics.quantiles(tpots, n=100, method="inclusive")[98], 1),
        "goodput": round(num_good / len(outcomes), 3),
        "hit_rate": round(1 - num_computed / sum(o.num_prompt_tokens for o in outcomes), 3),
        "alone": round(num_alone / len(outcomes), 3),
        "num_measured": len(outcomes),
        "num_failed": sum(o.answer.outcome != "complete" for o in outcomes),
        "load": round(statistics.fmean(load for load, _ in runs), 2),
    }


def verdict(rows: dict[str, Row]) -> str:
    """Return the figures in which the policy `cost` clearly loses to another; empty: none."""
    cost, others = rows["cost"], [row for name, row in rows.items() if not name.startswith("cost")]
    lost = [
        name
        for name in ("ttft_p50_ms", "ttft_p99_ms")
        if cost[name] > (1 + TIE) * min(row[name] for row in others)
    ]
    if cost["goodput"] < (1 - TIE) * max(row["goodput"] for row in others):
        lost.append("goodput")
    return ", ".join(lost)


def make_jobs(
    sizes: Sequence[int], only: str, others: Mapping[int, Sequence[str]]
) -> dict[tuple[int, str, str], list[Job]]:
    """Return the jobs (one per seed) by number of nodes, traffic and policy."""
    jobs: dict[tuple[int, str, str], list[Job]] = {}
    for size, traffic in itertools.product(sizes, TRAFFIC):
        if only not in traffic.name:
            continue
        for policy in (*POLICIES, *others.get(size, ())):
            if policy == "session_affinity" and traffic.name not in ("multi-turn", "mixed"):
                continue
            jobs[size, traffic.name, policy] = [
                (size, traffic, policy, SIZES[size], seed) for seed in SEEDS
            ]
    return jobs


def run(
    run: Run,
    sizes: Sequence[int] = tuple(SIZES),
    only: str = "",
    main: bool = False,
    processes: int = 2,
) -> None:
    """Run every policy over every fleet and kind of traffic.

    Args:
        only: part of the names of the kinds of traffic to run; nothing is saved.
        main: whether to run only the four main policies.
    """
    jobs = make_jobs(sizes, only, {} if main else OTHERS)
    results: dict[str, dict[str, Row]] = {}
    with concurrent.futures.ProcessPoolExecutor(processes) as pool:
        runs = {key: [pool.submit(run_job, job) for job in some] for key, some in jobs.items()}
        for (size, traffic, policy), futures in runs.items():
            row = summarize([future.result() for future in futures])
            results.setdefault(f"{size}+{size}, {traffic}", {})[policy] = row
    for label, rows in results.items():
        run.show(label, rows)
    shape = {
        "load": LOAD,
        "seeds": SEEDS,
        "requests": SIZES,
        "ttft_limit_s": TTFT_LIMIT_S,
        "tpot_limit_s": TPOT_LIMIT_S,
    }
    lost = {label: verdict(rows) for label, rows in results.items()}
    document: Document = {"shape": shape, "results": results, "lost": lost}
    run.judge(document)
    if not only:
        some = "" if list(sizes) == list(SIZES) else "_" + "_".join(map(str, sizes))
        run.save(document, f"policies{some}")
