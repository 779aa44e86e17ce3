"""Compare the gaps of served streams with the steps of an engine alone, by number of threads.

    python -m benchmarks served_steps [--threads 1,2,4] [--rounds 3] [--model FOLDER]

An engine in a process of its own, loaded and stepped by one thread, gives the shortest time for a
token. A colocated and a split deployment, whose nodes have as many threads, serve the same request;
the gap between two tokens (ITL, inter-token latency) should hardly be longer. A node whose threads
sleep in barriers, or wait for cores, shows here. Then four users at a time send prompts of 512
tokens for 64 tokens each: the 99th percentile of the gaps shows what prompts cost other streams.

Numbers of threads beyond the machine's cores are left out. Engines take turns in each round, and
medians of the rounds count. Exit code 1: a stream alone is more than 1.25 times slower than a step.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from baton.api.sampling_params import SamplingParams
from baton.client.client import AsyncClient
from benchmarks.runner.deployments import deployed
from benchmarks.runner.environment import DEMO_MODEL
from benchmarks.runner.run import Document, Run

SHAPES = {"colocated": (0, 1), "split": (1, 1)}  # prefill and decode nodes
PROMPT_TOKENS, OUTPUT_TOKENS = 128, 128
NUM_USERS, NUM_REQUESTS = 4, 24
BUSY_PROMPT_TOKENS, BUSY_OUTPUT_TOKENS = 512, 64
MOST = 1.25  # a gap of a stream alone, over a step of an engine alone

ENGINE_ALONE = """
import json, statistics, sys, time
from baton.api.sampling_params import SamplingParams
from engine.offline.llm import LLM
model, threads, prompt, num_tokens = sys.argv[1:]
llm = LLM(model, num_threads=int(threads), kv_cache_bytes=2**28)
times, step = [], llm.engine.step
def timed():
    began_at = time.perf_counter()
    result = step()
    times.append(time.perf_counter() - began_at)
    return result
llm.engine.step = timed
for _ in range(3):
    llm.generate(json.loads(prompt), SamplingParams(max_tokens=int(num_tokens), ignore_eos=True))
print(1000 * statistics.median(times))
"""


@dataclass(frozen=True, slots=True)
class Gaps:
    """Median and 99th percentile of the gaps between tokens, in milliseconds."""

    p50: float
    p99: float


def draw_prompt(seed: int, num_tokens: int) -> list[int]:
    """Return a prompt of random tokens of the demo model's vocabulary."""
    drawn = random.Random(seed)
    return [drawn.randrange(300, 1000) for _ in range(num_tokens)]


def step_alone(model: str, threads: int) -> float:
    """Return the median milliseconds of a step of an engine in a process of its own."""
    prompt = json.dumps(draw_prompt(0, PROMPT_TOKENS))
    words = ["-c", ENGINE_ALONE, model, str(threads), prompt, str(OUTPUT_TOKENS)]
    done = subprocess.run([sys.executable, *words], check=True, stdout=subprocess.PIPE, text=True)
    return float(done.stdout.splitlines()[-1])


async def stream_times(client: AsyncClient, prompt: list[int], num_tokens: int) -> list[float]:
    """Return the times of a stream's request and of each token, in milliseconds."""
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    times = [1000 * time.perf_counter()]
    async for delta in client.stream(prompt, params):
        times += [1000 * time.perf_counter()] * len(delta.token_ids)
    return times


def gaps_of(times: list[float]) -> list[float]:
    """Return the milliseconds between two tokens."""
    return [after - before for before, after in itertools.pairwise(times[1:])]


