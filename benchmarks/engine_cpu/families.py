"""Compare model families on a CPU with a dense model, with `transformers` and with llama.cpp.

Each family is one row: a model with random float32 weights and some hundred million parameters
(fewer with a smaller ``--layers``). Each engine runs alone in its own process, in turns with the
others; its best round counts, because other processes can only slow a round down. A new family
needs a row in `SHAPES`. Refuses to know: how to call an engine (engine_cpu_subjects.py).
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.engine_cpu import engine_cpu
from benchmarks.runner.checkpoints import random_checkpoint
from benchmarks.runner.environment import ROOT
from benchmarks.runner.own_process import answer_of, call_words, own_environment
from benchmarks.runner.run import Document, Run

BUILD = ROOT / "build" / "families"
CASES = ("prefill 512", "decode 1", "decode 8")
PEERS = ("transformers", "llamacpp")
SHORT_CONTEXT = 32

_DENSE: dict[str, Any] = engine_cpu.SHAPE | {"max_position_embeddings": 8192, "eos_token_id": 2}
_FOUR_OF_SIXTEEN = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 512}
# Row -> architecture, and the fields of config.json that differ from `_DENSE`.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3": ("Qwen3ForCausalLM", {}),
    "Mistral, window": ("MistralForCausalLM", {"sliding_window": 1024}),
    "Qwen3-MoE": ("Qwen3MoeForCausalLM", _FOUR_OF_SIXTEEN | {"norm_topk_prob": True}),
    "Mixtral": (
        "MixtralForCausalLM",
        {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 1024},
    ),
    "Gemma 3": (
        "Gemma3ForCausalLM",
        {"sliding_window": 512, "tie_word_embeddings": True, "query_pre_attn_scalar": 64},
    ),
    "DeepSeek-V2": (
        "DeepseekV2ForCausalLM",
        {
            "num_key_value_heads": 12,
            "head_dim": 64,
            "q_lora_rank": None,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "first_k_dense_replace": 12,
            "n_routed_experts": 8,  # a required field, although no layer here has experts
            "num_experts_per_tok": 2,
        },
    ),
}
# A token uses as many weights in a row with experts (only the chosen experts' weights) as in the
# dense row.
DENSE_ROW = "Qwen3"
EXPERT_ROWS = ("Qwen3-MoE", "Mixtral")
ATTENTION_ROWS = ("Qwen3", "DeepSeek-V2")


def make_checkpoint(row: str, num_layers: int) -> Path:
    """Make the row's random checkpoint unless it exists; return its folder."""
    architecture, others = SHAPES[row]
    shape = _DENSE | others | {"num_hidden_layers": num_layers}
    return random_checkpoint(BUILD / f"{row}-{num_layers}", architecture, shape)


def measure(
    row: str, pythons: dict[str, Path], options: Options
) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    """Return a row's tokens per second by engine and case, and why peers or cases are missing."""
    timing = engine_cpu.Options(
        threads=options.threads, rounds=options.rounds, tokens=options.tokens, repetitions=1,
        cases=CASES,
    )  # fmt: skip
    best, silent = engine_cpu.measure(pythons, make_checkpoint(row, options.layers), timing)
    if "baton" not in best:
        raise RuntimeError(f"{row}: {silent['baton']}")
    return best, {f"{row}, {engine}": why for engine, why in silent.items()}


def measure_attention(row: str, options: Options) -> dict[str, float]:
    """Measure how fast attention reads KV, from the time that a long context adds to a token."""
    folder = make_checkpoint(row, options.layers)
    call = "benchmarks.engine_cpu.families:print_attention"
    numbers = (options.threads, options.tokens, options.context)
    variables = own_environment(OMP_NUM_THREADS=str(options.threads))
    found = answer_of(call_words(call, folder, *numbers), env=variables)
    config = json.loads((folder / "config.json").read_text())
    if config.get("kv_lora_rank"):
        num_values = config["kv_lora_rank"] + config["qk_rope_head_dim"]
    else:
        num_values = 2 * config["num_key_value_heads"] * config["head_dim"]
    num_tokens = options.context - SHORT_CONTEXT
    num_bytes = 4 * num_values * config["num_hidden_layers"] * num_tokens
    attention_s = found["long_s"] - found["short_s"]
    rate = num_bytes / attention_s / 1e9 if attention_s > 0 else 0.0
    return {
        "bytes_per_token_and_layer": 4 * num_values,
        "milliseconds": round(1e3 * attention_s, 3),
        "gb_s": round(rate, 2),
        "read_gb_s": round(found["read_gb_s"], 2),
        "share_of_bandwidth": round(rate / found["read_gb_s"], 3),
    }


