"""Compare serving over HTTP with vLLM and llama.cpp, using vLLM's load generator.

Servers take turns on the same two cores. `vllm bench serve` (in vLLM's environment under build/,
see engine_cpu.py) sends new prompts of random tokens as Poisson arrivals; it runs on other cores if
there are any. The medians of the rounds are compared.

    python -m benchmarks served --save            (three rounds of two minutes a server)
    python -m benchmarks served --servers "baton split,vllm" --rates 4 --num-prompts 10 --rounds 1
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from baton.processes.free_address import free_address
from benchmarks.engine_cpu.engine_cpu import WORKS, python_of
from benchmarks.runner.run import Run
from benchmarks.served.served_servers import (
    NAME,
    SERVERS,
    Job,
    Server,
    last_words,
    make_served,
    others_environment,
    running,
)

PROMPT_TOKENS, OUTPUT_TOKENS = 512, 64
NUM_CORES = 2
NUM_WARMUPS = 4
RUN_LIMIT_S = 600.0
# vLLM's name of a figure -> its name in our results.
KEYS = {
    "output_throughput": "output_tokens_per_s",
    "median_ttft_ms": "ttft_p50_ms",
    "p99_ttft_ms": "ttft_p99_ms",
    "median_itl_ms": "itl_p50_ms",
    "p99_itl_ms": "itl_p99_ms",
    "completed": "num_completed",
    "failed": "num_failed",
    "total_output_tokens": "num_output_tokens",
}
SHOWN = tuple(KEYS.values())[:5]

Numbers = dict[str, float]
Runs = dict[str, dict[str, list[Numbers]]]  # server -> rate -> figures of each run


def bench_command(
    job: Job, url: str, *, rate: float, num_prompts: int, seed: int, path: Path
) -> list[str]:
    """Return the generator's command, which writes its result to ``path``."""
    return [
        *(str(python_of("vllm").with_name("vllm")), "bench", "serve"),
        *("--backend", "openai", "--base-url", url, "--endpoint", "/v1/completions"),
        *("--model", NAME, "--tokenizer", str(job.folder), "--dataset-name", "random"),
        *("--random-input-len", str(PROMPT_TOKENS), "--random-output-len", str(OUTPUT_TOKENS)),
        *("--ignore-eos", "--temperature", "0", "--request-rate", f"{rate:g}"),
        *("--num-prompts", str(num_prompts), "--num-warmups", str(NUM_WARMUPS)),
        *("--seed", str(seed), "--percentile-metrics", "ttft,itl", "--metric-percentiles", "99"),
        *("--disable-tqdm", "--save-result", "--result-dir", str(path.parent)),
        *("--result-filename", path.name),
    ]


def read_result(document: Mapping[str, Any]) -> Numbers:
    """Return the figures to keep from the generator's file; raise KeyError for a missing one."""
    return {ours: round(float(document[theirs]), 2) for theirs, ours in KEYS.items()}


def median_of(runs: Sequence[Numbers]) -> Numbers:
    """Return the median of each figure over the runs, but the sum of their failures."""
    medians = {key: round(statistics.median(run[key] for run in runs), 2) for key in SHOWN}
    return {**medians, "num_failed": sum(run["num_failed"] for run in runs), "rounds": len(runs)}


def seed_of(round_number: int, rate: float) -> int:
    """Return the seed of a round and a rate, which is equal for all servers."""
    return 1000 * round_number + round(rate * 10)


def measure_once(
    server: Server, job: Job, options: Options, earlier: Mapping[str, list[Numbers]]
) -> dict[str, Numbers]:
    """Start a server and measure each rate; raise RuntimeError or CalledProcessError.

    Args:
        earlier: the server's runs so far, by rate.
    """
    found = {}
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as name:
        folder = Path(name)
        with running(server, job, folder / "server.log") as live:
            for rate in options.rates:
                path = folder / f"{rate:g}.json"
                command = bench_command(
                    job,
                    live.url,
                    rate=rate,
                    num_prompts=options.num_prompts,
                    seed=seed_of(len(earlier.get(f"{rate:g}", [])), rate),
                    path=path,
                )
                play(command, generator_cores(job.cores), folder / "generator.log")
                found[f"{rate:g}"] = read_result(json.loads(path.read_text(encoding="utf-8")))
    return found


