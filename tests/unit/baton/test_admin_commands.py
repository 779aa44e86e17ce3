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

from baton.cli.admin import audit, cache, explain, quarantine, requests, stats
from baton.cli.admin.app import app
from baton.cli.admin.connection import ExitCode
from baton.cli.admin.nodes import kv_bar, nodes_table
from baton.cli.admin.output import (
    enum_word,
    escape,
    format_bar,
    format_count,
    format_number,
    format_seconds,
    print_first_that_fits,
    print_json,
)
from baton.cli.admin.requests import _decode_account
from baton.v1 import admin_pb2, node_pb2, types_pb2

PAGE = (Path(__file__).parents[3] / "docs" / "admin.md").read_text(encoding="utf-8")
ON_PAGE = re.findall(r"^\$ baton admin (.*)$", PAGE, re.MULTILINE)


def _find(words: list[str]) -> tuple[Any, str, list[str]]:
    """Find the command that a line's words begin with; return its name and arguments too."""
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


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (0.0456, "0.0456"), (98.4, "98.4"), (999.4, "999"), (999.6, "1,000"),
     (51_840, "51,840")],
)  # fmt: skip
def test_numbers_have_no_exponents(number: float, text: str) -> None:
    assert format_number(number) == text


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
                prefill_node="p0", decode_node=f"d{i}", cost=100 + i, num_computed_tokens=77,
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
    assert {"p0", "d0", "d1", "77", "100", "101", "199"} <= words
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


def test_explain_counts_only_the_tokens_that_the_prefill_node_lacks() -> None:
    source = admin_pb2.PrefixSourceDescription(
        node="d0", num_tokens=480, fetch_ms=6.1, compute_ms=210
    )
    expected = "480 tokens to get from d0: 6.1 ms to fetch and 210 ms to compute"
    assert explain._source(source) == f"{expected}, not fetched"
    source.is_chosen = True
    assert explain._source(source) == f"{expected}, fetched"


def test_a_nodes_kv_in_use_is_not_known_before_its_first_beat() -> None:
    """The bar once showed 100 % here."""
    node = admin_pb2.NodeDescription(node_name="d0", num_blocks=100)
    assert kv_bar(node) == "?"
    node.beat.CopyFrom(node_pb2.NodeBeat(num_free_blocks=100))
    assert kv_bar(node).endswith(" 0%")
    node.beat.num_free_blocks = 0
    assert kv_bar(node).endswith(" 100%")


def test_a_node_takes_one_line_of_80_columns() -> None:
    """Regression: the share of KV in use stood in a line of its own."""
    peer = admin_pb2.PeerDescription(
        node_name="p0", transport="nixl/ucx cma", bandwidth_bytes_per_s=595e6
    )
    role, beat = types_pb2.NODE_ROLE_PREFILL, node_pb2.NodeBeat(num_free_blocks=100)
    node = admin_pb2.NodeDescription(
        node_name="d0", role=role, num_blocks=100, peers=[peer], beat=beat, health="serving"
    )
    page = io.StringIO()
    console = Console(file=page, width=80, color_system=None)
    tables = nodes_table([node]), nodes_table([node], bar_width=3)
    print_first_that_fits(console, *tables, breaks_lines=False)
    _, _, *rows = page.getvalue().splitlines()
    assert len(rows) == 1
    assert "0%" in rows[0]
    assert rows[0].rstrip().endswith("MB/s")


def test_the_cache_table_shows_bytes_tokens_and_ages_by_source() -> None:
    use = node_pb2.CacheUse(
        num_bytes=2**20, num_files=3, file_bytes=2**30, are_objects=True, evicted_after_s=90,
        memory_tokens=1200, memory_age_s=0.5, file_tokens=3400, file_age_s=125, fetched_tokens=56,
    )  # fmt: skip
    node = admin_pb2.NodeDescription(
        node_name="p0", num_blocks=8, beat=node_pb2.NodeBeat(cache=use)
    )
    page = io.StringIO()
    Console(file=page, width=120, color_system=None).print(cache._table([node], wide=True))
    _, _, first, second = page.getvalue().splitlines()
    found = " ".join(first.split()), " ".join(second.split())
    assert found[0].endswith("1.0 MiB 0% 1 min 30 s 1.0 GiB 1.2k 3.4k 56"), found
    assert found[1] == "in objects after 500 ms after 2 min 5 s", found


def test_what_a_node_says_is_shown_as_it_is_and_does_nothing_to_a_terminal() -> None:
    said = "[/] [link=x]\x1b]52;c;aGk=\x07\n\u202e"
    page = io.StringIO()
    Console(file=page, force_terminal=True, color_system=None, width=200).print(escape(said))
    assert page.getvalue() == "[/] [link=x]\\x1b]52;c;aGk=\\x07\\n\\u202e\n"
    receipt = types_pb2.Receipt(decode_node="d", num_output_tokens=2)
    receipt.decode.push.num_blocks = 1
    receipt.decode.push.transport = said
    found = admin_pb2.RequestTrace(receipt=receipt)
    page = io.StringIO()
    Console(file=page, width=1000).print(_decode_account(found))
    assert "by [/] [link=x]\\x1b" in page.getvalue()


