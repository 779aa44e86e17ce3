"""The benchmarks' runner: options from signatures, saved results, problems in the exit code."""

from __future__ import annotations

import argparse
import ast
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from benchmarks.__main__ import main
from benchmarks.page.measures import value
from benchmarks.page.rows import Measurement, Row, Source
from benchmarks.page.write_performance import SUBJECTS
from benchmarks.runner import environment
from benchmarks.runner import run as runner
from benchmarks.runner.options import add_options, values_of
from benchmarks.runner.run import Run

ROOT = Path(__file__).resolve().parents[3]
MEASUREMENTS = [
    one
    for subject in SUBJECTS
    for one in subject.measurements
    if one.module.startswith("benchmarks.")
]
MEASUREMENT = Measurement(
    "subject.one", "engine", (Source("one", (Row("a", value("a"), ">= 1"),)),)
)


def by_parameters(
    run: Run,
    requests: int = 20,
    parts: Sequence[Literal["left", "right"]] = ("left",),
    rates: Sequence[float] = (1.0, 4.0),
    other: Path | None = None,
    mode: Literal["slow", "quick"] = "slow",
    dry_run: bool = False,
) -> None:
    """Measure.

    Args:
        requests: per prompt length, of which
            long prompts get fewer.
        parts: 50 % of all.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of a measurement.

    Attributes:
        seeds: one for each run.
    """

    seeds: Sequence[int] = ()
    only: str = ""


def by_fields(run: Run, options: Options) -> None:
    """Measure."""


def parse(function: Callable[..., object], *words: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    add_options(parser, function)
    return values_of(function, parser.parse_args(words))


def test_options_have_the_defaults_of_the_parameters() -> None:
    assert parse(by_parameters) == {
        "requests": 20,
        "parts": ("left",),
        "rates": (1.0, 4.0),
        "other": None,
        "mode": "slow",
        "dry_run": False,
    }


def test_words_become_what_the_annotations_say() -> None:
    words = ["--requests", "3", "--parts", "left,right", "--rates", "2", "8,9", "--other", "a/b"]
    found = parse(by_parameters, *words, "--mode", "quick", "--dry-run")
    assert found == {
        "requests": 3,
        "parts": ["left", "right"],
        "rates": [2.0, 8.0, 9.0],
        "other": Path("a/b"),
        "mode": "quick",
        "dry_run": True,
    }


def test_fields_of_a_dataclass_are_options_too() -> None:
    found = parse(by_fields, "--seeds", "1", "2", "--only", "kills of")
    assert found == {"options": Options(seeds=[1, 2], only="kills of")}


@pytest.mark.parametrize("words", [["--parts", "up"], ["--mode", "up"], ["--requests", "x"]])
def test_a_value_that_is_not_allowed_is_refused(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(by_parameters, *words)
    assert words[0] in capsys.readouterr().err


def test_help_has_the_lines_of_the_docstring() -> None:
    for function, text in (
        (by_parameters, "per prompt length, of which long prompts get fewer."),
        (by_parameters, "50 % of all."),
        (by_fields, "one for each run."),
    ):
        parser = argparse.ArgumentParser(
            formatter_class=lambda prog: argparse.HelpFormatter(prog, width=200)
        )
        add_options(parser, function)
        assert text in parser.format_help()


@pytest.mark.parametrize("saves", [True, False])
def test_results_are_written_only_on_request(
    saves: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(environment, "RESULTS", tmp_path)
    run = Run(MEASUREMENT, ["--seed", "1", "--save"], saves=saves)
    assert run.finish({"a": 2}) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["one.json"] * saves
    if saves:
        document = json.loads((tmp_path / "one.json").read_text(encoding="utf-8"))
        assert document["a"] == 2
        assert document["environment"]["arguments"] == ["--seed", "1"]
    printed = capsys.readouterr().out
    assert ">= 1" in printed  # the page's rows are judged at once
    assert "all promises kept" in printed


def test_parts_of_several_runs_keep_their_dates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (environment, runner):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    moments = []
    for number, part in enumerate(("left", "right")):
        run = Run(MEASUREMENT, [part], saves=True)
        run.environment["git_revision"] = f"r{number}"
        moments.append(run.environment["git_revision"])
        assert "environment" not in run.saved()
        run.save({**run.saved_parts([part]), part: {"a": number}})
    document = json.loads((tmp_path / "one.json").read_text(encoding="utf-8"))
    assert document["environment"]["arguments"] == ["right"]
    found = {name: when["git_revision"] for name, when in document["of_parts"].items()}
    assert found == dict(zip(("left", "right"), moments, strict=True))
    del document["of_parts"]  # as in files of earlier releases
    (tmp_path / "one.json").write_text(json.dumps(document), encoding="utf-8")
    run = Run(MEASUREMENT, [], saves=True)
    run.environment["git_revision"] = "r2"
    found = run.saved_parts(["left"])["of_parts"]
    assert {name: when["git_revision"] for name, when in found.items()} == {
        "left": "r2", "right": "r1",
    }  # fmt: skip


def test_a_broken_promise_makes_the_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(MEASUREMENT, [], saves=False)
    run.problems += ["a token is wrong", "a block is held"]
    assert run.finish(None) == 1
    assert "a token is wrong; a block is held" in capsys.readouterr().out


def test_targets_that_are_missed_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(MEASUREMENT, [], saves=False)
    assert run.finish({"a": 0.5}) == 0
    assert "targets missed: 1" in capsys.readouterr().out


def test_rows_of_any_shape_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(MEASUREMENT, [], saves=False)
    run.show("case", {"first": {"us": {"median": 1.23456, "p90": 2}, "runs": [1, 2]}})
    run.show("rows", [{"a": 1}, {"b": "x"}])
    run.show("count", 7)
    printed = capsys.readouterr().out
    assert "1.235" in printed
    assert "runs" not in printed
    assert "count: 7" in printed


@pytest.mark.parametrize("measurement", MEASUREMENTS, ids=lambda one: one.name)
def test_every_measurement_has_a_run_and_says_what_it_does(measurement: Measurement) -> None:
    path = ROOT / (measurement.module.replace(".", "/") + ".py")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert functions["run"].args.args[0].arg == "run"
    first = (ast.get_docstring(tree) or "").splitlines()[0]
    assert first.endswith(".")
    assert not first.startswith(("What ", "How ", "The "))


def test_all_measurements_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    printed = capsys.readouterr().out
    assert all(f"  {one.name} " in printed for one in MEASUREMENTS)


def test_an_unknown_name_is_refused_with_the_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["no_such"]) == 2
    assert "scheduler" in capsys.readouterr().err
