"""Measure chats beside a full load of embeddings: ITL, TTFT, and embedded tokens per second.

A router, a prefill node and a decode node serve the same chats with and without clients that always
have requests for embeddings open. The prefill node computes the embeddings, so the decode steps of
the chats share only the machine with them. Each node has its own core. The model is the model of
the benchmark `pooling`.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from dataclasses import replace
from pathlib import Path

from baton import AsyncClient
from baton.processes.cores import usable_cores
from benchmarks.pooling.pooling import make_embedder
from benchmarks.runner.run import Document, Run
from loadtest.drills.site import UpOptions, started
from loadtest.load.generate import Lengths
from loadtest.plan import LoadPlan, OpenLoop
from loadtest.session import Session
from loadtest.targets import open_target
from loadtest.targets.base import TargetOptions

POOLING = ("--pooling", "last")  # without the option, a checkpoint with such files makes no text
NUM_EMBEDDERS = 4  # clients, each with one open request
TEXTS, TEXT_TOKENS = 8, 64  # tokens of a request for embeddings
CASES = ("alone", "beside embeddings")
PERCENTILES = ("p50", "p99")


def run(
    run: Run, rounds: int = 3, duration_s: float = 25.0, rate: float = 0.5, dtype: str = "bfloat16"
) -> Document:
    """Serve the chats in both cases, in turns.

    Args:
        rounds: rounds of both cases; each round has other prompts.
        duration_s: seconds of each load; the first fifth is not measured.
        rate: conversations per second, of two turns each.
        dtype: type of the computation.
    """
    folder = make_embedder("125M")
    plan = LoadPlan(
        load=OpenLoop(rate_per_s=rate),
        input_lengths=Lengths(64),
        output_lengths=Lengths(64),
        turns=Lengths(2),
        warmup_s=duration_s / 5,
        duration_s=duration_s,
        vocab_size=20_000,
        seed=1,
        max_lag_s=0.05,
    )
    found: dict[str, list[dict[str, float]]] = {case: [] for case in CASES}
    for number in range(rounds):
        for case in CASES if number % 2 else CASES[::-1]:
            row = asyncio.run(_play(folder, replace(plan, round=number), dtype, case))
            found[case].append(row)
            run.show(f"round {number}", {case: row})
            if row["failed"]:
                run.problems.append(f"{case}: {row['failed']:.0f} chats failed")
    names = [name for name in found["alone"][0] if name.endswith("_ms")]
    ratios = {
        name: statistics.median(
            beside[name] / alone[name]
            for alone, beside in zip(*(found[case] for case in CASES), strict=True)
        )
        for name in names
    }
    return {"dtype": dtype, "cores": len(usable_cores()), "ratios": ratios, "rounds": found}


async def _play(folder: Path, plan: LoadPlan, dtype: str, case: str) -> dict[str, float]:
    """Start a deployment, play the chats, and return their figures."""
    options = UpOptions(
        model=str(folder),
        router_args=("--no-local-prefill", *POOLING),
        node_args=("--dtype", dtype, "--kv-cache-memory", "512M"),
        cores=tuple(sorted(usable_cores())),
    )
    stop = asyncio.Event()
    async with started(options, stop) as (site, address), AsyncClient(address) as client:
        target = await open_target(TargetOptions(url=f"grpc://{address}", api_key=site.admin_token))
        counts: list[int] = []
        embedders = [
            asyncio.create_task(_embed(client, counts, number))
            for number in range(NUM_EMBEDDERS if case != "alone" else 0)
        ]
        began_at = time.monotonic()
        try:
            result = await Session(target, stop).play(plan)
        finally:
            seconds = time.monotonic() - began_at
            for task in embedders:
                task.cancel()
            await asyncio.gather(*embedders, return_exceptions=True)
            await target.close()
    summary = result.summary
    row = {
        f"{name}_{which}_ms": 1e3 * getattr(summary.latencies[f"{name}_s"], which)
        for name in ("itl", "ttft")
        for which in PERCENTILES
    }
    return {
        **row,
        "chats": summary.num_requests,
        "failed": sum(summary.errors.values()),
        "embedded_tokens_per_s": sum(counts) / seconds,
    }


async def _embed(client: AsyncClient, counts: list[int], number: int) -> None:
    """Keep one request for embeddings open; note each request's number of tokens."""
    draw = random.Random(number)
    while True:
        texts = [draw.choices(range(300, 20_000), k=TEXT_TOKENS) for _ in range(TEXTS)]
        await client.embed(texts)
        counts.append(TEXTS * TEXT_TOKENS)
