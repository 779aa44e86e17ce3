"""Every option of `baton loadtest` that takes numbers refuses odd ones with one clear line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from baton.cli.programs.loadtest import app
from loadtest import execute, execute_comparison
from loadtest.tuning import execute_tuning

HUGE = "9" * 5000
NEVER = ["nan", "inf", "-inf", "-1", "1e300", HUGE, "", "x", "0x10"]
# Options whose values are texts with numbers in them, and texts that no option takes.
TEXTS = {
    "input-tokens": ["0", "uniform:5-1", "lognormal:nan,1", "lognormal:5,inf", f"fixed:{HUGE}"],
    "output-tokens": ["-1", "nan", "uniform:1-", "gamma:1"],
    "images": ["0", "65", "nan", HUGE, "lognormal:2,1", "uniform:2-1"],
    "image-size": ["0x1", "8", HUGE, "8x8x8"],
    "turns": ["0", "nan", "lognormal:1e300,1"],
    "slo": ["ttft=0", "ttft=nan", "ttft=inf", "ttft=-1", "ttft=1,ttft=1", f"ttft={HUGE}", "x=1"],
    "sweep": ["rate=", "rate=0", "rate=nan,1", "rate=1e300", "concurrency=0.5", "concurrency=1e8"],
    "fault": ["kill p0 @nans", f"kill p0 @{HUGE}s", "drop 200% of pushes @1-2s", "stop d0 @5-1s"],
    "pid": ["p0=x", "p0=-1", "p0=4294967297", f"p0={HUGE}", "p0"],
    "cores": ["0-99999999999", "-1", "nan", HUGE, "5-1", "0,,99999"],
    "deployments": [
        "colocated:0",
        f"colocated:{HUGE}",
        "0:1",
        f"1:{HUGE}",
        "nan:1",
        "1:1+encode:0",
    ],
    "log-level": ["loud", "-1"],
}
COMMANDS = {
    "run": ["--target", "grpc://127.0.0.1:1", "--rate", "1", "--duration-s", "10"],
    "compare": ["--up", "m", "--rate", "1", "--duration-s", "9", "--slo", "e2e=1"],
    "tune": ["--up", "m", "--rate", "1", "--duration-s", "9", "--slo", "e2e=1"],
}
# An option that only counts beside others, and the others.
BESIDE = {
    "burstiness": ["--arrivals", "gamma"],
    "prefix-groups": ["--prefix-tokens", "1"],
    "prefix-tokens": ["--prefix-groups", "1"],
    "image-size": ["--images", "1"],
    "image-share": ["--images", "1"],
    "image-repeats": ["--images", "1"],
}
INSTEAD = {
    "concurrency": ["--concurrency", "1"],
    "think-s": ["--concurrency", "1"],
    "trace": [],
    "slowdown": ["--trace", "trace.jsonl"],
    "sweep": [],
}
# Any number is one of these.
FREE = {"seed"}


def options() -> Iterator[tuple[str, str, str]]:
    """Yield the command, the option and an odd value of all that there are."""
    group: Any = typer.main.get_command(app)
    for command, known in group.commands.items():
        for parameter in known.params:
            name = parameter.opts[0].removeprefix("--")
            if parameter.type_descriptor.annotation in (int, float):
                yield from ((command, name, value) for value in NEVER)
            yield from ((command, name, value) for value in TEXTS.get(name, ()))


@pytest.fixture(autouse=True)
def plays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """Have nothing played; what would be is listed."""
    played: list[Any] = []

    async def play(*what: Any) -> int:
        played.append(what)
        return 0

    monkeypatch.setattr(execute, "execute", play)
    monkeypatch.setattr(execute_comparison, "execute_comparison", play)
    monkeypatch.setattr(execute_tuning, "execute_tuning", play)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    monkeypatch.chdir(tmp_path)
    return played


def call(command: str, name: str, value: str) -> tuple[int, str]:
    arguments = list(COMMANDS[command])
    if name in INSTEAD:
        at = arguments.index("--rate")
        arguments[at : at + 2] = INSTEAD[name]
    if f"--{name}" in arguments:
        at = arguments.index(f"--{name}")
        del arguments[at : at + 2]
    given = [command, *arguments, *BESIDE.get(name, ()), f"--{name}={value}"]
    done = CliRunner().invoke(app, given)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


@pytest.mark.parametrize("command", COMMANDS)
def test_the_usual_values_are_played(command: str, plays: list[Any]) -> None:
    code, output = call(command, "seed", "1")
    assert (code, output, len(plays)) == (0, "", 1)


@pytest.mark.parametrize(("command", "name", "value"), list(options()))
def test_an_odd_value_is_refused_by_name(
    command: str, name: str, value: str, plays: list[Any]
) -> None:
    """Regression: an infinite rate or timeout was played, and huge core numbers took all memory."""
    code, output = call(command, name, value)
    if name in FREE and code == 0:
        return
    assert code in (1, 2)
    assert not plays
    assert "Traceback" not in output
    assert len(output) < 700
    line = next(
        line for line in output.splitlines() if line.startswith("baton: ") or "rror" in line
    )
    assert name.replace("-", "_") in line or f"--{name}" in output
