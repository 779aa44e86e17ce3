"""Measure paged blocks, continuous batching and recorded steps, each against its absence.

* `memory`: the share of KV memory that holds no token, with blocks and with contiguous
  reservations, by the real scheduler and block pool (`claims_memory.py`).
* `batching`: tokens/s of one engine with continuous batching, and with static batches: the next
  batch starts when the last request of the batch before has ended. A padded static batch also keeps
  computing requests that have all their tokens, as systems without an iteration-level scheduler do
  (Yu et al., Orca, OSDI 2022). Only wanted tokens count.
* `tapes`: tokens/s with recorded decode steps of a CPU, and without.
* `graphs`: tokens/s with CUDA graphs, and without. The part needs a GPU.

    python -m benchmarks claims [--part PART] [--save]      other parts keep their results
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from baton.api.sampling_params import SamplingParams
from baton.checkpoint.packaged_model import SMOLLM2
from benchmarks.engine.claims_memory import (
    WORKLOADS,
    Sizes,
    Workload,
    compare_memory,
    read_lengths,
)
from benchmarks.runner.environment import DEMO_MODEL
from benchmarks.runner.run import Run
from engine import LLM
from engine.executors.uniproc import worker_of
from examples.demo import fetch_model

BLOCK_SIZE = 16
SHRUNK = 4  # lengths of `batching` are a quarter of ShareGPT's, to save time
MAX_MODEL_LEN = 2048 // SHRUNK
STATIC_BATCH = 16  # contiguous reservations of MAX_MODEL_LEN tokens that fit the KV memory
NUM_BLOCKS = STATIC_BATCH * MAX_MODEL_LEN // BLOCK_SIZE
PAGED_BATCH = 64
VOCABULARY = 1000  # prompts are drawn from these token ids
Part = Literal["memory", "batching", "tapes", "graphs"]
PARTS: tuple[Part, ...] = ("memory", "batching", "tapes", "graphs")
Model = Literal["demo", "smollm2"]
Outputs = list[tuple[int, ...]]
Way = Callable[[], Outputs]


def draw_prompts(lengths: Sequence[int]) -> list[list[int]]:
    """Draw prompts of these lengths; no two begin alike."""
    chance = random.Random(1)
    return [[chance.randrange(1, VOCABULARY) for _ in range(length)] for length in lengths]


def params_of(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)


def complete(llm: LLM, prompts: list[list[int]], outputs: Sequence[int]) -> Outputs:
    """Complete all prompts with continuous batching; return the output tokens."""
    found = llm.generate(prompts, [params_of(num) for num in outputs])
    return [tuple(one.token_ids) for one in found]


def complete_static(
    llm: LLM, prompts: list[list[int]], outputs: Sequence[int], batch: int, *, is_padded: bool
) -> Outputs:
    """Complete prompts in static batches; return the wanted output tokens.

    Args:
        batch: number of requests in a batch; the engine must allow as many.
        is_padded: whether requests are computed until the longest of their batch has ended.
    """
    found: Outputs = []
    for first in range(0, len(prompts), batch):
        wanted = outputs[first : first + batch]
        computed = [max(wanted)] * len(wanted) if is_padded else wanted
        tokens = complete(llm, prompts[first : first + batch], computed)
        found += [one[:num] for one, num in zip(tokens, wanted, strict=True)]
    return found


def in_turns(ways: Mapping[str, Way], repetitions: int) -> dict[str, dict[str, Any]]:
    """Run each way ``repetitions`` times, in turns; return tokens/s and the check of the outputs.

    A first round warms up and gives the expected outputs: those of the first way.
    """
    expected: Outputs | None = None
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    equal = dict.fromkeys(ways, True)
    for index in range(repetitions + 1):
        for name, way in ways.items():
            started = time.monotonic()
            outputs = way()
            elapsed_s = time.monotonic() - started
            expected = outputs if expected is None else expected
            equal[name] &= outputs == expected
            if index:
                speeds[name].append(sum(map(len, outputs)) / elapsed_s)
    return {
        name: {
            "tokens_per_s": round(statistics.median(found), 1),
            "least": round(min(found), 1),
            "most": round(max(found), 1),
            "equal": equal[name],
        }
        for name, found in speeds.items()
    }


def make_llm(model: Path, **options: Any) -> LLM:
    return LLM(str(model), prefix_cache=False, max_model_len=MAX_MODEL_LEN, **options)


def compare_batching(model: Path, requests: int, repetitions: int) -> dict[str, Any]:
    """Compare continuous batching with static batches, in KV memory of equal size."""
    share = WORKLOADS["ShareGPT"]
    lengths = Workload(share.prompt / SHRUNK, share.output / SHRUNK, MAX_MODEL_LEN).draw(requests)
    prompts = draw_prompts([one.prompt for one in lengths])
    outputs = [one.output for one in lengths]
    narrow = make_llm(model, num_blocks=NUM_BLOCKS, max_num_requests=STATIC_BATCH)
    wide = make_llm(model, num_blocks=NUM_BLOCKS, max_num_requests=PAGED_BATCH)

    def static(*, is_padded: bool) -> Outputs:
        return complete_static(narrow, prompts, outputs, STATIC_BATCH, is_padded=is_padded)

    ways: dict[str, Way] = {
        "continuous": lambda: complete(narrow, prompts, outputs),
        "static": lambda: static(is_padded=False),
        "static, padded": lambda: static(is_padded=True),
        "continuous, more requests in blocks": lambda: complete(wide, prompts, outputs),
    }
    try:
        return in_turns(ways, repetitions)
    finally:
        narrow.engine.close()
        wide.engine.close()


def compare_switched(
    model: Path, lengths: Sizes, batches: Sequence[int], repetitions: int, part: Part
) -> dict[str, Any]:
    """Compare decode steps that are replayed with steps that Python runs op by op."""
    memory: dict[str, Any] = {"kv_cache_bytes": 2**28}
    replaying = make_llm(model, **memory)
    plain = make_llm(model, **memory, cuda_graphs=part != "graphs")
    if part == "tapes":
        remove_tapes(plain)
    found = {}
    try:
        for batch in batches:
            work = draw_prompts([lengths.prompt] * batch), [lengths.output] * batch
            ways: dict[str, Way] = {
                "on": partial(complete, replaying, *work),
                "off": partial(complete, plain, *work),
            }
            found[f"batch {batch}"] = in_turns(ways, repetitions)
        return found
    finally:
        replaying.engine.close()
        plain.engine.close()


def remove_tapes(llm: LLM) -> None:
    """Let an engine on a CPU run its decode steps without tapes; raises RuntimeError."""
    model: Any = worker_of(llm.engine.executor).runner._model
    if model.model.tapes is None:
        raise RuntimeError("tapes: this engine records none, as it has no native kernels")
    model.model.tapes = None


def measure_memory(requests: int, blocks: int, trace: Path | None) -> dict[str, Any]:
    """Compare memory for both data sets' lengths, and for a trace if one is given."""
    found = {
        name: compare_memory(one.draw(requests), one.max_model_len, blocks, BLOCK_SIZE)
        for name, one in WORKLOADS.items()
    }
    if trace is not None:
        limit = min(8192, blocks * BLOCK_SIZE)
        lengths = read_lengths(trace, requests, limit)
        found["trace"] = compare_memory(lengths, limit, blocks, BLOCK_SIZE)
    return found


