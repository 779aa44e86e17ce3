"""Measure decodes that begin with the same blocks: one layer's attention, and whole steps.

Each case is computed with and without shared spans (ADR 0106), in turns; both give equal bits. A
sliding window that is larger than every text switches sharing off, and has no other effect. Times
are processor times of one thread, because other processes on the machine lengthen wall times.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.engine_cpu.engine_cpu import WORKS, make_checkpoint
from benchmarks.runner.environment import ROOT
from benchmarks.runner.run import Document, Run

HUGE_WINDOW = 10**6  # tokens; more than any text here has
WAYS = {"shared": None, "apart": HUGE_WINDOW}
BLOCK_SIZE, KV_HEADS, GROUP, HEAD_DIM = 16, 4, 3, 64  # shape of the 125M checkpoint
PREFIX, DECODES = 4096, 32
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True, slots=True)
class Case:
    """The decodes of one step: their number, their common tokens, and the own tokens of each."""

    decodes: int
    common: int
    own: int

    @property
    def name(self) -> str:
        return f"{self.decodes} decodes, {self.common:,} common tokens, {self.own} of their own"


CASES = (
    *(Case(decodes, PREFIX, 16) for decodes in (DECODES, 16, 8, 5)),
    Case(DECODES, 640, 100),
    Case(DECODES, 0, 640),
    Case(DECODES, 0, 100),
    Case(1, 0, PREFIX),
)


def run(
    run: Run,
    repetitions: int = 20,
    steps: int = 12,
    parts: Sequence[Literal["attention", "steps"]] = ("attention", "steps"),
) -> Document:
    """Measure attention and steps in both ways.

    Args:
        repetitions: number of times that attention is computed in each way; the fastest counts.
        steps: number of decode steps of an engine in each way; the median counts.
        parts: parts to measure; other parts keep their earlier results.
    """
    import torch

    torch.set_num_threads(1)
    found: dict[str, dict[str, Any]] = {
        part: run.saved().get(part, {}) for part in ("attention", "steps")
    }
    for dtype in DTYPES:
        for case in CASES if "attention" in parts else ():
            times = repetitions * (1 if case.common else 8)  # small ratios need more repetitions
            row = _attention(case, getattr(torch, dtype), times)
            found["attention"][f"{dtype}: {case.name}"] = row
        if "steps" in parts:
            found["steps"][dtype] = _steps(dtype, steps, run)
    for name, rows in found.items():
        run.show(name, rows)
    return found


def _attention(case: Case, dtype: Any, repetitions: int) -> dict[str, float]:
    """Return the fastest milliseconds of one layer's attention in each way."""
    import torch

    from baton_kernels import reference
    from baton_kernels.attention.base import AttentionOptions
    from baton_kernels.attention.native import NativeAttention
    from tests.numerics.paged import make_cache, make_metadata, make_tables

    lengths = [case.common + case.own + 3 * number for number in range(case.decodes)]
    num_blocks = sum(-(-length // BLOCK_SIZE) for length in lengths) + 2
    table = make_tables(lengths, BLOCK_SIZE, num_blocks)
    table[:, : case.common // BLOCK_SIZE] = table[0, : case.common // BLOCK_SIZE]
    metadata = make_metadata([1] * case.decodes, lengths, table, BLOCK_SIZE)
    torch.manual_seed(0)
    slots = make_metadata(lengths, lengths, table, BLOCK_SIZE).slot_mapping
    cache = make_cache(num_blocks, 1, KV_HEADS, BLOCK_SIZE, HEAD_DIM)[:, 0]
    key, value = torch.randn(2, len(slots), KV_HEADS, HEAD_DIM)
    reference.store_kv(key, value, cache, slots)
    cache = cache.to(dtype)
    query = torch.randn(case.decodes, KV_HEADS * GROUP, HEAD_DIM).to(dtype)
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    outputs = {}
    for number in range(repetitions):
        for way in list(WAYS) if number % 2 else list(WAYS)[::-1]:
            backend = NativeAttention()
            backend.plan(metadata)
            options = AttentionOptions(scale=HEAD_DIM**-0.5, sliding_window=WAYS[way])
            began_at = time.process_time()
            outputs[way] = backend.run(query, cache, metadata, options)
            times[way].append(1e3 * (time.process_time() - began_at))
    assert torch.equal(*outputs.values())
    best = {f"{way}_ms": min(values) for way, values in times.items()}
    return {**best, "ratio": best["apart_ms"] / best["shared_ms"]}


def _steps(dtype: str, num_steps: int, run: Run) -> dict[str, float]:
    """Return the median milliseconds of an engine's decode step in each way."""
    from baton.api.sampling_params import SamplingParams

    engines = {way: _engine(way, dtype) for way in WAYS}
    draw = random.Random(0)
    prefix = draw.choices(range(30_000), k=PREFIX)
    prompts = [prefix + draw.choices(range(30_000), k=16) for _ in range(DECODES)]
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=num_steps)
    medians, tokens = {}, {}
    for way, (llm, times) in engines.items():
        llm.generate([prefix], SamplingParams(temperature=0, max_tokens=1))  # fills the cache
        tokens[way] = [one.token_ids for one in llm.generate(prompts, params)]
        medians[f"{way}_ms"] = 1e3 * statistics.median(times)
        llm.engine.close()
    if len({str(one) for one in tokens.values()}) > 1:
        run.problems.append(f"{dtype}: other tokens")
    return {**medians, "ratio": medians["apart_ms"] / medians["shared_ms"]}


def _engine(way: str, dtype: str) -> tuple[Any, list[float]]:
    """Return an engine, and a list to which it adds the seconds of each step with all decodes."""
    from engine import LLM

    folder = make_checkpoint(WORKS["125M"])
    if WAYS[way] is not None:
        folder = _with_window(folder)
    llm = LLM(str(folder), dtype=dtype, num_threads=1, kv_cache_bytes=2**29)
    step, times = llm.engine.step, list[float]()

    def timed() -> Any:
        began_at = time.process_time()
        result = step()
        scheduled = result.scheduled
        if len(scheduled.scheduled) == scheduled.num_scheduled_tokens == DECODES:
            times.append(time.process_time() - began_at)
        return result

    llm.engine.step = timed  # type: ignore[method-assign]
    return llm, times


def _with_window(folder: Path) -> Path:
    """Return a folder with a copy of the checkpoint whose layers have a huge sliding window."""
    copy = ROOT / "build" / "shared_prefixes" / f"{folder.name}-window"
    copy.mkdir(parents=True, exist_ok=True)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= {"use_sliding_window": True, "sliding_window": HUGE_WINDOW, "max_window_layers": 0}
    config["layer_types"] = ["sliding_attention"] * config["num_hidden_layers"]
    (copy / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for path in folder.iterdir():
        if path.name != "config.json" and not (copy / path.name).exists():
            (copy / path.name).symlink_to(path.resolve())
    return copy
