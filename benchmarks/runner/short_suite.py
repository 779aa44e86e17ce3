"""Runs the measurements that fit in ten minutes on two cores, and then writes the page.

A measurement that fails does not stop the others; the last line names the measurements that failed
or had no time. The most important measurements come first, and the last gets the time that is left.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.runner.environment import ROOT
from benchmarks.runner.own_process import end_group, own_environment

PEERS = ROOT / "build" / "engine_cpu" / "peers"
LEAST_S = 5.0  # with fewer seconds left, no measurement is started


@dataclass(frozen=True, slots=True)
class Part:
    """A measurement, with options that make it short."""

    name: str
    options: tuple[str, ...] = ()


PARTS = (
    Part("placement"),
    Part("scheduler"),
    Part("prefix_index"),
    Part("engine_overhead"),
    Part("handoff", ("--requests", "10")),
    Part(
        "router_cost",
        ("--rounds", "1", "--seconds", "2", "--num-requests", "6000", "--held", "8000"),
    ),
    Part("kernels", ("--repetitions", "8")),
    Part("engine_cpu", ("--rounds", "1", "--repetitions", "1")),
)


def options_of(part: Part) -> tuple[str, ...]:
    """Return a part's options; other engines take part only if they are already installed."""
    peers = sorted(ready.parent.name for ready in PEERS.glob("*/ready"))
    if part.name == "engine_cpu" and peers:
        return (*part.options, "--peers", ",".join(peers))
    return part.options


def run(part: Part, limit_s: float, folder: Path | None = None) -> str:
    """Run one part; return how it failed, or an empty string.

    Args:
        folder: folder of scripts that replace the measurements, for tests.
    """
    measurement = ("-m", "benchmarks", part.name, "--save")
    program = measurement if folder is None else (str(folder / f"{part.name}.py"),)
    child = subprocess.Popen(
        [sys.executable, *program, *options_of(part)],
        env=own_environment(),
        cwd=ROOT,
        # Use a new session, so that its child processes can be ended, too.
        start_new_session=True,
    )
    try:
        returned = child.wait(limit_s)
    except subprocess.TimeoutExpired:
        return "stopped, the time was up"
    finally:
        end_group(child)
    return f"exit code {returned}" if returned else ""


def run_all(
    parts: Sequence[Part], budget_s: float, console: Console, folder: Path | None = None
) -> list[str]:
    """Run the parts within ``budget_s`` seconds, and print their times; return all failures."""
    started = time.monotonic()
    table = Table("benchmark", "seconds", "ended")
    failed = []
    for part in parts:
        began = time.monotonic()
        left_s = budget_s - (began - started)
        if left_s < LEAST_S:
            ended = "not begun, the time was up"
        else:
            console.rule(" ".join((part.name, *options_of(part))))
            ended = run(part, left_s, folder)
        if ended:
            failed.append(part.name)
        table.add_row(part.name, f"{time.monotonic() - began:.0f}", ended or "well")
    console.print(table)
    console.print(f"{time.monotonic() - started:.0f} s in all")
    return failed


def main(words: Sequence[str]) -> int:
    """Run the suite; return the exit code, 1 if a part failed or had no time."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks --suite", description=__doc__)
    names = [part.name for part in PARTS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--budget-s", type=float, default=570.0, help="for all of them together")
    arguments = parser.parse_args(words)
    console = Console(highlight=False, width=100)
    parts = [part for part in PARTS if part.name in arguments.only]
    failed = run_all(parts, arguments.budget_s, console)
    page = [sys.executable, "-m", "benchmarks", "--page"]
    if subprocess.run(page, cwd=ROOT, check=False).returncode:
        failed.append("docs/performance.md")
    if failed:
        console.print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0
