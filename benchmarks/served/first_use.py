"""Measure a fresh system: its start, and the first request of a kind beside the tenth.

For each kind of request, `baton up` is started several times, split (one prefill and one decode
node) and colocated. The first request is sent when `baton up` says "ready"; the other requests
follow one by one. All prompts of a kind have the same number of random words, so no prefix cache
has a prompt; every schema, tool and grammar is new. A reported ratio is the median of the ratios of
all starts.

    python -m benchmarks first_use --save                     (both shapes, fifteen minutes)
    python -m benchmarks first_use --shapes split --kinds chat,regex --starts 1
"""

from __future__ import annotations

import contextlib
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import psutil

from baton.checkpoint.packaged_model import SMOLLM2
from baton.processes.free_address import free_address
from benchmarks.runner.own_process import own_environment
from benchmarks.runner.run import Document, Run
from examples.demo import TOY, fetch_model

NAME = "first-use"
SHAPES = {"split": (), "colocated": ("--prefill", "0")}
NUM_WORDS = 200
FEW_WORDS, MANY_WORDS = 8, 1500
OUTPUT_TOKENS = 8
NUM_REQUESTS = 12
LATER = slice(7, 12)  # the time of "the tenth" is the median of the 8th to the 12th request
MOST_RATIO = 1.3
READY_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 20.0
# Each word is one token in most vocabularies, so that prompts have equally many tokens.
WORDS = (
    *("apple", "river", "stone", "light", "paper", "green", "music", "table", "water", "house"),
    *("garden", "summer", "winter", "morning", "evening", "market", "bridge", "letter", "window"),
)
HEADERS = {"Content-Type": "application/json", "anthropic-version": "2023-06-01"}

Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Request:
    """One request over HTTP.

    Attributes:
        body: the JSON body, which asks for a stream if the path supports streams.
    """

    path: str
    body: Body


@dataclass(frozen=True, slots=True)
class Timing:
    """The times of one request, in seconds.

    Attributes:
        first_s, whole_s: seconds until the first byte of the response's body, and until the last
            byte.
        cpu_s: CPU seconds of the whole system during the request; other programs hardly change this
            figure.
    """

    first_s: float
    whole_s: float
    cpu_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Process:
    """A process of a fresh system, measured after the first answer.

    Attributes:
        cpu_s: CPU seconds since the process's start.
        rss_mib, pss_mib, private_mib: all memory of the process; the same with shared pages divided
            among the processes that share them; the memory that only this process has written.
    """

    name: str
    cpu_s: float
    rss_mib: float
    pss_mib: float
    private_mib: float


@dataclass(frozen=True, slots=True)
class Start:
    """The measurements of one fresh system.

    Attributes:
        ready_s: seconds from the start of `baton up` until it says "ready".
        cpu_s: CPU seconds of all processes until the end of the first answer.
    """

    ready_s: float
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

    @property
    def cpu_ratio(self) -> float:
        later_s = statistics.median(timing.cpu_s for timing in self.timings[LATER])
        return self.timings[0].cpu_s / later_s


# ---------------------------------------------------------------- kinds of requests


def words(chance: random.Random, num_words: int = NUM_WORDS) -> str:
    return " ".join(chance.choices(WORDS, k=num_words))


def chat(chance: random.Random, num_words: int = NUM_WORDS, **more: Any) -> Request:
    """Return a chat with a new system message, which chat templates put first in the prompt."""
    messages = [
        {"role": "system", "content": words(chance, 8)},
        {"role": "user", "content": words(chance, num_words)},
    ]
    body = {"messages": messages, "max_tokens": OUTPUT_TOKENS, "stream": True, **more}
    return Request("/v1/chat/completions", body)


def text_request(chance: random.Random, path: str, field: str, **more: Any) -> Request:
    """Return a streamed request to an API other than chat, with a new text in ``field``."""
    return Request(path, {field: words(chance), "stream": True, **more})