def generator_cores(taken: Sequence[int]) -> list[int]:
    """Return the cores that the server does not use; if there are none, all cores."""
    every = os.sched_getaffinity(0)
    return sorted(every - set(taken)) or sorted(every)


def play(command: list[str], cores: list[int], log: Path) -> None:
    """Run the load generator; raise RuntimeError with its last output if it fails."""
    with log.open("wb") as output:
        done = subprocess.run(
            command,
            cwd=log.parent,
            env=others_environment(),
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=RUN_LIMIT_S,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"the generator failed: {last_words(log)}")


def measure(
    job: Job,
    options: Options,
    runs: Runs,
    missing: dict[str, str],
    console: Console,
    save: Callable[[], None],
) -> None:
    """Measure rounds of all servers, and add them to ``runs``; save after each measurement."""
    for number in range(options.rounds):
        turn = number % len(options.servers)
        for name in (*options.servers[turn:], *options.servers[:turn]):
            if name in missing:
                continue
            fresh = Job(job.folder, job.dtype, free_address(), job.cores)
            try:
                found = measure_once(SERVERS[name], fresh, options, runs.get(name, {}))
            except (OSError, RuntimeError, subprocess.SubprocessError) as error:
                missing[name] = str(error)[-400:]
                console.print(f"{name}: {missing[name]}")
                continue
            for rate, numbers in found.items():
                runs.setdefault(name, {}).setdefault(rate, []).append(numbers)
                console.print(name, f"{rate}/s", json.dumps(numbers), soft_wrap=True)
            save()


def summarize(runs: Runs) -> dict[str, dict[str, Numbers]]:
    """Return the medians of the runs, by rate and then by server."""
    found: dict[str, dict[str, Numbers]] = {}
    for name, rates in runs.items():
        for rate, own in rates.items():
            found.setdefault(rate, {})[name] = median_of(own)
    return dict(sorted(found.items(), key=lambda pair: float(pair[0])))


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Which servers to measure, under which load.

    Attributes:
        shape: name of the checkpoint, 125M or 0.6B.
        rates: the rates to measure, in requests per second.
        append: whether to keep the saved runs of this shape, and add to them.
    """

    shape: Literal["125M", "0.6B"] = "125M"
    servers: Sequence[str] = tuple(SERVERS)
    rates: Sequence[float] = (1.0, 4.0)
    num_prompts: int = 60
    rounds: int = 3
    append: bool = False

    def __post_init__(self) -> None:
        """Raise SystemExit for unknown servers, and for rates that are not above 0."""
        if unknown := [name for name in self.servers if name not in SERVERS]:
            raise SystemExit(f"servers: must be of {', '.join(SERVERS)}, got {unknown[0]!r}")
        if min(self.rates) <= 0:
            raise SystemExit(f"rates: must be above 0, got {min(self.rates):g}")


def run(run: Run, options: Options) -> None:
    """Measure the servers in turns; save the results after each measurement."""
    shapes = run.saved().get("shapes", {})
    runs: Runs = shapes.get(options.shape, {}).get("runs", {}) if options.append else {}
    missing: dict[str, str] = {}
    work = WORKS[options.shape]
    cores = tuple(sorted(os.sched_getaffinity(0))[:NUM_CORES])
    job = Job(make_served(options.shape), work.dtype, free_address(), cores)
    settings = {
        "prompt_tokens": PROMPT_TOKENS,
        "output_tokens": OUTPUT_TOKENS,
        "num_cores": len(cores),
        "generator_has_own_cores": not set(cores) & set(generator_cores(cores)),
    }

    def save() -> None:
        shapes[options.shape] = {
            "dtype": work.dtype,
            "num_prompts": options.num_prompts,
            "medians": summarize(runs),
            "missing": {name: why for name, why in missing.items() if name not in runs},
            "runs": runs,
        }
        run.save({"settings": settings, "shapes": shapes})

    # Without a handler, child processes would outlive this process.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    measure(job, options, runs, missing, run.console, save)
    save()
    for rate, servers in summarize(runs).items():
        run.show(f"{rate} requests/s", servers)