async def measure(address: str, seed: int) -> dict[str, Gaps]:
    """Return the gaps of a stream alone and of several users at a time, and the users' TTFT.

    "later" are the users' gaps without the one behind token 1 of each stream, where token 2 waits
    for a step of the decode node that has begun.
    """
    prompts = iter(range(seed, seed + 10_000))
    async with AsyncClient(address) as client:
        for _ in range(2):
            await stream_times(client, draw_prompt(next(prompts), PROMPT_TOKENS), 16)
        alone = list[float]()
        for _ in range(3):
            prompt = draw_prompt(next(prompts), PROMPT_TOKENS)
            alone += gaps_of(await stream_times(client, prompt, OUTPUT_TOKENS))
        busy, later, ttfts = list[float](), list[float](), list[float]()

        async def use() -> None:
            for _ in range(NUM_REQUESTS // NUM_USERS):
                prompt = draw_prompt(next(prompts), BUSY_PROMPT_TOKENS)
                times = await stream_times(client, prompt, BUSY_OUTPUT_TOKENS)
                ttfts.append(times[1] - times[0])
                busy.extend(gaps_of(times))
                later.extend(gaps_of(times)[1:])

        await asyncio.gather(*(use() for _ in range(NUM_USERS)))
    found = {"alone": alone, "busy": busy, "later": later, "ttft": ttfts}
    return {name: percentiles(times) for name, times in found.items()}


def percentiles(gaps: list[float]) -> Gaps:
    """Return the percentiles of these gaps."""
    ordered = sorted(gaps)
    return Gaps(statistics.median(ordered), ordered[int(0.99 * (len(ordered) - 1))])


def serve(options: Options, shape: str, threads: int, seed: int) -> dict[str, Gaps]:
    """Start a deployment, and measure its streams."""
    num_prefill, num_decode = SHAPES[shape]
    with deployed(
        options.model, num_prefill=num_prefill, num_decode=num_decode,
        node_args=["--num-threads", str(threads), *options.node_args.split()],
        decode_args=options.decode_args.split(), router_args=options.router_args.split(),
    ) as deployment:  # fmt: skip
        return asyncio.run(measure(deployment.config.listen, seed))


def median_of(rounds: list[dict[str, Gaps]], load: str) -> Gaps:
    """Return the medians of the rounds."""
    found = [one[load] for one in rounds]
    return Gaps(
        *(statistics.median(getattr(one, name) for one in found) for name in ("p50", "p99"))
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Shapes, threads and options of the nodes.

    Attributes:
        threads: threads of a node; numbers above the machine's cores are left out.
        node_args: more options of all nodes, as one string.
        decode_args: more options of decode nodes.
        router_args: more options of the router.
    """

    threads: Sequence[int] = (1, 2, 4)
    shapes: Sequence[Literal["colocated", "split"]] = ("colocated", "split")
    rounds: int = 3
    model: str = str(DEMO_MODEL)
    node_args: str = ""
    decode_args: str = ""
    router_args: str = ""


def run(run: Run, options: Options) -> Document:
    """Measure steps alone and served streams, in turns."""
    counts = [one for one in options.threads if one <= len(os.sched_getaffinity(0))]
    steps: dict[int, list[float]] = {threads: [] for threads in counts}
    served: dict[tuple[str, int], list[dict[str, Gaps]]] = {}
    for number, threads in itertools.product(range(options.rounds), counts):
        steps[threads].append(step_alone(options.model, threads))
        for shape in options.shapes:
            found = serve(options, shape, threads, 1000 * number + threads)
            served.setdefault((shape, threads), []).append(found)
    rows = list[dict[str, object]]()
    for (name, threads), rounds in served.items():
        step = statistics.median(steps[threads])
        alone, busy, later, ttft = (
            median_of(rounds, load) for load in ("alone", "busy", "later", "ttft")
        )
        ratio = alone.p50 / step
        if ratio > MOST:
            run.problems.append(f"{name}, {threads} threads: ITL is {ratio:.2f} steps")
        rows.append({
            "threads": threads, "shape": name, "step_ms": step, "itl_alone_ms": alone.p50,
            "itl_over_step": ratio, "busy_itl_p50_ms": busy.p50, "busy_itl_p99_ms": busy.p99,
            "busy_later_itl_p99_ms": later.p99, "busy_ttft_p50_ms": ttft.p50,
            "busy_ttft_p99_ms": ttft.p99,
        })  # fmt: skip
    run.show("rows", rows)
    return {"most": MOST, "rows": rows}
