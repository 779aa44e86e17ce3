"""Microseconds per step of `engine.Scheduler`, next to a minimal scheduler in the same run.

The minimal one does what small readable engines do: a deque that waits, a list that runs, a deque
of free block ids. It has no prefix cache, no remote KV, no priorities: it is the baseline, and
what Baton costs above it is the price of those.

With ``--nano-vllm PATH``, a checkout of github.com/GeeeekExplorer/nano-vllm, its scheduler takes
turns with ours where nobody waits: it has a prefix cache, too. Where others wait it does something
else, admitting them until memory is full.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import itertools
import random
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Protocol

from rich.console import Console
from rich.table import Table

from baton.block_hash import BlockHasher
from baton.sampling_params import SamplingParams
from engine.block_pool import BlockPool
from engine.kv_cache_manager import KVCacheManager
from engine.outputs import ModelRunnerOutput
from engine.request import Request
from engine.scheduler import Scheduler
from environment import record_environment, summary, write_results

NUM_RUNNING = 256
NUM_WAITING = 10_000
NUM_PARKED = 1_000  # of NUM_WAITING, as WAITING_FOR_REMOTE_KVS
BLOCK_SIZE = 16
NUM_BLOCKS = 20_000
MAX_BATCHED_TOKENS = 2**17  # all prompts fit in the first step
PROMPT_TOKENS = 256
WAITING_PROMPT_TOKENS = 64
OUTPUT_TOKENS = 256  # of a request, where requests end
TARGET_US = 1000
GROUP = 16  # blocks per call of the block pool


# ---------------------------------------------------------------------- the baseline


@dataclass(slots=True)
class MinimalRequest:
    """The baseline's request."""

    token_ids: list[int]
    max_num_tokens: int
    num_computed_tokens: int = 0
    block_ids: list[int] = field(default_factory=list)


