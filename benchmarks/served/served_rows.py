"""Serve a file with Baton and other servers under many loads; compare with the best server.

    python -m benchmarks served_rows --quick            (some 10 minutes)
    python -m benchmarks served_rows --save             (hours: three rounds of all loads)
    python -m benchmarks served_rows --rows 1@512,chat --servers "baton split,llamacpp" --rounds 1
    python -m benchmarks served_rows --check-with guidellm

A row is a load. ``16@512``: 16 users with prompts of 512 tokens, each with one open request at a
time. ``4/s@512``: 4 requests/s as Poisson arrivals. ``chat``: one user with chats of 8 turns, which
send the history again at each turn. Outputs have 64 tokens.

Every measurement starts its server anew. In each row of each round, all servers take turns on the
same cores, and get the same prompts; the medians of the rounds count. Baton and llama.cpp read one
GGUF file; llama.cpp gets as many slots as the row has users. vLLM reads the file's weights
dequantized to bfloat16. OpenVINO's server is missing, because no package that pip installs contains
it. The client runs on other cores if there are any. The exit code is 1 if a goal is missed.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from rich.console import Console
from rich.table import Table

from benchmarks.runner.run import Run
from benchmarks.served.served import generator_cores
from benchmarks.served.served_bench import Bench, find_model
from benchmarks.served.served_check import check
from benchmarks.served.served_client import Load, Numbers
from benchmarks.served.served_servers import KV_GIB, SERVERS
from benchmarks.served.served_verdicts import CHAT_TURN, TURN_KEY, Verdict, judge, median_of, ratios

PROMPT_TOKENS, OUTPUT_TOKENS = (128, 512, 2048, 8000), 64
CHAT = Load(prompt_tokens=64, output_tokens=32, num_streams=1, turns=8)
LOADS = {
    **{
        f"{users}@{size}": Load(prompt_tokens=size, output_tokens=OUTPUT_TOKENS, num_streams=users)
        for users in (1, 4, 16, 64)
        for size in PROMPT_TOKENS
    },
    **{
        f"{rate}/s@{size}": Load(prompt_tokens=size, output_tokens=OUTPUT_TOKENS, rate=rate)
        for rate in (1, 4)
        for size in PROMPT_TOKENS
    },
    "chat": CHAT,
}
ALONE = [name for name in LOADS if name.startswith("1@")]
USUAL = ["1@128", "1@512", "1@2048", "1@8000", "4@512", "4@2048", "16@512", "64@512"]
USUAL += ["1/s@512", "4/s@512", "chat"]
QUICK = ["1@128", "1@2048", "4@512", "16@512", "1/s@512", "chat"]
QUICK_SERVERS = ["baton colocated", "baton split", "llamacpp"]
SHOWN = {
    "ttft_p50_ms": "TTFT p50",
    "ttft_p99_ms": "p99",
    "itl_p50_ms": "ITL p50",
    "itl_p99_ms": "p99",
    TURN_KEY: f"turn {CHAT_TURN}",
    "tokens_per_s": "tokens/s",
}
START_SHOWN = {
    "start_s": "start s",
    "start_cpu_s": "CPU s",
    "start_mib": "MiB",
    "load_mib": "after load",
    "first_ms": "first ms",
    "first_over_tenth": "first/tenth",
}
MISSING = {"openvino": "its server is in no package that pip installs"}


@dataclass(slots=True)
class Found:
    """The measurements of one file so far.

    Attributes:
        runs: figures of each round, by row, then by server.
        starts: figures of each start, by server.
        missing: by server, why the server was left out.
        errors: the first error of each server in each row.
    """

    runs: dict[str, dict[str, list[Numbers]]] = field(default_factory=dict)
    starts: dict[str, list[Numbers]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=lambda: dict(MISSING))
    errors: dict[str, str] = field(default_factory=dict)

    def medians(self) -> dict[str, dict[str, Numbers]]:
        """Return the figures' medians over the rounds, by row and server."""
        return {
            row: {name: median_of(runs) for name, runs in servers.items()}
            for row, servers in self.runs.items()
        }

    def start_medians(self) -> dict[str, Numbers]:
        """Return the figures' medians over the starts, by server."""
        return {name: median_of(starts) for name, starts in self.starts.items()}

    def verdicts(self) -> list[Verdict]:
        """Judge the measurements so far."""
        return judge(self.medians(), self.start_medians(), ALONE)


def measure(bench: Bench, options: Options, found: Found, console: Console) -> None:
    """Measure all rounds, and add them to ``found``."""
    lacking = {row: bench.model.lacks(LOADS[row]) for row in options.rows}
    rows = [row for row in options.rows if not lacking[row]]
    for row, why in lacking.items():
        if why:
            console.print(f"{row} is left out: {why}")
    turns = [(number, row) for number in range(options.rounds) for row in rows]
    for count, (number, row) in enumerate(turns):
        at = count % len(options.servers)
        for name in (*options.servers[at:], *options.servers[:at]):
            if name not in found.missing:
                said = measure_turn(bench, options.seconds, found, name, row, number)
                console.print(f"{number + 1}. {row}, {name}: {said}", soft_wrap=True)


