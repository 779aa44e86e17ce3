"""Reports a quick benchmark: a text of 80 columns for people, JSON for programs."""

from __future__ import annotations

import dataclasses
from typing import Any

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from baton.api.printable import printable
from loadtest.environment import environment
from loadtest.quick.measure import QuickResult, Speed
from loadtest.quick.verdict import Grade, Verdict, judge, share_of_memory

WIDTH = 80
# Version of the JSON's format, raised when fields change their meaning or are removed.
JSON_FORMAT = 1
_STYLES = {
    Grade.GOOD: "bold green",
    Grade.FAIR: "bold yellow",
    Grade.SLOW: "bold yellow",
    Grade.FAILED: "bold red",
}
_UNKNOWN = "-"


def print_quick(result: QuickResult, console: Console) -> None:
    """Print the measured system, its figures and the verdict."""
    for line in _head(result):
        console.print(Text(printable(line)))
    console.print(_table(result))
    verdict = judge(result)
    word = verdict.grade.value
    console.print(f"[{_STYLES[verdict.grade]}]verdict: {word}[/]")
    for mark, lines in (("-", verdict.findings), (">", verdict.advice)):
        for line in lines:
            text = Text(printable(line), style="yellow" if mark == ">" else "")
            console.print(_item(mark, text))


def _item(mark: str, text: Text) -> Padding:
    """Return a list item, wrapped, with its later lines indented."""
    grid = Table.grid(padding=(0, 1))
    grid.add_row(mark, text)
    return Padding(grid, (0, 0, 0, 1))


def _head(result: QuickResult) -> list[str]:
    machine = result.machine
    if machine is None:
        target = result.target.get("model") or "a running system"
        return [f"{target}, measured from here"]
    kernels = machine.instruction_set if not machine.no_kernels else "no native kernels"
    return [
        result.model,
        f"{machine.num_cores} cores ({kernels or 'no native kernels'}), "
        f"memory read at {machine.read_bytes_per_s / 1e9:.1f} GB/s; "
        f"ready after {result.start_s or 0:.1f} s",
    ]


def _table(result: QuickResult) -> Table:
    one, many = result.one, result.many
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0), show_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("one reader", justify="right", no_wrap=True)
    table.add_column(f"{many.num_readers} readers", justify="right", no_wrap=True)
    share = share_of_memory(result)
    rows = [
        ("output tokens/s, all readers", *(f"{s.output_tokens_per_s:.1f}" for s in (one, many))),
        ("time per token, ms", *(_ms(speed.token_s, 1) for speed in (one, many))),
        ("time to first token (TTFT), ms", *(_ms(speed.ttft_s, 0) for speed in (one, many))),
        ("prompt tokens/s", _rate(one), _UNKNOWN),
        ("hand-off after prefill, ms", *(_ms(speed.handoff_s, 2) for speed in (one, many))),
        ("share of memory's speed", _UNKNOWN if share is None else f"{share:.0%}", _UNKNOWN),
        ("requests", *(str(speed.num_requests) for speed in (one, many))),
    ]
    for row in rows:
        table.add_row(*row)
    return table


def _rate(speed: Speed) -> str:
    known = speed.prompt_tokens_per_s
    return _UNKNOWN if known is None else f"{known:.0f}"


def _ms(seconds: float | None, digits: int) -> str:
    return _UNKNOWN if seconds is None else f"{seconds * 1e3:.{digits}f}"


def quick_to_json(result: QuickResult) -> dict[str, Any]:
    """Convert a result and its verdict to JSON; durations in seconds, sizes in bytes."""
    verdict: Verdict = judge(result)
    return {
        "format": JSON_FORMAT,
        "kind": "bench quick",
        **dataclasses.asdict(result),
        "share_of_memory_speed": share_of_memory(result),
        "verdict": {
            "grade": verdict.grade.value,
            "findings": list(verdict.findings),
            "advice": list(verdict.advice),
        },
        "environment": dataclasses.asdict(environment()),
    }
