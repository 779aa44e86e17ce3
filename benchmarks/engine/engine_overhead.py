"""Measure which share of a decode step is spent outside the model, such as in scheduling.

The demo model runs on one CPU thread. All parts (schedule, fill, plan, forward, logits, sample,
update) are timed inside the same steps. On a busy machine the share comes out too small, because
other processes slow the long forward pass most. So two shares are given: the share of all steps,
and that of the fastest tenth of the steps.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable

import torch

import engine.sampling.step_sampler
from baton.api.sampling_params import SamplingParams
from baton.engine_config import EngineConfig
from benchmarks.runner.environment import DEMO_MODEL, summary
from benchmarks.runner.run import Document, Run
from engine.core.outputs import ScheduledRequest
from engine.core.request import Request
from engine.core.step_plan import StepPlanner
from engine.executors.uniproc import worker_of
from engine.make_engine import make_engine
from engine.worker.input_batch import InputBatch

BATCH_SIZES = (1, 8, 32)
PROMPT_TOKENS = 128
WARM_UP_STEPS = 5
SAMPLING = {
    "greedy": SamplingParams(temperature=0.0, ignore_eos=True),
    "random": SamplingParams(temperature=0.8, ignore_eos=True),
    "top-k, top-p": SamplingParams(temperature=0.8, top_k=50, top_p=0.95, ignore_eos=True),
}
MODEL_PARTS = ("forward", "logits")
OTHER_PARTS = ("schedule", "tell", "fill", "plan", "sample", "update")

Steps = list[dict[str, float]]  # one entry per step: its seconds by part, and in "total"


class Stopwatch:
    """Adds up the seconds that are spent in wrapped functions, by part of a step."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def wrap(self, owner: object, function: str, part: str) -> None:
        """Add the time of all further calls of ``owner.function`` to the part ``part``."""
        inner: Callable[..., object] = getattr(owner, function)

        def timed(*args: object, **kwargs: object) -> object:
            start = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                self._seconds[part] += time.perf_counter() - start

        setattr(owner, function, timed)

    def take(self) -> dict[str, float]:
        """Return the seconds by part since the last call, and start again from 0."""
        taken = dict(self._seconds)
        self._seconds.clear()
        return taken


class DecodeBench:
    """An engine whose functions are wrapped by a `Stopwatch`, part by part."""

    def __init__(self) -> None:
        config = EngineConfig(
            device="cpu", num_threads=1, kv_cache_bytes=2**28, max_num_batched_tokens=8192,
            long_prefill_token_threshold=8192,
        )  # fmt: skip
        self.engine = make_engine(DEMO_MODEL, config)
        self.stopwatch = Stopwatch()
        runner = worker_of(self.engine.executor).runner
        for owner, function, part in (
            (self.engine._scheduler, "schedule", "schedule"),
            (self.engine._scheduler, "plan", "tell"),
            (self.engine._scheduler, "update", "update"),
            (runner._input_batch, "fill", "fill"),
            (runner._context.backends[0], "plan", "plan"),
            (runner._model, "forward", "forward"),
            (runner._model, "compute_logits", "logits"),
            (engine.sampling.step_sampler, "sample", "sample"),
        ):
            self.stopwatch.wrap(owner, function, part)
        self._draw = random.Random(0)
        self._num_requests = 0

    def decode(self, batch_size: int, sampling: str, num_steps: int) -> Steps:
        """Decode a new batch; return its steps without the prefill and the warm-up steps."""
        for _ in range(batch_size):
            self._num_requests += 1
            request = Request.create(
                str(self._num_requests),
                self._draw.choices(range(4000), k=PROMPT_TOKENS),
                SAMPLING[sampling],
                seed=self._num_requests,
                eos_token_ids=frozenset(),
                max_model_len=self.engine.max_model_len,
                max_tokens=1 + WARM_UP_STEPS + num_steps,
            )
            self.engine.add_request(request)
        steps: Steps = []
        while self.engine.has_work:
            self.stopwatch.take()
            start = time.perf_counter()
            result = self.engine.step()
            total = time.perf_counter() - start
            assert len(result.outputs) == batch_size
            steps.append({**self.stopwatch.take(), "total": total})
        return steps[1 + WARM_UP_STEPS :]


