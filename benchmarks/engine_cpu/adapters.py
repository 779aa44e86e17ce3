"""Measure what LoRA adapters cost on a CPU: tokens/s, loads while serving, and routing.

The model has Qwen3-0.6B's shape and random bfloat16 weights; each rank has one adapter, on all
linear layers. Base model and adapters take turns in one process, so that both run under the same
conditions; the median of the rounds' ratios counts. With `--peers llamacpp`, llama.cpp reads the
same weights and adapters as GGUF files. llama.cpp's server computes the requests of different
adapters in one call per adapter, and so does this comparison (adapters_llamacpp.py). Serving over
HTTP is measured by served/served_adapters.py.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.engine_cpu import engine_cpu
from benchmarks.runner.own_process import answer_of, call_words, own_environment
from benchmarks.runner.random_adapters import LAYERS, random_matrices, save_adapter
from benchmarks.runner.run import Document, Run

RANKS = (8, 16, 32, 64)
DECODE, PREFILL = "decode 8", "prefill 2048"
# Case -> (number of requests, number of tokens of each prompt).
SIZES = {DECODE: (8, 32), PREFILL: (4, 512)}
# arguments: prompts, number of output tokens, whether with adapters
Generate = Callable[[Sequence[list[int]], int, bool], object]


def make_adapter(folder: Path, shape: Mapping[str, Any], rank: int) -> None:
    """Write a random adapter, in PEFT's layout and as GGUF, unless it exists."""
    if (folder / "adapter_model.gguf").exists():
        return
    import gguf

    matrices = random_matrices(shape, rank)
    save_adapter(folder, matrices, rank)
    writer = gguf.GGUFWriter(folder / "adapter_model.gguf.part", "qwen3")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(rank))
    for (index, layer, matrix), numbers in matrices.items():
        name = f"blk.{index}.{LAYERS[layer][0]}.weight.lora_{matrix.lower()}"
        writer.add_tensor(name, numbers.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (folder / "adapter_model.gguf.part").rename(folder / "adapter_model.gguf")


def rate_of(generate: Generate, case: str, num_tokens: int, *, adapted: bool) -> float:
    """Return the tokens per second of one case.

    For ``PREFILL`` prompt tokens are counted, for the other cases output tokens.
    """
    num_requests, length = SIZES[case]
    draw = random.Random(case)
    prompts = [draw.choices(range(1000), k=length) for _ in range(num_requests)]

    def seconds(new_tokens: int) -> float:
        start = time.perf_counter()
        generate(prompts, new_tokens, adapted)
        return time.perf_counter() - start

    if case == PREFILL:
        return num_requests * length / seconds(1)
    first, all_tokens = seconds(1), seconds(1 + num_tokens)
    return num_requests * num_tokens / (all_tokens - first)


def rates_of(generate: Generate, rounds: int, num_tokens: int) -> dict[str, list[list[float]]]:
    """Return the rates of the base model and of the adapters in each round, by case.

    Base model and adapters take turns in running first, so that neither gains from its place in a
    round.
    """
    found: dict[str, list[list[float]]] = {}
    for case in SIZES:
        for adapted in (False, True):  # warm-up, in which the engine records its tapes
            rate_of(generate, case, 4, adapted=adapted)
        found[case] = []
        for number in range(rounds):
            order = (False, True) if number % 2 else (True, False)
            rates = {one: rate_of(generate, case, num_tokens, adapted=one) for one in order}
            found[case].append([rates[False], rates[True]])
    return found


def print_rates(folder: str, adapters: str, threads: str, rounds: str, tokens: str) -> None:
    """Load Baton's engine, and print as JSON the rates that `rates_of` measures."""
    from baton.api.sampling_params import SamplingParams
    from engine import LLM

    folders = sorted(Path(adapters).iterdir())
    llm = LLM(
        folder,
        dtype="bfloat16",
        num_threads=int(threads),
        adapters={one.name: one for one in folders},
        prefix_cache=False,
        max_num_batched_tokens=2048,
        kv_cache_bytes=2**30,
    )

    def generate(prompts: Sequence[list[int]], num_tokens: int, adapted: bool) -> object:
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=num_tokens)
        names = [folders[index % len(folders)].name for index in range(len(prompts))]
        return llm.generate(prompts, params, adapter=names if adapted else "")

    print(json.dumps(rates_of(generate, int(rounds), int(tokens))))


