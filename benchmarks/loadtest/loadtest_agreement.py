"""Compare `baton loadtest`, AIPerf and guidellm under one load of the same server.

A router and simulated nodes run on one core; on another core the generators run in turns. Prompts
are new texts with a fixed number of words, each of which is one token. Medians of the runs are
compared: TTFT, time per token after the first, E2E, requests and output tokens per second.

    make loadtest-agreement           (or python -m benchmarks loadtest_agreement --save)
"""

from __future__ import annotations

import contextlib
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

from benchmarks.loadtest.loadtest_fleet import NAME, fleet, fresh_texts, write_model
from benchmarks.runner.own_process import own_environment
from benchmarks.runner.run import Document, Run
from tests.clients.environments import installed_version, interpreter

NUM_NODES = 4  # number of nodes per role, so many that no request waits for another
TIME_SCALE = 4.0
PROMPT_TOKENS, OUTPUT_TOKENS = 512, 32
WITHIN = 0.05
RUN_TIMEOUT_S = 120.0

Numbers = dict[str, float]


@dataclass(frozen=True, slots=True)
class Load:
    """A load: an open loop with a constant rate, or a closed loop."""

    num_requests: int
    rate: float | None = None
    concurrency: int | None = None

    def options(self, rate: str, arrivals: str) -> list[str]:
        """Return the load's options for a program, given its options for rate and arrivals."""
        if self.rate is None:
            return ["--concurrency", str(self.concurrency)]
        return [rate, f"{self.rate:g}", arrivals, "constant"]


LOADS = {"4 requests/s": Load(32, rate=4.0), "4 at a time": Load(32, concurrency=4)}


@dataclass(frozen=True, slots=True)
class Job:
    """One run of one load generator.

    Attributes:
        url: URL of the HTTP API, without /v1.
        model: folder with the tokenizer.
        folder: new folder for the run, which contains the file ``prompts``.
    """

    load: Load
    url: str
    model: Path
    folder: Path

    @property
    def prompts(self) -> Path:
        return self.folder / "prompts.jsonl"


# ---------------------------------------------------------------- the generators


def baton_command(job: Job) -> list[str]:
    return [
        *(sys.executable, "-m", "baton", "loadtest", "run", "--target", f"{job.url}/v1"),
        *job.load.options("--rate", "--arrivals"),
        *("--num-requests", str(job.load.num_requests), "--dataset", str(job.prompts)),
        *("--json", str(job.folder / "result.json")),
    ]


def baton_numbers(folder: Path) -> Numbers:
    """Read Baton's figures; TPOT is named ITL, as the other programs name it."""
    summary = read(folder / "result.json")["summary"]
    found = {
        f"{name}_{ours}_ms": summary["latencies"][f"{key}_s"][ours] * 1e3
        for name, key in (("ttft", "ttft"), ("itl", "tpot"), ("e2e", "e2e"))
        for ours in ("mean", "p50")
    }
    return found | {
        "requests_per_s": summary["requests_per_s"],
        "output_tokens_per_s": summary["output_tokens_per_s"],
        "num_ok": summary["num_ok"],
    }


def aiperf_command(job: Job) -> list[str]:
    return [
        *(str(interpreter("aiperf").with_name("aiperf")), "profile"),
        *("--model", NAME, "--url", job.url, "--endpoint-type", "completions", "--streaming"),
        *("--tokenizer", str(job.model), "--use-server-token-count", "--use-legacy-max-tokens"),
        *("--input-file", str(job.prompts), "--custom-dataset-type", "single_turn"),
        *job.load.options("--request-rate", "--arrival-pattern"),
        *("--request-count", str(job.load.num_requests)),
        *("--artifact-dir", str(job.folder), "--ui", "none"),
        *("--no-gpu-telemetry", "--no-server-metrics"),
    ]