def measure_turn(
    bench: Bench, seconds: float, found: Found, name: str, row: str, number: int
) -> str:
    """Measure one server under one load; store the result, and return a line about it.

    A server that fails before it has any result is left out from then on.
    """
    seed = 2 * (1 + number * len(LOADS) + list(LOADS).index(row))
    try:
        numbers, start, error = bench.measure_once(name, LOADS[row], seed, seconds, CHAT_TURN)
    except (OSError, RuntimeError, subprocess.SubprocessError) as failed:
        said = str(failed)[-400:]
        if name in found.starts:
            nothing: Numbers = {"num_requests": 0, "num_errors": 1}
            found.runs.setdefault(row, {}).setdefault(name, []).append(nothing)
            found.errors.setdefault(f"{row}, {name}", said)
        else:
            found.missing[name] = said
        return said
    found.runs.setdefault(row, {}).setdefault(name, []).append(numbers)
    found.starts.setdefault(name, []).append(start)
    if error:
        found.errors.setdefault(f"{row}, {name}", error)
    told = [f"{label} {form(numbers[key])}" for key, label in SHOWN.items() if key in numbers]
    return " ".join([*told, error])


# ---------------------------------------------------------------- what is told


def show(console: Console, name: str, found: Found) -> None:
    """Print the tables and verdicts of one file."""
    table = Table("row", "server", *SHOWN.values(), "errors", title=f"{name}, ms", box=None)
    for row, servers in found.medians().items():
        for server, numbers in servers.items():
            cells = [form(numbers.get(key)) for key in SHOWN]
            table.add_row(row, server, *cells, f"{numbers['num_errors']:.0f}")
    console.print(table)
    title = "times as good as the best peer (1 or more: as good)"
    table = Table("row", "server", *SHOWN.values(), title=title, box=None)
    for row, shapes in ratios(found.medians()).items():
        for shape, gains in shapes.items():
            cells = [f"{gains[key]:.2f}" if key in gains else "-" for key in SHOWN]
            table.add_row(row, shape, *cells)
    console.print(table)
    table = Table("server", *START_SHOWN.values(), title="starts", box=None)
    for server, numbers in found.start_medians().items():
        table.add_row(server, *(form(numbers.get(key)) for key in START_SHOWN))
    console.print(table)
    for where, error in found.errors.items():
        console.print(f"first error of {where}: {error}")
    for server, why in found.missing.items():
        console.print(f"not measured: {server}: {why}")
    for verdict in found.verdicts():
        console.print(f"{verdict.word}: {verdict.goal}: {verdict.text}")


def form(value: float | None) -> str:
    """Format a number with three digits, or with all digits of a longer integer part."""
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def document_of(found: Found) -> Mapping[str, object]:
    """Return one file's results for the JSON document."""
    return {
        "medians": found.medians(),
        "ratios": ratios(found.medians()),
        "starts": found.start_medians(),
        "verdicts": [
            {"goal": one.goal, "measured": one.text, "holds": one.holds} for one in found.verdicts()
        ],
        "missing": found.missing,
        "errors": found.errors,
        "runs": found.runs,
    }


def some_of(known: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the names if all are among ``known``; raise SystemExit for an unknown name."""
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"must be of {', '.join(known)}, got {unknown[0]!r}")
    return list(names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Which files, servers and loads to measure.

    Attributes:
        files: smollm2, 125M, 0.6B, or paths of GGUF files.
        rows: the loads to play, by row; all: every row.
        seconds: for how long requests arrive in each measurement.
        cores: number of cores of a server.
        quick: whether to measure only one round of a few short rows.
        check_with: another client with which this client is compared, in place of measuring
            servers.
    """

    files: Sequence[str] = ("smollm2",)
    rows: Sequence[str] = ()
    servers: Sequence[str] = ()
    rounds: int = 0
    seconds: float = 0.0
    cores: int = 2
    quick: bool = False
    check_with: Literal["", "guidellm"] = ""

    def complete(self) -> Options:
        """Fill missing options with defaults; a quick run has other defaults than a usual run."""
        usual = (QUICK, QUICK_SERVERS, 1, 8.0) if self.quick else (USUAL, list(SERVERS), 3, 30.0)
        rows, servers, rounds, seconds = usual
        given = list(LOADS) if list(self.rows) == ["all"] else self.rows
        return replace(
            self,
            rows=some_of(list(LOADS), given or rows),
            servers=some_of(list(SERVERS), self.servers or servers),
            rounds=self.rounds or rounds,
            seconds=self.seconds or seconds,
        )


def run(run: Run, options: Options) -> None:
    """Measure every file; save after each."""
    options, console = options.complete(), run.console
    every = sorted(os.sched_getaffinity(0))
    cores = every[: options.cores]
    client_cores = generator_cores(cores)
    settings = {
        "num_cores": len(cores),
        "client_has_own_cores": not set(cores) & set(client_cores),
        "output_tokens": OUTPUT_TOKENS,
        "seconds": options.seconds,
        "rounds": options.rounds,
        "kv_cache_gib": KV_GIB,
    }
    # SIGTERM acts like Ctrl-C: servers stop, and then the results are printed and saved.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    files: dict[str, Mapping[str, object]] = {}
    for word in options.files:
        bench = Bench(find_model(console, word), cores, client_cores)
        if options.check_with:
            if not check(bench, console):
                run.problems.append(f"{word}: the clients do not agree")
            continue
        found = Found()
        try:
            measure(bench, options, found, console)
        except KeyboardInterrupt:
            console.print("interrupted: what was measured is kept")
        show(console, bench.model.name, found)
        files[bench.model.name] = document_of(found)
        run.problems += [f"{word}: {one.goal}" for one in found.verdicts() if one.holds is False]
        run.save({"settings": settings, "files": files})