def json_schema(chance: random.Random) -> Request:
    first, second = chance.sample(WORDS, 2)
    schema = {
        "type": "object",
        "properties": {first: {"type": "integer"}, second: {"type": "string"}},
        "required": [first, second],
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    return chat(chance, response_format=wanted)


def regex(chance: random.Random) -> Request:
    return chat(chance, guided_regex=f"({'|'.join(chance.sample(WORDS, 3))})( [a-z]{{2,9}}){{20}}")


def lark(chance: random.Random) -> Request:
    first, second = chance.sample(WORDS, 2)
    return chat(chance, guided_grammar=f'start: ("{first}" | "{second}" /[a-z]{{1,9}}/ " "){{20}}')


def tools(chance: random.Random, choice: str) -> Request:
    properties = {chance.choice(WORDS): {"type": "string"}, "count": {"type": "integer"}}
    name = f"find_{chance.choice(WORDS)}"
    function = {
        "name": name,
        "description": "Find things by name.",
        "parameters": {"type": "object", "properties": properties, "required": list(properties)},
    }
    tool = {"type": "function", "function": function}
    named = {"type": "function", "function": {"name": name}}
    return chat(chance, tools=[tool], tool_choice=named if choice == "named" else choice)


def custom_tool(chance: random.Random) -> Request:
    first, second = chance.sample(WORDS, 2)
    definition = f'start: "{first}" | "{second}" /[a-z]{{1,9}}/ " " start'
    tool = {
        "type": "custom",
        "name": f"write_{first}",
        "description": "Write words.",
        "format": {"type": "grammar", "syntax": "lark", "definition": definition},
    }
    return text_request(chance, *RESPONSES, **FEW, tools=[tool], tool_choice="required")


def messages(chance: random.Random) -> Request:
    said = [{"role": "user", "content": words(chance)}]
    return Request("/v1/messages", {"messages": said, "max_tokens": OUTPUT_TOKENS, "stream": True})


RESPONSES = ("/v1/responses", "input")
FEW: Body = {"max_output_tokens": 16}
FILTERS: Body = {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.01}
PENALTIES: Body = {"frequency_penalty": 0.2, "repetition_penalty": 1.1}
KINDS: dict[str, Callable[[random.Random], Request]] = {
    "chat": partial(chat, stream=False),
    "streaming": chat,
    "completion": partial(
        text_request, path="/v1/completions", field="prompt", max_tokens=OUTPUT_TOKENS
    ),
    "short_prompt": partial(chat, num_words=FEW_WORDS),
    "long_prompt": partial(chat, num_words=MANY_WORDS),
    "sampled": partial(chat, **FILTERS, **PENALTIES),
    "two_answers": partial(chat, n=2, temperature=0.8),
    "json_schema": json_schema,
    "json_object": partial(chat, response_format={"type": "json_object"}),
    "regex": regex,
    "lark": lark,
    **{
        f"tools_{choice}": partial(tools, choice=choice) for choice in ("auto", "required", "named")
    },
    "logprobs": partial(chat, logprobs=True, top_logprobs=5),
    "responses": lambda chance: text_request(chance, *RESPONSES, **FEW),
    "custom_tool": custom_tool,
    "messages": messages,
    "tokenize": lambda chance: Request("/tokenize", {"prompt": words(chance)}),
}


# ---------------------------------------------------------------- one fresh system


@contextmanager
def fresh_system(model: str, shape: str, log: Path) -> Iterator[tuple[int, str, float]]:
    """Start `baton up`; once it is ready, yield its process id, HTTP address and seconds.

    Raises RuntimeError with the log's end if `baton up` ends, or is not ready in time.
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
            env=own_environment(),
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


def ask(address: str, request: Request, pids: Sequence[int]) -> Timing:
    """Send a request on a new connection; raise RuntimeError unless the answer is a success.

    Args:
        pids: processes whose CPU time is counted.
    """
    connection = http.client.HTTPConnection(address, timeout=60)
    body = json.dumps({"model": NAME, **request.body})
    cpu_before_s = _cpu_seconds(pids)
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
    return Timing(first_s, whole_s, _cpu_seconds(pids) - cpu_before_s)


def measure(model: str, shape: str, kind: str, log: Path) -> Start:
    """Start a fresh system, and send it requests of one kind, one after another; measure both."""
    chance = random.Random(f"{kind} {time.time()}")
    requests = [KINDS[kind](chance) for _ in range(NUM_REQUESTS)]
    with fresh_system(model, shape, log) as (pid, address, ready_s):
        pids = list(family(pid))
        first = ask(address, requests[0], pids)
        processes = list(read_processes(family(pid)))
        timings = [first, *(ask(address, request, pids) for request in requests[1:])]
    cpu_s = sum(process.cpu_s for process in processes)
    return Start(ready_s, cpu_s, timings, processes)


# ---------------------------------------------------------------- its processes


def read_processes(names: Mapping[int, str]) -> Iterator[Process]:
    """Yield the CPU time and memory of each process that still runs."""
    for pid, name in names.items():
        with contextlib.suppress(psutil.Error):
            times = psutil.Process(pid).cpu_times()
            memory = psutil.Process(pid).memory_full_info()
            private = sum(one.private_dirty for one in psutil.Process(pid).memory_maps())
            sizes = (memory.rss, memory.pss, private)
            mib = [round(size / 2**20, 1) for size in sizes]
            yield Process(name, times.user + times.system, *mib)


def family(root: int) -> dict[int, str]:
    """Return the ids and names of a process and all its descendants."""
    names: dict[int, str] = {}
    process = psutil.Process(root)
    for one in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.Error):  # the process has ended meanwhile
            names[one.pid] = _name(one, names.get(one.ppid(), ""))
    return names


def _name(process: psutil.Process, parent: str) -> str:
    """Return the name of a process's program; other processes are named after their parent."""
    if parent.endswith(" template"):
        return f"{parent.removesuffix(' template')} worker"
    command = process.cmdline()
    name = command[command.index("baton") + 1] if "baton" in command else parent
    return f"{parent} template" if name == parent else name


def _cpu_seconds(pids: Iterable[int]) -> float:
    """Return the CPU seconds of the processes' living threads."""
    nanoseconds = 0
    for pid in pids:
        for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):  # the process has ended meanwhile
                nanoseconds += int(path.read_text().split()[0])
    return nanoseconds / 1e9