def aiperf_numbers(folder: Path) -> Numbers:
    document = read(folder / "profile_export_aiperf.json")
    keys = {"ttft": "time_to_first_token", "itl": "inter_token_latency", "e2e": "request_latency"}
    found = {
        f"{name}_{ours}_ms": document[key][theirs]
        for name, key in keys.items()
        for ours, theirs in (("mean", "avg"), ("p50", "p50"))
    }
    return found | {
        "requests_per_s": document["request_throughput"]["avg"],
        "output_tokens_per_s": document["output_token_throughput"]["avg"],
        "num_ok": document["request_count"]["avg"],
    }


def guidellm_command(job: Job) -> list[str]:
    load = job.load
    profile = (
        f"kind=constant,rate={load.rate:g}"
        if load.rate is not None
        else f"kind=concurrent,streams={load.concurrency}"
    )
    return [
        *(str(interpreter("guidellm").with_name("guidellm")), "run", "--disable-console"),
        *("--backend", f"kind=openai_http,target={job.url},request_format=/v1/completions"),
        *("--profile", profile),
        *("--constraint", f"kind=max_requests,count={load.num_requests}"),
        *("--tokenizer", f"kind=hf_auto,model={job.model}"),
        *("--data", f"kind=json_file,path={job.prompts}"),
        *("--output", f"kind=json,path={job.folder / 'result.json'}"),
    ]


def guidellm_numbers(folder: Path) -> Numbers:
    [benchmark] = read(folder / "result.json")["benchmarks"]
    metrics = {
        name: value["successful"]
        for name, value in benchmark["metrics"].items()
        if isinstance(value, dict) and "successful" in value
    }
    keys = {
        "ttft": ("time_to_first_token_ms", 1.0),
        "itl": ("inter_token_latency_ms", 1.0),
        "e2e": ("request_latency", 1e3),
    }
    found = {
        f"{name}_{ours}_ms": metrics[key][theirs] * scale
        for name, (key, scale) in keys.items()
        for ours, theirs in (("mean", "mean"), ("p50", "median"))
    }
    return found | {
        "requests_per_s": metrics["requests_per_second"]["mean"],
        "output_tokens_per_s": metrics["output_tokens_per_second"]["mean"],
        "num_ok": metrics["request_latency"]["count"],
    }


def others_environment() -> dict[str, str]:
    """Return environment variables without this repository's folders on Python's path.

    Otherwise other programs would import these folders in place of their own packages of the
    same names.
    """
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    # By default guidellm starts ten processes, which import torch: half a minute on one core.
    return {**kept, "GUIDELLM__MAX_WORKER_PROCESSES": "2"}


@dataclass(frozen=True, slots=True)
class Generator:
    """A program that plays a load.

    Attributes:
        entry: makes the line of the program's data set for a prompt.
        own_words: number of words that the program itself adds before each prompt.
        environment: returns the environment variables of the program's process.
    """

    entry: Callable[[str, int], dict[str, object]]
    command: Callable[[Job], list[str]]
    numbers: Callable[[Path], Numbers]
    own_words: int = 0
    environment: Callable[[], dict[str, str]] = others_environment


def plain(text: str, num_outputs: int) -> dict[str, object]:
    return {"prompt": text, "output_tokens_count": num_outputs}


def single_turn(text: str, num_outputs: int) -> dict[str, object]:
    return {"text": text, "output_length": num_outputs}


GENERATORS = {
    "baton": Generator(plain, baton_command, baton_numbers, 1, own_environment),
    "aiperf": Generator(single_turn, aiperf_command, aiperf_numbers),
    "guidellm": Generator(plain, guidellm_command, guidellm_numbers),
}


# ---------------------------------------------------------------- the runs


