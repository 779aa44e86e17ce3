"""Measure models on several ranks of one machine: sums, decode steps, prompts, hand-offs.

Two processes measure sums over ranks, and sends of hidden states between two computing stages.
Engines compute in turns, with a model of about 125 million random float32 weights in a Qwen3 shape;
each engine has its own processes. Hand-offs of the demo model run between real nodes. Ratios
compare medians of one run, or the engines' best rounds, because other processes can only slow a
round down. `--without` leaves parts out, which keep their earlier results.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import psutil

from benchmarks.engine_cpu.engine_cpu import WORKS, make_checkpoint
from benchmarks.faults.chaos_site import ranks_of
from benchmarks.runner.deployments import deployed, receipt_of
from benchmarks.runner.own_process import answer_of, call_words, own_environment
from benchmarks.runner.run import Document, Run

KIBIBYTES = (8, 16, 32, 64)
# A burst has several sums over one transport without a pause, as in a step, so that neither rank
# waits long for the other.
NUM_BURSTS, SUMS_IN_BURST = 50, 10
NUM_SENT, STAGE_S = 100, 0.004  # number of sends of hidden states, and seconds of a stage's step
ONE_THREAD, STAGES = "one process, 1 thread", {"num_threads": 2, "pipeline_parallel_size": 2}
ENGINES: dict[str, dict[str, Any]] = {
    ONE_THREAD: {"num_threads": 1},
    "one process, 2 threads": {"num_threads": 2},
    "TP 2": {"num_threads": 2, "tensor_parallel_size": 2},
    "PP 2": STAGES,
    # The last stage has fewer layers, because its logits take as long as 4 layers
    "PP 2, 8 + 4 layers": {**STAGES, "pipeline_layers": "8,4"},
}
CHUNK_TOKENS, NUM_CHUNKS, DECODE_TOKENS = 128, 12, 48
BATCH, NUM_PROMPTS = 16, 4
BATCHES = {f"{BATCH} decodes": "batch_token_s", f"{NUM_PROMPTS} prompts": "prompts_s"}
SHAPES = {"P1 -> D1": (1, 1), "P2 -> D1": (2, 1), "P1 -> D2": (1, 2)}
PROMPT_TOKENS, NUM_HANDOVERS, NUM_STARTS = 1000, 16, 2
REST_S = 5.0
LAYOUTS = ("layers", "heads")


# ---------------------------------------------------------------------- sums


def time_sums(rank: int, folder: str, descriptor: int, to: Any) -> None:
    """Time sums as one of two ranks; send the median microseconds by transport and size."""
    import torch

    from models.parallel.shared_group import share_memory
    from models.parallel.torch_group import TorchGroup

    torch.set_num_threads(1)
    gloo = TorchGroup(rank, 2, folder, "sums", torch.device("cpu"))
    shared = share_memory(gloo, descriptor, 0)
    found: dict[str, dict[str, float]] = {}
    for kibibytes in KIBIBYTES:
        tensor = torch.zeros(kibibytes * 256)
        samples: dict[str, list[float]] = {"gloo": [], "shared memory": []}
        for _ in range(NUM_BURSTS):
            for name, group in (("gloo", gloo), ("shared memory", shared)):
                group.all_reduce(tensor)  # the ranks wait here for each other
                for _ in range(SUMS_IN_BURST):
                    started = time.perf_counter()
                    group.all_reduce(tensor)
                    samples[name].append(time.perf_counter() - started)
        for name, times in samples.items():
            found.setdefault(name, {})[str(kibibytes)] = statistics.median(times) * 1e6
    if rank == 0:
        to.put(found)


def measure_sums() -> dict[str, dict[str, float]]:
    """Start two ranks that measure sums; return the first rank's times."""
    from baton_kernels.native.library import load_library
    from models.parallel.shared_group import open_shared

    load_library()
    descriptor = open_shared(1, 2)
    assert descriptor is not None
    context = get_context("fork")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=time_sums, args=(rank, folder, descriptor, answers))
            for rank in range(2)
        ]
        for process in ranks:
            process.start()
        found: dict[str, dict[str, float]] = answers.get(timeout=120)
        for process in ranks:
            process.join()
    os.close(descriptor)
    return found


# ---------------------------------------------------------------------- hidden states