def run(
    run: Run,
    part: Sequence[Part] = PARTS,
    models: Sequence[Model] = ("demo", "smollm2"),
    requests: int = 96,
    repetitions: int = 3,
    memory_requests: int = 600,
    blocks: int = 1024,
    trace: Path | None = None,
) -> None:
    """Measure the chosen parts; other parts keep their earlier results.

    Args:
        part: some of memory, batching, tapes, graphs.
        models: models of the parts batching, tapes and graphs.
        requests: number of requests of the part batching.
        repetitions: number of times that each engine runs, in turns.
        memory_requests: number of requests of the part memory.
        blocks: number of KV blocks of the part memory, of 16 tokens each.
        trace: file with lengths for the part memory: Mooncake's JSONL, or Azure's CSV.
    """
    parts = run.saved().get("parts", {})
    folders = {name: find_folder(run, name) for name in models} if set(part) != {"memory"} else {}
    measures: dict[Part, Callable[[], dict[str, Any]]] = {
        "memory": lambda: measure_memory(memory_requests, blocks, trace),
        "batching": lambda: {
            name: compare_batching(folder, requests, repetitions)
            for name, folder in folders.items()
        },
        "tapes": lambda: replayed("tapes"),
        "graphs": lambda: replayed("graphs"),
    }

    def replayed(part: Part) -> dict[str, Any]:
        return {
            name: compare_switched(folder, Sizes(32, 128), (1, 8, 32), repetitions, part)
            for name, folder in folders.items()
        }

    for name in part:
        if (name == "graphs") != torch.cuda.is_available() and name in ("graphs", "tapes"):
            print(f"{name}: not measured, as it needs {'a GPU' if name == 'graphs' else 'a CPU'}")
            continue
        parts[name] = {"measured": dict(run.environment), "results": measures[name]()}
        check_outputs(run, name, parts[name]["results"])
        show(run, name, parts[name]["results"])
        run.save({"parts": {one: parts[one] for one in PARTS if one in parts}})
    run.judge({"parts": parts})


def show(run: Run, part: Part, results: Mapping[str, Any]) -> None:
    """Print the results of a part when it ends, as a later part may take long."""
    if part == "memory":
        run.show(part, results)
        return
    for name, rows in results.items():
        nested = all("equal" not in row for row in rows.values())
        for case, row in rows.items() if nested else [("", rows)]:
            run.show(" ".join(filter(None, (part, name, case))), row)


def check_outputs(run: Run, part: Part, results: Mapping[str, Any]) -> None:
    """Note a problem for each way whose tokens differ from the first way's."""
    for name, row in results.items():
        if row.get("equal") is False:
            run.problems.append(f"{part}, {name}: other tokens")
        check_outputs(run, part, {k: v for k, v in row.items() if isinstance(v, dict)})


def find_folder(run: Run, name: Model) -> Path:
    """Return the model's folder or file; raises SystemExit if it cannot be fetched."""
    if name == "demo":
        return DEMO_MODEL
    found = fetch_model(run.console, SMOLLM2)
    if found is None:
        raise SystemExit("smollm2: the model cannot be fetched")
    return Path(found)