class MinimalScheduler:
    """BASELINE: the least that schedules a paged cache."""

    def __init__(self) -> None:
        self.waiting: deque[MinimalRequest] = deque()
        self.running: list[MinimalRequest] = []
        self.free: deque[int] = deque(range(NUM_BLOCKS))

    def schedule(self) -> list[MinimalRequest]:
        """Blocks for those that run, then those that wait while there is room."""
        index = 0
        while index < len(self.running):
            request = self.running[index]
            missing = -(-len(request.token_ids) // BLOCK_SIZE) - len(request.block_ids)
            while missing > len(self.free):
                self._preempt(self.running.pop())
            for _ in range(missing):
                request.block_ids.append(self.free.popleft())
            index += 1
        while self.waiting and len(self.running) < NUM_RUNNING:
            num_blocks = -(-len(self.waiting[0].token_ids) // BLOCK_SIZE)
            if num_blocks > len(self.free):
                break
            request = self.waiting.popleft()
            request.block_ids = [self.free.popleft() for _ in range(num_blocks)]
            self.running.append(request)
        return list(self.running)

    def update(self, scheduled: list[MinimalRequest], token_ids: list[int]) -> None:
        """Append the tokens; end those that are long enough."""
        finished = False
        for request, token_id in zip(scheduled, token_ids, strict=True):
            request.num_computed_tokens = len(request.token_ids)
            request.token_ids.append(token_id)
            if token_id == 0 or len(request.token_ids) >= request.max_num_tokens:
                self.free.extend(request.block_ids)
                request.block_ids = []
                finished = True
        if finished:
            self.running = [request for request in self.running if request.block_ids]

    def _preempt(self, request: MinimalRequest) -> None:
        self.free.extend(request.block_ids)
        request.block_ids = []
        self.waiting.appendleft(request)


# ---------------------------------------------------------------------- what is measured


class Subject(Protocol):
    """A scheduler with a fake runner; one call is one step."""

    def step(self) -> tuple[float, float]:
        """Seconds in schedule and in update; the fake runner is not counted."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a scheduler has to do. ``turnover``: one request ends and one begins in each step."""

    name: str
    num_waiting: int
    num_parked: int
    turnover: bool = False

    def output_tokens(self, index: int) -> int:
        """Of the running request ``index``."""
        return index + 3 if self.turnover else 1_000_000


LOADS = (
    Load("nobody waits", 0, 0),
    Load("10,000 wait", NUM_WAITING, NUM_PARKED),
    Load("10,000 wait, one ends per step", NUM_WAITING, NUM_PARKED, turnover=True),
)


class BatonSubject:
    """`engine.Scheduler`."""

    def __init__(self, load: Load, prompts: Prompts, *, prefix_cache: bool) -> None:
        hasher = BlockHasher(BLOCK_SIZE) if prefix_cache else None
        self.scheduler = Scheduler(
            KVCacheManager(NUM_BLOCKS, BLOCK_SIZE, hasher=hasher),
            max_num_requests=NUM_RUNNING,
            max_num_batched_tokens=MAX_BATCHED_TOKENS,
            long_prefill_token_threshold=MAX_BATCHED_TOKENS,
        )
        self._ids = itertools.count()
        for index, prompt in enumerate(prompts.running):
            self.scheduler.add(self._request(prompt, load.output_tokens(index)))
        self.step()
        for index, prompt in enumerate(itertools.islice(prompts.waiting, load.num_waiting)):
            request = self._request(prompt, OUTPUT_TOKENS)
            (self.scheduler.park if index < load.num_parked else self.scheduler.add)(request)

    def step(self) -> tuple[float, float]:
        start = time.perf_counter()
        scheduled = self.scheduler.schedule()
        middle = time.perf_counter()
        tokens = {item.request.request_id: 7 for item in scheduled.scheduled if item.samples}
        output = ModelRunnerOutput(tokens)
        assert len(tokens) == NUM_RUNNING
        resumed = time.perf_counter()
        self.scheduler.update(scheduled, output)
        return middle - start, time.perf_counter() - resumed

    def _request(self, prompt: list[int], max_tokens: int) -> Request:
        return Request.create(
            f"request-{next(self._ids)}",
            prompt,
            SamplingParams(max_tokens=max_tokens),
            seed=0,
            eos_token_ids=frozenset({0}),
            max_model_len=2_000_000,
        )


class MinimalSubject:
    """The baseline."""

    def __init__(self, load: Load, prompts: Prompts) -> None:
        self.scheduler = MinimalScheduler()
        for index, prompt in enumerate(prompts.running):
            self._add(prompt, load.output_tokens(index))
        self.step()
        for prompt in itertools.islice(prompts.waiting, load.num_waiting):
            self._add(prompt, OUTPUT_TOKENS)

    def step(self) -> tuple[float, float]:
        start = time.perf_counter()
        scheduled = self.scheduler.schedule()
        middle = time.perf_counter()
        token_ids = [7] * len(scheduled)
        assert len(token_ids) == NUM_RUNNING
        resumed = time.perf_counter()
        self.scheduler.update(scheduled, token_ids)
        return middle - start, time.perf_counter() - resumed

    def _add(self, prompt: list[int], max_tokens: int) -> None:
        request = MinimalRequest(list(prompt), len(prompt) + max_tokens)
        self.scheduler.waiting.append(request)


class NanoVllmSubject:
    """nano-vllm's scheduler, as it is in a checkout.

    Only the scheduler and what it imports is read: not the package's own top, which imports a GPU.

    Args:
        checkout: the folder that has ``nanovllm/`` in it.
    """

    def __init__(self, load: Load, prompts: Prompts, checkout: Path) -> None:
        if "nanovllm" not in sys.modules:
            package = ModuleType("nanovllm")
            package.__path__ = [str(checkout / "nanovllm")]
            sys.modules["nanovllm"] = package
        sequences: Any = importlib.import_module("nanovllm.engine.sequence")
        params: Any = importlib.import_module("nanovllm.sampling_params")
        scheduler: Any = importlib.import_module("nanovllm.engine.scheduler")
        sequences.Sequence.block_size = BLOCK_SIZE  # 256 there
        self.scheduler = scheduler.Scheduler(
            SimpleNamespace(
                max_num_seqs=NUM_RUNNING,
                max_num_batched_tokens=MAX_BATCHED_TOKENS,
                num_kvcache_blocks=NUM_BLOCKS,
                kvcache_block_size=BLOCK_SIZE,
                eos=0,
            )
        )
        for index, prompt in enumerate(prompts.running):
            limits = params.SamplingParams(max_tokens=load.output_tokens(index))
            self.scheduler.add(sequences.Sequence(prompt, limits))
        self.step()

    def step(self) -> tuple[float, float]:
        start = time.perf_counter()
        scheduled, is_prefill = self.scheduler.schedule()
        middle = time.perf_counter()
        token_ids = [7] * len(scheduled)
        assert len(token_ids) == NUM_RUNNING
        resumed = time.perf_counter()
        self.scheduler.postprocess(scheduled, token_ids, is_prefill)
        return middle - start, time.perf_counter() - resumed


@dataclass(frozen=True, slots=True)
class Prompts:
    """The same prompts for every subject; no two alike, so that nothing is a cache hit."""

    running: list[list[int]]
    waiting: list[list[int]]

    @classmethod
    def draw(cls) -> Prompts:
        draw = random.Random(0)

        def prompt(num_tokens: int) -> list[int]:
            return draw.choices(range(1, 32_000), k=num_tokens)

        # Staggered, so that every step fills as many blocks as the next one.
        running = [prompt(PROMPT_TOKENS + index % BLOCK_SIZE) for index in range(NUM_RUNNING)]
        return cls(running, [prompt(WAITING_PROMPT_TOKENS) for _ in range(NUM_WAITING)])


SUBJECTS: dict[str, Callable[[Load, Prompts], Subject]] = {
    "baton": lambda load, prompts: BatonSubject(load, prompts, prefix_cache=True),
    "baton, no prefix cache": lambda load, prompts: BatonSubject(load, prompts, prefix_cache=False),
    "minimal (baseline)": MinimalSubject,
}


def subjects_of(load: Load, nano_vllm: Path | None) -> dict[str, Callable[[Prompts], Subject]]:
    """Who is measured under a load."""
    subjects: dict[str, Callable[[Prompts], Subject]] = {
        name: functools.partial(make, load) for name, make in SUBJECTS.items()
    }
    if nano_vllm is not None and not load.num_waiting:
        subjects["nano-vllm"] = lambda prompts: NanoVllmSubject(load, prompts, nano_vllm)
    return subjects


def revision_of(checkout: Path) -> str:
    """The git revision that was measured, so that a reader can do it again."""
    command = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown: no git checkout, perhaps not the original code"


def measure_steps(
    repetitions: int, num_steps: int, nano_vllm: Path | None
) -> dict[str, dict[str, list[list[float]]]]:
    """{load: {subject: [[schedule us, update us] of every step]}}, subjects taking turns."""
    prompts = Prompts.draw()
    samples: dict[str, dict[str, list[list[float]]]] = {
        load.name: {name: [] for name in subjects_of(load, nano_vllm)} for load in LOADS
    }
    for _ in range(repetitions):
        for load in LOADS:
            subjects = {name: make(prompts) for name, make in subjects_of(load, nano_vllm).items()}
            for index in range(num_steps):
                for name, subject in subjects.items():
                    seconds = subject.step()
                    if index >= num_steps // 10:  # the first ones warm up
                        samples[load.name][name].append([part * 1e6 for part in seconds])
    return samples


# ---------------------------------------------------------------------- the block pool


def pool_operations() -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """{operation: (Baton's, the baseline's)}; each call handles GROUP blocks."""
    pool = BlockPool(NUM_BLOCKS)
    hashes = [index.to_bytes(16, "little") for index in range(GROUP)]
    cached = pool.allocate(GROUP)
    assert cached is not None
    pool.cache(cached, hashes, None)
    missing = [index.to_bytes(16, "big") for index in range(1, GROUP + 1)]
    free, ref_counts = deque(range(NUM_BLOCKS)), [0] * NUM_BLOCKS
    known = dict(zip(hashes, cached, strict=True))

    def allocate_release() -> None:
        block_ids = pool.allocate(GROUP)
        assert block_ids is not None
        pool.release(block_ids)

    def minimal_allocate_release() -> None:
        free.extend([free.popleft() for _ in range(GROUP)])

    def touch_release() -> None:
        pool.touch(cached)
        pool.release(cached)

    def minimal_touch_release() -> None:
        for block_id in cached:
            ref_counts[block_id] += 1
        for block_id in cached:
            ref_counts[block_id] -= 1

    return {
        "allocate + release": (allocate_release, minimal_allocate_release),
        "touch + release": (touch_release, minimal_touch_release),
        "find, hit": (
            lambda: [pool.find(name) for name in hashes],
            lambda: [known.get(name) for name in hashes],
        ),
        "find, miss": (
            lambda: [pool.find(name) for name in missing],
            lambda: [known.get(name) for name in missing],
        ),
    }


def measure_pool(repetitions: int, calls: int = 500) -> dict[str, dict[str, dict[str, float]]]:
    """{operation: {subject: thousands of blocks per second}}."""
    results = {}
    for operation, pair in pool_operations().items():
        speeds: tuple[list[float], list[float]] = ([], [])
        for _ in range(repetitions * 4):
            for call, collected in zip(pair, speeds, strict=True):
                start = time.perf_counter()
                for _ in range(calls):
                    call()
                collected.append(calls * GROUP / (time.perf_counter() - start) / 1e3)
        results[operation] = {"baton": summary(speeds[0], 0), "minimal": summary(speeds[1], 0)}
    return results


# ---------------------------------------------------------------------- the report


def report_steps(
    console: Console, samples: dict[str, dict[str, list[list[float]]]]
) -> dict[str, object]:
    """Print the table of steps; returns what goes into the JSON."""
    table = Table("256 running", "", "schedule", "update", "step", "p90", "/ baseline", "/ nobody")
    results: dict[str, object] = {}
    alone: dict[str, float] = {}
    for load, by_subject in samples.items():
        steps = {
            name: summary([sum(pair) for pair in pairs], 1) for name, pairs in by_subject.items()
        }
        rows: dict[str, object] = {}
        for name, pairs in by_subject.items():
            schedule, update = (summary([pair[i] for pair in pairs], 1) for i in (0, 1))
            median = steps[name]["median"]
            to_baseline = round(median / steps["minimal (baseline)"]["median"], 2)
            to_nobody = round(median / alone.setdefault(name, median), 2)
            rows[name] = {
                "schedule_us": schedule,
                "update_us": update,
                "step_us": steps[name],
                "ratio_to_baseline": to_baseline,
                "ratio_to_nobody_waits": to_nobody,
            }
            times = (schedule["median"], update["median"], median, steps[name]["p90"])
            table.add_row(
                load, name, *(f"{us:.0f} us" for us in times), f"{to_baseline}", f"{to_nobody}"
            )
        results[load] = rows
    console.print(table)
    return results


def report_pool(console: Console, results: dict[str, dict[str, dict[str, float]]]) -> None:
    """Print the table of block pool operations."""
    table = Table("block pool", "baton", "minimal (baseline)", "minimal / baton")
    for operation, speeds in results.items():
        baton, minimal = (speeds[name]["median"] for name in ("baton", "minimal"))
        cells = (f"{baton:,.0f} k/s", f"{minimal:,.0f} k/s", f"{minimal / baton:.1f}")
        table.add_row(operation, *cells)
    console.print(table)


def main() -> None:
    """Measure, print, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100, help="per repetition (at most 240)")
    parser.add_argument("--nano-vllm", type=Path, help="a checkout, to measure side by side")
    arguments = parser.parse_args()
    environment = record_environment()
    console = Console(highlight=False, width=120)
    steps = report_steps(
        console, measure_steps(arguments.repetitions, arguments.steps, arguments.nano_vllm)
    )
    pool = measure_pool(arguments.repetitions)
    report_pool(console, pool)
    shape: dict[str, object] = {
        "num_running": NUM_RUNNING,
        "num_waiting": NUM_WAITING,
        "num_parked_of_these": NUM_PARKED,
        "block_size": BLOCK_SIZE,
        "repetitions": arguments.repetitions,
        "steps_per_repetition": arguments.steps,
        "target_step_us": TARGET_US,
    }
    if arguments.nano_vllm is not None:
        shape["nano_vllm_revision"] = revision_of(arguments.nano_vllm)
    results = {"shape": shape, "steps": steps, "block_pool_thousand_blocks_per_s": pool}
    write_results("scheduler", environment, results)


if __name__ == "__main__":
    main()