# ---------------------------------------------------------------- what is shown


def middle(starts: Sequence[Start], value: Callable[[Start], float]) -> float:
    return statistics.median(map(value, starts))


def as_json(starts: Sequence[Start]) -> dict[str, object]:
    return {
        "ready_s": round(middle(starts, lambda start: start.ready_s), 2),
        "cpu_s": round(middle(starts, lambda start: start.cpu_s), 2),
        "first_s": round(middle(starts, lambda start: start.timings[0].first_s), 4),
        "tenth_s": round(middle(starts, lambda start: start.later_s), 4),
        "ratio": round(middle(starts, lambda start: start.ratio), 2),
        "ratios": [round(start.ratio, 2) for start in starts],
        "whole_ratio": round(middle(starts, lambda start: start.whole_ratio), 2),
        "cpu_ratio": round(middle(starts, lambda start: start.cpu_ratio), 2),
        "starts": [_start_as_json(start) for start in starts],
        "processes": [asdict(process) for process in starts[0].processes],
    }


def _start_as_json(start: Start) -> dict[str, object]:
    return {
        "ready_s": round(start.ready_s, 2),
        "cpu_s": round(start.cpu_s, 2),
        "first_whole_and_cpu_s": [
            [round(seconds, 4) for seconds in (one.first_s, one.whole_s, one.cpu_s)]
            for one in start.timings
        ],
    }


def read_starts(kind: Mapping[str, Any]) -> list[Start]:
    """Read starts from the JSON of `as_json`; only the first start's processes were measured."""
    return [
        Start(
            start["ready_s"],
            start["cpu_s"],
            [Timing(*three) for three in start["first_whole_and_cpu_s"]],
            [] if index else [Process(**process) for process in kind["processes"]],
        )
        for index, start in enumerate(kind["starts"])
    ]


def joined(
    before: Mapping[str, Mapping[str, list[Start]]], after: Mapping[str, Mapping[str, list[Start]]]
) -> dict[str, dict[str, list[Start]]]:
    """Join the starts of two documents of results, by shape and kind."""
    return {
        shape: {
            kind: [*before.get(shape, {}).get(kind, []), *after.get(shape, {}).get(kind, [])]
            for kind in {**before.get(shape, {}), **after.get(shape, {})}
        }
        for shape in {**before, **after}
    }


def run(
    run: Run,
    shapes: Sequence[Literal["split", "colocated"]] = ("split", "colocated"),
    kinds: Sequence[str] = tuple(KINDS),
    starts: int = 3,
    toy: bool = False,
    add: bool = False,
) -> Document:
    """Measure fresh systems, with shapes and kinds in turns.

    Args:
        kinds: kinds of requests to measure.
        starts: number of fresh systems per kind.
        toy: whether to use the model in examples/demo_model.
        add: whether to keep the starts that the file of results has already.
    """
    if unknown := set(kinds) - set(KINDS):
        raise SystemExit(f"kinds: must be of {', '.join(KINDS)}, got {', '.join(unknown)}")
    console = run.console
    model = str(TOY) if toy else fetch_model(console, SMOLLM2)
    if model is None:
        raise SystemExit("the model cannot be had")
    # Without a handler, child processes would outlive this process.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    found: dict[str, dict[str, list[Start]]] = {
        shape: {kind: [] for kind in kinds} for shape in shapes
    }
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
        for _ in range(starts):
            for kind in kinds:
                for shape, of_shape in found.items():
                    start = measure(model, shape, kind, Path(folder) / "up.log")
                    of_shape[kind].append(start)
                    times = " ".join(f"{1e3 * one.first_s:.0f}" for one in start.timings)
                    console.print(f"{shape} {kind}: ready after {start.ready_s:.1f} s; ms {times}")
    if add:
        before = {
            shape: {name: read_starts(kind) for name, kind in kinds.items()}
            for shape, kinds in run.saved().get("shapes", {}).items()
        }
        found = joined(before, found)
    rows = {
        shape: {kind: as_json(some) for kind, some in of_shape.items()}
        for shape, of_shape in found.items()
    }
    for shape, of_kinds in rows.items():
        run.show(f"{shape}, until the first byte", of_kinds)
        run.show(f"{shape}, processes", next(iter(of_kinds.values()))["processes"])
    settings = {"model": Path(model).stem, "prompt_words": NUM_WORDS, "most": MOST_RATIO}
    return {"settings": settings, "shapes": rows}
