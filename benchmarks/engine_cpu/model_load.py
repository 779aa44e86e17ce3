"""Measure how long a CPU node takes to load a model, and how much its memory grows.

The checkpoint has Qwen3-0.6B's shape and random bfloat16 weights. Each load runs in a new process,
with the files in the page cache. `--other` names another checkout, which takes turns with this one:

    python -m benchmarks model_load --other ../before

Refuses to know: how models are loaded, because older checkouts are measured, too.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.runner.environment import ROOT
from benchmarks.runner.own_process import answer_of, own_environment
from benchmarks.runner.run import Document, Run

FOLDER = ROOT / "build" / "engine_cpu" / "qwen3-0.6b"
FORMATS = ("auto", "fp32", "bf16", "fp16", "int8-weight-only", "int8", "int4")
KV_CACHE_BYTES = 256 * 2**20
MIB = 2**20


def load_once(weights: str) -> dict[str, float]:
    """Measure one load in this process; libraries and kernels are loaded before."""
    from baton.engine_config import EngineConfig
    from baton_kernels.dispatch import native_ops
    from engine.executors.uniproc import UniprocExecutor
    from engine.worker.host.host_memory import peak_growth

    native_ops()
    config = EngineConfig(device="cpu", weights=weights, kv_cache_bytes=KV_CACHE_BYTES)
    found: list[Any] = []
    start = time.perf_counter()
    growth = peak_growth(lambda: found.append(UniprocExecutor(FOLDER, config).worker))
    seconds = time.perf_counter() - start
    model, cache = found[0].runner._model, found[0].kv_memory.tensor
    kept = sum(tensor.numel() * tensor.itemsize for tensor in [*model.parameters(), cache])
    return {"seconds": seconds, "growth_mib": growth / MIB, "kept_mib": kept / MIB}


def load_in(checkout: Path, weights: str) -> dict[str, float] | None:
    """Measure one load in a new process with a checkout's code.

    Return None if the checkout does not support this type of weights.
    """
    try:
        found: dict[str, float] = answer_of(
            [sys.executable, "-P", __file__, weights], env=own_environment(checkout)
        )
    except subprocess.CalledProcessError as error:
        print(error.stderr.strip().rpartition("\n")[2], file=sys.stderr)
        return None
    return found


def medians(runs: list[dict[str, float] | None]) -> dict[str, float] | None:
    """Return the medians of each figure over the runs of one checkout and type of weights."""
    done = [one for one in runs if one is not None]
    if not done:
        return None
    found = {name: round(statistics.median(one[name] for one in done), 2) for name in done[0]}
    # This is the memory of the weights only, because no page of the KV cache was written yet.
    weights_mib = found["kept_mib"] - KV_CACHE_BYTES / MIB
    return {**found, "share": round(found["growth_mib"] / weights_mib, 3)}


def run(run: Run, other: Path | None = None, repetitions: int = 3) -> Document:
    """Measure the load of each type of weights in new processes.

    Args:
        other: another checkout to compare with.
    """
    from benchmarks.engine_cpu.engine_cpu import WORKS, make_checkpoint

    assert make_checkpoint(WORKS["0.6B"]) == FOLDER
    checkouts = {"this": ROOT} | ({"other": other.resolve()} if other else {})
    runs: dict[tuple[str, str], list[dict[str, float] | None]] = {}
    for _ in range(repetitions):
        for weights in FORMATS:
            for name, checkout in checkouts.items():
                runs.setdefault((weights, name), []).append(load_in(checkout, weights))
    results = {
        weights: {name: medians(runs[weights, name]) for name in checkouts} for weights in FORMATS
    }
    return {"kv_cache_mib": KV_CACHE_BYTES / MIB, "weights": results}


if __name__ == "__main__":  # runs in its own process, perhaps of an older checkout
    print(json.dumps(load_once(sys.argv[1])))