def outside(step: dict[str, float]) -> float:
    """Return the share of a step's time that is spent outside the model."""
    return 1 - sum(step[part] for part in MODEL_PARTS) / step["total"]


def fastest_tenth(steps: Steps) -> Steps:
    """Return the fastest tenth of the steps, which other processes disturbed least."""
    return sorted(steps, key=lambda step: step["total"])[: max(2, len(steps) // 10)]


def measure(repetitions: int, num_steps: int) -> dict[tuple[int, str], Steps]:
    """Measure all batch sizes and ways of sampling in turns; return their steps."""
    bench = DecodeBench()
    steps: dict[tuple[int, str], Steps] = {
        (batch_size, sampling): [] for sampling in SAMPLING for batch_size in BATCH_SIZES
    }
    for _ in range(repetitions):
        for (batch_size, sampling), collected in steps.items():
            collected += bench.decode(batch_size, sampling, num_steps)
    return steps


def measure_fill(num_repetitions: int = 300) -> dict[str, float]:
    """Return the time to plan and fill a batch of 256 decodes, by the tokens of a request so far.

    The time is in microseconds per request.
    """
    num_requests, found = 256, {}
    for num_tokens in (128, 1000):
        num_blocks = num_tokens // 16 + 1
        scheduled = []
        for index in range(num_requests):
            request = Request.create(
                str(index),
                [1] * num_tokens,
                SamplingParams(),
                seed=index,
                eos_token_ids=frozenset(),
                max_model_len=2048,
            )
            request.token_ids.append(1)
            request.num_computed_tokens = num_tokens
            request.block_ids = list(range(index * num_blocks, (index + 1) * num_blocks))
            scheduled.append(ScheduledRequest(request, 1))
        planner = StepPlanner(num_requests)
        input_batch = InputBatch(
            max_num_requests=num_requests,
            max_num_tokens=8192,
            max_blocks=129,
            block_size=16,
            device=torch.device("cpu"),
        )
        seconds = []
        for _ in range(num_repetitions):
            start = time.perf_counter()
            input_batch.fill(planner.plan(scheduled))
            seconds.append(time.perf_counter() - start)
        fastest = sorted(seconds)[num_repetitions // 20]  # the median of the fastest tenth
        found[f"{num_tokens} tokens"] = round(fastest / num_requests * 1e6, 3)
    return found


def summarize(steps: dict[tuple[int, str], Steps]) -> dict[str, object]:
    """Return, for each case, the shares of a decode step that are spent in each part."""
    results: dict[str, object] = {}
    for (batch_size, sampling), collected in steps.items():
        shares = {
            part: summary([step[part] / step["total"] for step in collected], 4)
            for part in (*MODEL_PARTS, *OTHER_PARTS)
        }
        shares["outside"] = summary([outside(step) for step in collected], 4)
        fastest = summary([outside(step) for step in fastest_tenth(collected)], 4)
        rest = [
            outside(step) - sum(step[part] for part in OTHER_PARTS) / step["total"]
            for step in collected
        ]
        shares["rest"] = summary(rest, 4)
        step_ms = summary([step["total"] * 1e3 for step in collected], 3)
        part_us = {
            part: round(summary([step[part] * 1e6 for step in collected])["median"], 1)
            for part in (*MODEL_PARTS, *OTHER_PARTS)
        }
        results[f"{sampling}, batch {batch_size}"] = {
            "step_ms": step_ms,
            "share_of_step": shares,
            "share_outside_in_fastest_tenth": fastest["median"],
            "part_us_median": part_us,
        }
    return results


def run(run: Run, repetitions: int = 3, steps: int = 60) -> Document:
    """Measure decode steps, and the time to fill a batch.

    Args:
        steps: number of steps per case and repetition.
    """
    shape = {
        "model": "examples/demo_model",
        "num_threads": 1,
        "prompt_tokens": PROMPT_TOKENS,
        "repetitions": repetitions,
        "steps_per_repetition": steps,
    }
    shares = summarize(measure(repetitions, steps))
    fill = measure_fill()
    run.show("InputBatch.fill, 256 decodes, us per request", fill)
    return {"shape": shape, "decode": shares, "fill_256_us_per_request": fill}
