"""Measure the microseconds per step of `engine.Scheduler`, beside a minimal scheduler's.

The minimal scheduler is the baseline: a deque of waiting requests, a list of running requests, and
a deque of free block ids, as in small readable engines. Baton's scheduler takes longer because it
also has a prefix cache, remote KV and priorities.

``--nano-vllm PATH`` names a checkout of github.com/GeeeekExplorer/nano-vllm, whose scheduler has a
prefix cache; it is then measured, too, with the loads in which no request waits. With waiting
requests nano-vllm works differently: it admits requests until memory is full.
"""

from __future__ import annotations

import subprocess
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from benchmarks.engine.scheduler_subjects import (
    BLOCK_SIZE,
    LOADS,
    NUM_BLOCKS,
    NUM_PARKED,
    NUM_RUNNING,
    NUM_WAITING,
    Prompts,
    subjects_of,
)
from benchmarks.runner.environment import summary
from benchmarks.runner.run import Document, Run
from engine.core.block_pool import BlockPool

GROUP = 16  # number of blocks per call of the block pool


def revision_of(checkout: Path) -> str:
    """Return a checkout's git revision, which the results name for repeating the measurement."""
    command = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown: no git checkout, perhaps not the original code"


def measure_steps(
    repetitions: int, num_steps: int, nano_vllm: Path | None
) -> dict[str, dict[str, list[list[float]]]]:
    """Time the steps of all schedulers, in turns."""
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
                    if index >= num_steps // 10:  # the first steps warm up
                        samples[load.name][name].append([part * 1e6 for part in seconds])
    return samples


# ---------------------------------------------------------------------- the block pool


def pool_operations() -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """Return {operation: (Baton's function, the baseline's)}; a call handles `GROUP` blocks."""
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
    """Measure the block pools; return {operation: {subject: thousands of blocks per second}}."""
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


def summarize_steps(samples: dict[str, dict[str, list[list[float]]]]) -> dict[str, object]:
    """Summarize the times of the steps of each load and subject."""
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
        results[load] = rows
    return results


def run(
    run: Run, repetitions: int = 5, steps: int = 100, nano_vllm: Path | None = None
) -> Document:
    """Measure the steps of schedulers, and the operations of block pools.

    Args:
        steps: number of steps per repetition, at most 240.
        nano_vllm: checkout of nano-vllm to compare with.
    """
    shape: dict[str, object] = {
        "num_running": NUM_RUNNING,
        "num_waiting": NUM_WAITING,
        "num_parked_of_these": NUM_PARKED,
        "block_size": BLOCK_SIZE,
        "repetitions": repetitions,
        "steps_per_repetition": steps,
    }
    if nano_vllm is not None:
        shape["nano_vllm_revision"] = revision_of(nano_vllm)
    loads = summarize_steps(measure_steps(repetitions, steps, nano_vllm))
    for load, rows in loads.items():
        run.show(load, rows)
    pool = measure_pool(repetitions)
    run.show("thousand blocks per second", pool)
    return {"shape": shape, "steps": loads, "block_pool_thousand_blocks_per_s": pool}
