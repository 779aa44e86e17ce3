"""Unit tests of `baton admin`: its page names every command and no other, and units read well."""

from __future__ import annotations

import io
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
import typer.main
from rich.console import Console
from typer.testing import CliRunner

from baton.cli.admin import explain
from baton.cli.admin.app import app
from baton.cli.admin.connection import ExitCode
from baton.cli.admin.nodes import kv_bar
from baton.cli.admin.output import (
    enum_word,
    escape,
    format_bar,
    format_count,
    format_seconds,
    print_json,
)
from baton.cli.admin.requests import _decode_account
from baton.v1 import admin_pb2, node_pb2, types_pb2

PAGE = (Path(__file__).parents[3] / "docs" / "admin.md").read_text(encoding="utf-8")
ON_PAGE = re.findall(r"^\$ baton admin (.*)$", PAGE, re.MULTILINE)


def _find(words: list[str]) -> tuple[Any, str, list[str]]:
    """The command that words begin with, its name, and its arguments."""
    found: Any = typer.main.get_command(app)
    name: list[str] = []
    while hasattr(found, "list_commands"):
        name.append(words.pop(0))
        found = found.get_command(None, name[-1])
    return found, " ".join(name), words


@pytest.mark.parametrize("line", ON_PAGE)
def test_every_command_on_the_page_is_one(line: str) -> None:
    command, name, arguments = _find(shlex.split(line.partition(" | ")[0], comments=True))
    command.make_context(name, arguments)  # raises if an option or argument is wrong


def test_every_command_is_on_the_page() -> None:
    group: Any = typer.main.get_command(app)
    commands = {name: group.get_command(None, name) for name in group.list_commands(None)}
    names = {
        f"{name} {inner}".strip()
        for name, command in commands.items()
        for inner in getattr(command, "commands", {"": None})
    }
    assert names == {_find(shlex.split(line, comments=True))[1] for line in ON_PAGE}


def test_every_exit_code_is_on_the_page_and_in_the_help() -> None:
    shown = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["--help"]).output
    for code in ExitCode:
        assert re.search(rf"^\| {int(code)} \|", PAGE, re.MULTILINE), code
        assert re.search(rf"[ :]{int(code)}\s", shown), code


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.00084, "840 us"), (0.0123, "12.3 ms"), (4.567, "4.57 s"), (125, "2 min 5 s"),
     (60, "1 min"), (11040, "3 h 4 min")],
)  # fmt: skip
def test_durations_for_people(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(0.321, "0.32"), (0, "0"), (843, "843"), (12340, "12.3k"), (4.56e6, "4.56M")],
)
def test_counts_for_people(number: float, text: str) -> None:
    assert format_count(number) == text


def test_bars_are_as_wide_whatever_they_show() -> None:
    bars = [format_bar(share / 97) for share in range(-3, 110)]
    assert {len(bar) for bar in bars} == {len("████████ 100%")}
    assert (bars[0], bars[-1]) == ("········   0%", "████████ 100%")


def test_names_of_enums_are_one_word() -> None:
    roles = (types_pb2.NODE_ROLE_PREFILL, types_pb2.NODE_ROLE_DECODE)
    assert [enum_word(types_pb2.NodeRole.Name(one)) for one in roles] == ["prefill", "decode"]
    states = range(3)
    assert [enum_word(node_pb2.ServingState.Name(one)) for one in states] == [
        "serving",
        "draining",
        "drained",
    ]


def test_json_has_numbers_as_numbers_absent_values_as_null_and_every_field(
    capsys: pytest.CaptureFixture[str],
) -> None:
    stats = admin_pb2.GetStatsResponse(num_finished=2**40, num_failed={"CANCELLED": 3})
    print_json(stats)
    found = json.loads(capsys.readouterr().out)
    assert found.keys() == {field.name for field in stats.DESCRIPTOR.fields}
    assert (found["num_finished"], found["num_failed"]) == (2**40, {"CANCELLED": 3})
    assert found["admission"] is None


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_explain_breaks_no_word_however_narrow_the_terminal_is(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    terms = ("prefill_queue_ms", "prefill_ms", "prefill_damage_ms", "exposed_transfer_ms",
             "stall_ms", "decode_ms", "damage_ms", "local_queue_ms", "margin_ms")  # fmt: skip
    decision = admin_pb2.DecisionDescription(
        candidates=[
            admin_pb2.CandidateDescription(
                prefill_node="p0", decode_node=f"d{i}", cost=100 + i,
                terms=[admin_pb2.CostTerm(name=name, value=198.7) for name in terms],
            )
            for i in range(2)
        ]
    )  # fmt: skip
    shown = io.StringIO()
    console = Console(file=shown, width=width, force_terminal=True, color_system=None)
    monkeypatch.setattr(explain, "make_console", lambda: console)
    explain._print(decision, "now")
    words = set(re.findall(r"\w+", shown.getvalue()))
    assert {word for name in terms for word in name.removesuffix("_ms").split("_")} <= words
    assert {"p0", "d0", "d1", "100", "101", "199"} <= words
    assert max(map(len, shown.getvalue().splitlines())) <= width


def test_explain_shows_what_was_expected_of_a_prompt_beside_what_it_took(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forecast = admin_pb2.PrefillForecast(num_tokens=105, wait_ms=0, compute_ms=98.4)
    decision = admin_pb2.DecisionDescription(forecast=forecast, is_probe=True)
    shown = io.StringIO()
    console = Console(file=shown, width=140, color_system=None)
    monkeypatch.setattr(explain, "make_console", lambda: console)
    explain._print(decision, "attempt 1")
    assert "a probe" in shown.getvalue()
    expected = "prefill of 105 tokens: expected 0 ms of waiting and 98.4 ms of computing"
    assert f"{expected}, not measured" in shown.getvalue()
    forecast.is_measured = True
    forecast.measured_wait_ms, forecast.measured_compute_ms = 2.1, 101.2
    assert explain._forecast(forecast) == f"{expected}, measured 2.1 and 101"


def test_a_nodes_kv_in_use_is_not_known_before_its_first_beat() -> None:
    """It was shown as 100 %."""
    node = admin_pb2.NodeDescription(node_name="d0", num_blocks=100)
    assert kv_bar(node) == "?"
    node.beat.CopyFrom(node_pb2.NodeBeat(num_free_blocks=100))
    assert kv_bar(node).endswith(" 0%")
    node.beat.num_free_blocks = 0
    assert kv_bar(node).endswith(" 100%")


def test_what_a_node_says_is_shown_as_it_is_and_does_nothing_to_a_terminal() -> None:
    said = "[/] [link=x]\x1b]52;c;aGk=\x07\n\u202e"
    page = io.StringIO()
    Console(file=page, force_terminal=True, color_system=None, width=200).print(escape(said))
    assert page.getvalue() == "[/] [link=x]\\x1b]52;c;aGk=\\x07\\n\\u202e\n"
    receipt = types_pb2.Receipt(decode_node="d", num_output_tokens=2)
    receipt.decode.push.transport = said
    found = admin_pb2.RequestTrace(receipt=receipt)
    page = io.StringIO()
    Console(file=page, width=1000).print(_decode_account(found))
    assert "by [/] [link=x]\\x1b" in page.getvalue()