ROUTERS_ID = "chatcmpl-0123456789abcdef0123456789abcdef"  # as long as ids are
QUARANTINED = admin_pb2.ListQuarantineResponse(
    requests=[
        admin_pb2.QuarantinedRequest(
            fingerprint="0123456789abcdef", request_id=ROUTERS_ID, principal="somebody",
            num_prompt_tokens=1219, engine_ids=["d0-0123abcd", "d1-0123abcd"], left_s=300,
        )
    ]
)  # fmt: skip
AUDITED = admin_pb2.AuditResponse(
    nodes=[
        admin_pb2.NodeAudit(
            node_name="d0",
            ledger=admin_pb2.ListBlocksResponse(
                num_blocks=99,
                num_free_blocks=98,
                num_references=1,
                holdings=[
                    admin_pb2.BlockHolding(
                        owner="reservation", request_id=f"{ROUTERS_ID}~0", epoch=1,
                        state="RECEIVING", peer="p0-0123abcd", age_s=3.0, num_blocks=1,
                        ranges=[admin_pb2.BlockRange(first_block_id=3, num_blocks=1)],
                    )
                ],
            ),
        )
    ]
)  # fmt: skip


def shown_by(monkeypatch: pytest.MonkeyPatch, module: Any, width: int) -> io.StringIO:
    """Have a module print into text as on a terminal of this width."""
    shown = io.StringIO()
    console = Console(file=shown, width=width, force_terminal=True, color_system=None)
    monkeypatch.setattr(module, "make_console", lambda: console)
    return shown


@pytest.mark.parametrize("width", [80, 100, 140])
def test_ids_of_requests_stay_in_one_piece(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: an id was broken over three lines at 80 columns, and could not be copied."""
    of_router = admin_pb2.RequestTrace(
        request_id=ROUTERS_ID, state="finished", received_at=1.0, num_prompt_tokens=1219,
        num_output_tokens=128, first_token_s=6.1, ended_s=12.3,
        attempts=[admin_pb2.AttemptTrace(prefill_node="p0", decode_node="d0")],
    )  # fmt: skip
    of_node = admin_pb2.RequestDescription(
        request_id=f"{ROUTERS_ID}~0", status="WAITING_FOR_REMOTE_KVS", transfer_state="RECEIVING",
        num_tokens=1219, num_computed_tokens=1219, num_blocks=77, age_s=12.3,
    )  # fmt: skip
    shown = shown_by(monkeypatch, requests, width)
    requests._print_of_router([of_router])
    requests._print_of_node(admin_pb2.ListRequestsResponse(requests=[of_node]))
    lines = shown.getvalue().splitlines()
    for module, found in ((audit, AUDITED), (quarantine, QUARANTINED)):
        shown = shown_by(monkeypatch, module, width)
        module._print(found)
        lines += shown.getvalue().splitlines()
    assert sum(ROUTERS_ID in line for line in lines) == 4
    assert max(map(len, lines)) <= width
    assert all(word in "\n".join(lines) for word in ("finished", "1219", "12.3 s", "77"))


def test_requests_of_several_names_have_a_column_of_names(monkeypatch: pytest.MonkeyPatch) -> None:
    for names, column in ((("one", "one"), False), (("one", "two"), True)):
        shown = shown_by(monkeypatch, requests, 140)
        requests._print_of_router(
            [admin_pb2.RequestTrace(request_id="r", state="running", model=name) for name in names]
        )
        assert ("model" in shown.getvalue()) is column


def test_engines_that_died_stand_below_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    r"""Before, the table had a literal \n between two of them."""
    found = admin_pb2.ListQuarantineResponse(
        requests=[
            admin_pb2.QuarantinedRequest(
                fingerprint="0123456789abcdef", request_id="r", engine_ids=["d0-1", "d1-\x1b2"]
            )
        ]
    )
    shown = shown_by(monkeypatch, quarantine, 80)
    quarantine._print(found)
    assert "\\n" not in shown.getvalue()
    first, second = shown.getvalue().splitlines()[2:4]
    assert "d0-1" in first
    assert second.split() == ["d1-\\x1b2"]


def test_a_prompt_of_which_no_block_travelled_has_no_transport() -> None:
    """Regression: "got 0 B (0 blocks) by , 0 us of it exposed"."""
    decode = types_pb2.DecodeReceipt(num_prompt_tokens_computed=3)
    receipt = types_pb2.Receipt(decode_node="d0", decode=decode)
    account = _decode_account(admin_pb2.RequestTrace(num_output_tokens=1, receipt=receipt))
    assert "; d0 got no KV blocks from another node; parked " in account
    push = types_pb2.PushReceipt(num_blocks=2, num_bytes=2048, transport="nixl/ucx cma")
    decode.push.CopyFrom(push)
    receipt.decode.CopyFrom(decode)
    account = _decode_account(admin_pb2.RequestTrace(num_output_tokens=1, receipt=receipt))
    assert "; d0 got 2.0 KiB (2 blocks) by nixl/ucx cma, 0 us of it exposed; " in account


def test_the_page_shows_the_counts_that_stats_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the page's example had lost lines that had come since."""
    found = admin_pb2.GetStatsResponse(policy="cost")
    found.admission.SetInParent()
    page = io.StringIO()
    Console(file=page, width=80).print(stats._counts(found))
    printed = [line.split()[0] for line in page.getvalue().splitlines()]
    [example] = re.findall(r"^\$ baton admin stats\n(.*?)\n\n", PAGE, re.MULTILINE | re.DOTALL)
    assert [line.split()[0] for line in example.splitlines()] == printed
