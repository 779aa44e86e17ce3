"""Compare torch.compile for a model's layers on a CPU with the tapes of native calls.

    tapes      as an engine computes: packed weights, kernels in C, recorded steps
    compiled   torch's layers and ops by torch.compile; attention in C, a call that it does not see
    eager      the same, not compiled

Four layers of the Qwen3-0.6B shape, random weights in bfloat16 and float32; the time of the
decoder alone, without the head, in turns. What is compiled is compiled before it is timed; how long
that took is told.

    python -m benchmarks compile_layers
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import baton_kernels
from baton.api.sampling_params import SamplingParams
from baton_kernels import reference
from baton_kernels.attention.native import NativeAttention
from baton_kernels.dispatch import native_ops
from benchmarks.runner.checkpoints import random_checkpoint
from benchmarks.runner.environment import ROOT
from benchmarks.runner.own_process import call_words, own_environment
from benchmarks.runner.run import Document, Run
from engine import LLM
from engine.executors.uniproc import worker_of
from engine.worker import worker
from models import load_model

FOLDER = ROOT / "build" / "compile_layers"
WAYS = ("tapes", "compiled", "eager")
SHAPE: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
# Requests at once, and tokens of a prompt; decodes take `STEPS` steps.
CASES = {"decode 1": (1, 32), "decode 8": (8, 32), "decode 32": (32, 32), "prefill 512": (1, 512)}
STEPS = 24


def _unseen(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function in a call that the compiler does not look into."""
    found: Callable[..., Any] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return found


class _Mixed:
    """Ops of the reference, which torch.compile can trace, except storing and attention."""

    def __init__(self) -> None:
        native = native_ops()
        assert native is not None
        self.norm_rotary_store = _unseen(native.norm_rotary_store)

    def __getattr__(self, name: str) -> Any:
        return getattr(reference, name)


def make_model(dtype: str) -> Path:
    """Write the model, if it is not there."""
    shape = SHAPE | {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return random_checkpoint(FOLDER / dtype, "Qwen3ForCausalLM", shape, dtype, with_tokenizer=True)


@contextlib.contextmanager
def _torch_layers(*, compiled: bool) -> Iterator[None]:
    def load(*arguments: Any, **options: Any) -> Any:
        model: Any = load_model(*arguments, **{**options, "packer": None})
        if compiled:
            for index, layer in enumerate(model.model.layers):
                model.model.layers[index] = torch.compile(layer, dynamic=True)
        return model

    run = _unseen(NativeAttention.run)
    with (
        mock.patch.object(worker, "load_model", load),
        mock.patch.object(baton_kernels, "ops_for", return_value=_Mixed()),
        mock.patch.object(NativeAttention, "run", run),
    ):
        yield


def serve(way: str, dtype: str) -> None:
    """Answer each case, one a line, with the decoder's seconds per step, in one process."""
    torch._dynamo.config.cache_size_limit = 256
    ways = contextlib.nullcontext() if way == "tapes" else _torch_layers(compiled=way == "compiled")
    with ways:
        llm = LLM(
            str(FOLDER / dtype),
            dtype=dtype,
            prefix_cache=False,
            kv_cache_bytes=2**28,
            max_num_batched_tokens=2048,
        )
        decoder: Any = worker_of(llm.engine.executor).runner._model.model  # type: ignore[attr-defined]
        spent: list[float] = []
        forward = decoder.forward

        def timed(*arguments: Any, **options: Any) -> Any:
            started = time.perf_counter()
            found = forward(*arguments, **options)
            spent.append(time.perf_counter() - started)
            return found

        decoder.forward = timed
        print("ready", flush=True)
        for line in sys.stdin:
            num_requests, num_tokens = CASES[line.strip()]
            prompts = [
                [(7 * row + 3 * i) % 4000 + 3 for i in range(num_tokens)]
                for row in range(num_requests)
            ]
            steps = 1 if line.startswith("prefill") else STEPS
            spent.clear()
            llm.generate(prompts, SamplingParams(temperature=0, ignore_eos=True, max_tokens=steps))
            decodes = spent[-(steps - 1) :] if steps > 1 else [sum(spent)]
            print(json.dumps(statistics.median(decodes)), flush=True)


def measure(dtype: str, rounds: int) -> dict[str, dict[str, float]]:
    """Return median seconds of each case and way, and of compiling; ways take turns."""
    make_model(dtype)
    processes = {}
    for way in WAYS:
        command = call_words("benchmarks.engine_cpu.compile_layers:serve", way, dtype)
        processes[way] = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=own_environment()
        )
    found: dict[str, dict[str, list[float]]] = {case: {way: [] for way in WAYS} for case in CASES}
    first: dict[str, float] = {}

    def ask(way: str, case: str) -> float:
        process = processes[way]
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{case}\n")
        process.stdin.flush()
        return float(process.stdout.readline())

    for way, process in processes.items():
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", way
        started = time.perf_counter()
        for case in CASES:
            ask(way, case)
            ask(way, case)
        first[way] = time.perf_counter() - started
    for _ in range(rounds):
        for case in CASES:
            for way in WAYS:
                found[case][way].append(ask(way, case))
    for process in processes.values():
        assert process.stdin is not None
        process.stdin.close()
        process.wait()
    medians = {
        case: {way: statistics.median(times) for way, times in of.items()}
        for case, of in found.items()
    }
    return {**medians, "first calls": first}


def run(run: Run, rounds: int = 7) -> Document:
    """Measure the decoder's seconds per step, for each case and way of computing."""
    results = {dtype: measure(dtype, rounds) for dtype in ("bfloat16", "float32")}
    for dtype, cases in results.items():
        run.show(f"{dtype}, seconds", cases)
    return {"seconds": results}