def print_attention(folder: str, threads: str, tokens: str, context: str) -> None:
    """Print as JSON the seconds per token after a short and a long context, and GB/s."""
    import torch

    from baton.api.sampling_params import SamplingParams
    from engine import LLM

    llm = LLM(
        folder,
        dtype="float32",
        num_threads=int(threads),
        max_num_batched_tokens=2048,
        kv_cache_bytes=2**29,
    )
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=1 + int(tokens))

    def seconds_per_token(context: int) -> float:
        times = [time.perf_counter() for _ in llm.stream([3] * context, params)]
        return statistics.median(after - before for before, after in pairwise(times))

    seconds_per_token(SHORT_CONTEXT)
    memory = torch.ones(2**26)  # 256 MiB

    def read_s() -> float:
        start = time.perf_counter()
        memory.sum()
        return time.perf_counter() - start

    found = {
        "short_s": seconds_per_token(SHORT_CONTEXT),
        "long_s": seconds_per_token(int(context)),
        "read_gb_s": 4 * memory.numel() / min(read_s() for _ in range(10)) / 1e9,
    }
    print(json.dumps(found))


def ratios_of(best: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the ratios of tokens per second that docs/performance.md judges."""
    ratios: dict[str, dict[str, float]] = {}
    for row, engines in best.items():
        for engine in PEERS:
            if theirs := engines.get(engine):
                over = {case: round(engines["baton"][case] / theirs[case], 2) for case in CASES}
                ratios[f"{row} over {engine}"] = over
    for row in EXPERT_ROWS:
        if row in best and DENSE_ROW in best:
            dense = best[DENSE_ROW]["baton"]
            over = {case: round(best[row]["baton"][case] / dense[case], 2) for case in CASES[1:]}
            ratios[f"{row} over dense"] = over
    return ratios


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to time families.

    Attributes:
        rounds: number of rounds; each engine has a new process per row and round.
        tokens: number of decode steps per case.
        context: number of tokens of the long context in the attention rows.
        peers: other engines to time; llamacpp is built if it is missing.
    """

    threads: int = 2
    rounds: int = 2
    tokens: int = 32
    layers: int = 12
    context: int = 4096
    rows: Sequence[str] = tuple(SHAPES)
    peers: Sequence[str] = PEERS


def run(run: Run, options: Options) -> Document:
    """Measure all engines in turns, then Baton's attention over a long context."""
    from models.registry import MODELS

    missing = [row for row in options.rows if SHAPES[row][0] not in MODELS.names()]
    rows = [row for row in options.rows if row not in missing]
    pythons = {"baton": Path(sys.executable)}
    for peer in options.peers:
        pythons[peer] = (
            Path(sys.executable) if peer == "transformers" else engine_cpu.python_of(peer)
        )
    best: dict[str, dict[str, Any]] = {}
    silent: dict[str, str] = {}
    for row in rows:
        best[row], why = measure(row, pythons, options)
        silent |= why
    attention = {row: measure_attention(row, options) for row in ATTENTION_ROWS if row in rows}
    for row, engines in best.items():
        run.show(f"{row}, tokens per second", engines)
    run.show("not supported", missing)
    return {
        "shapes": {row: {"architecture": SHAPES[row][0], **SHAPES[row][1]} for row in rows},
        "shape_of_all": _DENSE | {"num_hidden_layers": options.layers},
        "num_threads": options.threads,
        "dtype": "float32",
        "context": options.context,
        "tokens_per_second": best,
        "ratios": ratios_of(best),
        "attention": attention,
        "not_supported": missing,
        "missing": silent,
    }