def time_hidden_states(rank: int, folder: str, descriptor: int | None, to: Any) -> None:
    """Compute as a stage; the second stage puts into ``to`` how many microseconds sends took."""
    import torch

    from models.parallel.torch_group import connect

    torch.set_num_threads(1)
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    ranks = connect(rank, 2, 1, folder, torch.device("cpu"), descriptor)
    hidden = torch.zeros(8, 384, dtype=torch.float64)  # 24 KiB
    late: list[float] = []
    for _ in range(NUM_SENT):
        until = time.monotonic() + STAGE_S * (1.0 if rank == 0 else 0.95)
        while time.monotonic() < until:
            pass
        if rank == 0:
            hidden = hidden.clone()
            hidden[0, 0] = time.monotonic()
            ranks.pass_on(hidden)
        else:
            came = ranks.take_over(torch.empty_like(hidden))
            late.append(1e6 * (time.monotonic() - float(came[0, 0])))
    if rank:
        to.put(late[NUM_SENT // 10 :])
    else:
        time.sleep(0.5)  # gloo's thread still sends


def measure_hidden_states() -> dict[str, dict[str, float]]:
    """Time sends between two computing stages, over gloo and in shared memory, in turns."""
    from baton_kernels.native.library import load_library
    from models.parallel.shared_group import open_shared

    load_library()
    context = get_context("fork")
    found: dict[str, list[float]] = {"gloo": [], "shared memory": []}
    for _ in range(3):
        for name, late in found.items():
            descriptor = open_shared(2, 1) if name == "shared memory" else None
            answers = context.Queue()
            with tempfile.TemporaryDirectory() as folder:
                stages = [
                    context.Process(
                        target=time_hidden_states, args=(rank, folder, descriptor, answers)
                    )
                    for rank in range(2)
                ]
                for process in stages:
                    process.start()
                late += answers.get(timeout=120)
                for process in stages:
                    process.join()
            if descriptor is not None:
                os.close(descriptor)
    return {
        name: {"p50": statistics.median(late), "p90": statistics.quantiles(late, n=10)[-1]}
        for name, late in found.items()
    }


# ---------------------------------------------------------------------- engines


def run_engine(name: str, folder: Path) -> dict[str, float]:
    """Measure one engine: seconds of decodes and prompts, and the CPU share of idle ranks."""
    from baton.api.sampling_params import SamplingParams
    from engine import LLM

    llm = LLM(
        str(folder),
        dtype="float32",
        **ENGINES[name],
        prefix_cache=False,
        long_prefill_token_threshold=CHUNK_TOKENS,
        max_num_batched_tokens=CHUNK_TOKENS,
        kv_cache_bytes=2**29,
    )
    draw = random.Random(0)

    def seconds(num_prompt: int, num_output: int, num_requests: int = 1) -> float:
        prompts = [draw.choices(range(30_000), k=num_prompt) for _ in range(num_requests)]
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=num_output)
        started = time.perf_counter()
        llm.generate(prompts, params)
        return time.perf_counter() - started

    def seconds_per_token(num_requests: int) -> float:
        """Return the seconds per decoded token, without the time for prompts."""
        whole = seconds(32, DECODE_TOKENS, num_requests)
        prompts = seconds(32, 1, num_requests)
        return (whole - prompts) / (DECODE_TOKENS - 1) / num_requests

    seconds(CHUNK_TOKENS * 2, 8)  # warms up
    decode = [seconds_per_token(1) for _ in range(3)]
    batch = [seconds_per_token(BATCH) for _ in range(2)]
    prompt = [seconds(CHUNK_TOKENS * NUM_CHUNKS, 1) for _ in range(3)]
    prompts = seconds(CHUNK_TOKENS * NUM_CHUNKS, 1, NUM_PROMPTS)
    others = ranks_of(os.getpid())[1:]
    before = sum(map(cpu_seconds, others))
    time.sleep(REST_S)
    idle = (sum(map(cpu_seconds, others)) - before) / REST_S / max(len(others), 1)
    llm.engine.close()
    return {
        "decode_s": statistics.median(decode),
        "prompt_s": statistics.median(prompt),
        "batch_token_s": min(batch),
        "prompts_s": prompts,
        "idle_share": idle,
    }


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds that a process has used."""
    return sum(psutil.Process(pid).cpu_times()[:2])


def measure_engines(rounds: int) -> dict[str, dict[str, list[float]]]:
    """Measure the engines in turns; return each figure's value per round, by engine."""
    folder = make_checkpoint(WORKS["125M"])
    found: dict[str, dict[str, list[float]]] = {name: {} for name in ENGINES}
    for _ in range(rounds):
        for name, figures in found.items():
            command = call_words("benchmarks.engine_cpu.parallel:print_engine", name, folder)
            environment = own_environment(OMP_NUM_THREADS=str(ENGINES[name]["num_threads"]))
            for figure, value in answer_of(command, env=environment).items():
                figures.setdefault(figure, []).append(value)
    return found


# ---------------------------------------------------------------------- hand-overs


def measure_handovers() -> dict[str, dict[str, float]]:
    """Return medians of a hand-off's exposed milliseconds and of its descriptors.

    Descriptors are counted per block and per pair of ranks.
    """
    from baton import Client, SamplingParams
    from baton.api.outputs import PushReceipt

    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    pushes: dict[tuple[str, str], list[PushReceipt]] = {}

    def hand_over(layout: str, name: str) -> None:
        prefill, decode = SHAPES[name]
        options: dict[str, Any] = {
            "node_args": ["--kv-cache-memory", "128M", "--kv-layout", layout],
            "prefill_args": ["--tensor-parallel-size", str(prefill)],
            "decode_args": ["--tensor-parallel-size", str(decode)],
        }
        draw = random.Random(0)
        with deployed(**options) as deployment, Client(deployment.config.listen) as client:
            for number in range(NUM_HANDOVERS + 1):
                prompt = draw.choices(range(4000), k=PROMPT_TOKENS)
                _, handed = receipt_of(client, prompt, params)
                if number:  # the first hand-off warms up
                    pushes.setdefault((layout, name), []).append(handed.push)

    # The kernel places threads differently at each start, so each layout starts several times.
    for _ in range(NUM_STARTS):
        for layout in LAYOUTS:
            for name in SHAPES:
                hand_over(layout, name)
    found = {}
    for (layout, name), of_both in pushes.items():
        found[f"{name}, {layout}"] = {
            "exposed_ms": statistics.median(p.exposed_transfer_s for p in of_both) * 1e3,
            "descriptors": statistics.median(
                p.num_descriptors / p.num_blocks / max(SHAPES[name]) for p in of_both
            ),
        }
    return found


# ---------------------------------------------------------------------- the whole run


def ratios(
    sums: dict[str, dict[str, float]],
    engines: dict[str, dict[str, list[float]]],
    handovers: dict[str, dict[str, float]],
    mail: dict[str, dict[str, float]],
) -> dict[str, float]:
    """Return the ratios of figures that docs/performance.md judges."""
    found: dict[str, float] = {}
    if sums:
        found["sums"] = max(
            sums["shared memory"][size] / sums["gloo"][size] for size in sums["gloo"]
        )
    if mail:
        found["mail"] = mail["shared memory"]["p90"] / mail["gloo"]["p90"]
    if engines:
        best = {
            name: {figure: min(values) for figure, values in figures.items()}
            for name, figures in engines.items()
        }
        one, two = best[ONE_THREAD], best["one process, 2 threads"]
        found["decode TP 2 / 2 threads"] = two["decode_s"] / best["TP 2"]["decode_s"]
        found["decode TP 2 / 1 thread"] = one["decode_s"] / best["TP 2"]["decode_s"]
        found["decode 2 threads / 1 thread"] = one["decode_s"] / two["decode_s"]
        found["prompt PP 2 / 1 thread"] = one["prompt_s"] / best["PP 2"]["prompt_s"]
        for name in ("PP 2", "PP 2, 8 + 4 layers"):
            for what, figure in BATCHES.items():
                if figure in one and name in best:  # earlier results lack this part
                    found[f"{what}, {name} / 1 thread"] = one[figure] / best[name][figure]
        found["idle rank, share of a core"] = max(
            max(engines[name]["idle_share"]) for name in ("TP 2", "PP 2")
        )
    if handovers:
        for layout in LAYOUTS:
            alone = handovers[f"P1 -> D1, {layout}"]["exposed_ms"]
            unlike = {name: handovers[f"{name}, {layout}"] for name in ("P2 -> D1", "P1 -> D2")}
            for name, figures in unlike.items():
                found[f"hand-over {name}, {layout}"] = figures["exposed_ms"] / alone
            found[f"descriptors per block and pair, {layout}"] = max(
                figures["descriptors"] for figures in unlike.values()
            )
    return found


def run(
    run: Run,
    rounds: int = 2,
    without: Sequence[Literal["sums", "engines", "handovers", "mail"]] = (),
) -> Document:
    """Measure sums, engines, hand-overs, and hidden states between stages.

    Args:
        without: names of the parts to leave out.
    """
    sums = {} if "sums" in without else measure_sums()
    engines = {} if "engines" in without else measure_engines(rounds)
    handovers = {} if "handovers" in without else measure_handovers()
    mail = {} if "mail" in without else measure_hidden_states()
    measured = {"sums_us": sums, "engines": engines, "handovers": handovers, "mail_us": mail}
    run.show("ratios", ratios(sums, engines, handovers, mail))
    for name, rows in measured.items():
        run.show(name, rows)
    return merge_results(run.environment, measured, run.saved())


def print_engine(name: str, folder: str) -> None:
    """Print the figures of an engine as JSON; runs in its own process."""
    print(json.dumps(run_engine(name, Path(folder))))


def merge_results(
    environment: Mapping[str, Any], measured: Mapping[str, Any], before: Mapping[str, Any]
) -> dict[str, Any]:
    """Keep the earlier results, with their dates, of the parts that this run leaves out."""
    keys = ("date", "git_revision", "load_average")
    when = {key: environment[key] for key in keys}
    parts = {name: figures or before.get(name, {}) for name, figures in measured.items()}
    of_parts = {
        name: when if figures else before.get("of_parts", {}).get(name, {})
        for name, figures in measured.items()
    }
    return {"ratios": ratios(*parts.values()), **parts, "of_parts": of_parts}