def summary_of(rates: Mapping[str, list[list[float]]]) -> dict[str, dict[str, float]]:
    """Return, by case, the best rates, and the median of adapters' rate / base model's rate."""
    return {
        case: {
            "base": round(max(base for base, _ in rounds), 1),
            "adapters": round(max(adapted for _, adapted in rounds), 1),
            "ratio": round(statistics.median(adapted / base for base, adapted in rounds), 3),
        }
        for case, rounds in rates.items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Which parts to measure, and how.

    Attributes:
        parts: parts to run; a saved file keeps its other parts.
        shape: the model of the parts rates and cold, 125M or 0.6B.
        ranks: the rank of each adapter whose rate is measured.
        rounds: number of turns of base model and adapters.
        tokens: number of decode steps per turn.
        peers: other engines to time; llamacpp is built if missing.
        cold: number of adapters that are loaded while serving, in each of two phases.
        requests: number of requests for each routing policy.
    """

    parts: Sequence[Literal["rates", "cold", "routing"]] = ("rates", "cold", "routing")
    shape: Literal["125M", "0.6B"] = "0.6B"
    ranks: Sequence[int] = RANKS
    threads: int = 2
    rounds: int = 3
    tokens: int = 48
    peers: Sequence[Literal["llamacpp"]] = ()
    cold: int = 6
    requests: int = 600


def run(run: Run, options: Options) -> Document:
    """Measure rates, loads of adapters while serving, and routing."""
    document = {key: part for key, part in run.saved().items() if key != "environment"}
    if "rates" in options.parts:
        document |= measure_rates(run, options)
    if "cold" in options.parts:
        from benchmarks.served.served_adapters import measure_cold
        from benchmarks.served.served_servers import make_served

        shape = engine_cpu.WORKS[options.shape].shape
        document["cold"] = measure_cold(make_served(options.shape), shape, options.cold, 2)
        run.show("cold", document["cold"])
    if "routing" in options.parts:
        from benchmarks.served.served_adapters import measure_routing

        document["routing"] = measure_routing(options.requests)
        run.show("routing", document["routing"])
    return document


def measure_rates(run: Run, options: Options) -> Document:
    """Time base model and adapters in turns, then llama.cpp with the same weights."""
    work = engine_cpu.WORKS[options.shape]
    folder = engine_cpu.make_checkpoint(work)
    adapters = engine_cpu.BUILD / f"{work.folder}-adapters-{'-'.join(map(str, options.ranks))}"
    for rank in options.ranks:
        make_adapter(adapters / f"rank{rank:03}", work.shape, rank)
    numbers = (options.threads, options.rounds, options.tokens)
    environment = own_environment(OMP_NUM_THREADS=str(options.threads))
    call = call_words("benchmarks.engine_cpu.adapters:print_rates", folder, adapters, *numbers)
    found = {"baton": summary_of(answer_of(call, engine_cpu.RUN_LIMIT_S, env=environment))}
    missing: dict[str, str] = {}
    for peer in options.peers:
        script = Path(__file__).parent / f"adapters_{peer}.py"
        try:
            python = engine_cpu.python_of(peer)
            words = (script, folder, adapters, *numbers)
            rates = engine_cpu.answer_in(python, *words, threads=options.threads)
            found[peer] = summary_of(rates)
        except (subprocess.SubprocessError, OSError, ValueError) as error:
            missing[peer] = engine_cpu.reason_of(error)
            print(peer, missing[peer], file=sys.stderr)
    for engine, cases in found.items():
        run.show(f"{engine}, tokens per second", cases)
    return {
        "shape": work.shape,
        "dtype": work.dtype,
        "num_threads": options.threads,
        "ranks": list(options.ranks),
        "tokens_per_second": found,
        "over_peers": {
            peer: {
                case: round(found["baton"][case]["adapters"] / cases[case]["adapters"], 2)
                for case in cases
            }
            for peer, cases in found.items()
            if peer != "baton"
        },
        "missing": missing,
    }