def play_fresh(
    generator: Generator, load: Load, url: str, model: Path, words: list[str]
) -> Numbers:
    """Run a generator once with new prompts; return its figures."""
    with tempfile.TemporaryDirectory() as folder:
        job = Job(load, url, model, Path(folder))
        num_words = PROMPT_TOKENS - generator.own_words
        with job.prompts.open("w", encoding="utf-8") as file:
            for text in fresh_texts(words, load.num_requests, num_words):
                file.write(json.dumps(generator.entry(text, OUTPUT_TOKENS)) + "\n")
        said = play(generator, job)
        try:
            numbers = generator.numbers(job.folder)
        except (OSError, LookupError, ValueError) as error:
            raise SystemExit(f"{error!r}\n{said}") from error
    if numbers.pop("num_ok") != load.num_requests:
        raise SystemExit(f"not all requests ended well:\n{said}")
    return numbers


def play(generator: Generator, job: Job) -> str:
    """Run the generator on its core; return the end of its output."""
    core = max(os.sched_getaffinity(0))
    log = job.folder / "log.txt"
    with (
        log.open("wb") as output,
        subprocess.Popen(
            generator.command(job),
            cwd=job.folder,
            env=generator.environment(),
            preexec_fn=lambda: os.sched_setaffinity(0, {core}),
            # Use a new session, so that its child processes can be ended, too.
            start_new_session=True,
            stdout=output,
            stderr=subprocess.STDOUT,
        ) as process,
    ):
        try:
            process.wait(RUN_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            print(f"no end within {RUN_TIMEOUT_S:g} s: {generator.command(job)}")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return log.read_text(encoding="utf-8", errors="replace")[-3000:]


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def measure(load: Load, rounds: int, console: Console) -> dict[str, list[Numbers]]:
    """Run each generator ``rounds`` times, in turns; return each round's figures."""
    names = list(GENERATORS)
    runs: dict[str, list[Numbers]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        words = write_model(model)
        with fleet(model, min(os.sched_getaffinity(0)), NUM_NODES, TIME_SCALE) as url:
            # A first run, in which Python reads all modules
            play_fresh(GENERATORS["baton"], load, url, model, words)
            for number in range(rounds):
                for name in names[number % 3 :] + names[: number % 3]:
                    runs[name].append(play_fresh(GENERATORS[name], load, url, model, words))
                    found = {key: round(value, 2) for key, value in runs[name][-1].items()}
                    console.print(name, json.dumps(found), soft_wrap=True)
    return runs


def compared(runs: Mapping[str, Sequence[Numbers]]) -> dict[str, dict[str, float]]:
    """Return each figure's medians by generator, and the largest median / the smallest."""
    found = {}
    for key in runs["baton"][0]:
        medians = {name: statistics.median(one[key] for one in own) for name, own in runs.items()}
        in_order = sorted(medians.values())
        found[key] = {
            **{name: round(median, 3) for name, median in medians.items()},
            "apart": round(in_order[-1] / in_order[0] - 1, 4),
        }
    return found


def run(
    run: Run,
    load: Sequence[Literal["4 requests/s", "4 at a time"]] = ("4 requests/s", "4 at a time"),
    rounds: int = 5,
) -> Document:
    """Play the loads with the load generators in turns, and compare their figures.

    Args:
        load: loads to measure; results of other loads are kept.
    """
    clients = {name: interpreter(name) for name in GENERATORS if name != "baton"}
    settings = {
        "nodes": f"{NUM_NODES} + {NUM_NODES} simulated (h100-8b, times {TIME_SCALE:g})",
        "prompt_tokens": PROMPT_TOKENS,
        "output_tokens": OUTPUT_TOKENS,
        "rounds": rounds,
        **{name: installed_version(python, name) for name, python in clients.items()},
    }
    loads = run.saved().get("loads", {}) if len(load) < len(LOADS) else {}
    for name in load:
        load_average = os.getloadavg()[0]
        runs = measure(LOADS[name], rounds, run.console)
        medians = compared(runs)
        loads[name] = {"load_average": round(load_average, 2), "medians": medians, "runs": runs}
        run.show(name, medians)
        run.problems += [
            f"{name}: {key} is {row['apart']:.1%} apart"
            for key, row in medians.items()
            if row["apart"] > WITHIN
        ]
    return {"settings": settings, "loads": loads}
