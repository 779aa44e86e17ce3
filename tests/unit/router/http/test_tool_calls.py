"""Unit tests of tool-call parsing: calls are found wherever the pieces of the output are cut."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.http.tool_calls import OneCall, OutputParser, ParsedCall, PlainText, TaggedCalls

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": "a < b"}}\n</tool_call>'
F = ParsedCall("f", '{"x": "a < b"}')


def parse(parser: OutputParser, *pieces: str) -> list[str | ParsedCall]:
    """What it finds, with neighbouring texts joined."""
    found: list[str | ParsedCall] = []
    parts = [part for piece in pieces for part in parser.push(piece)]
    for part in [*parts, *parser.finish()]:
        if isinstance(part, str) and found and isinstance(found[-1], str):
            found[-1] += part
        else:
            found.append(part)
    return found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("no call", ["no call"]),
        ("", []),
        (CALL, [F]),
        (f"I look. {CALL}", ["I look. ", F]),
        (f"{CALL}\n{CALL}\n", [F, F]),
        (f"{CALL} and so", [F, " and so"]),
        (f"{CALL}\n<tool_call>1</tool_call>", [F, "\n<tool_call>1</tool_call>"]),
        ("<tool_call>not json</tool_call>", ["<tool_call>not json</tool_call>"]),
        ('<tool_call>{"name": 1}</tool_call>', ['<tool_call>{"name": 1}</tool_call>']),
        ('<tool_call>{"name": "f", "arguments": []}</tool_call>x',
         ['<tool_call>{"name": "f", "arguments": []}</tool_call>x']),
        ('<tool_call>{"name": "g"}', [ParsedCall("g", "{}")]),
        ('<tool_call>{"name": "g", "argu', ['<tool_call>{"name": "g", "argu']),
        ("a <tool_ca", ["a <tool_ca"]),
        ("a < b <tool", ["a < b <tool"]),
        ("</tool_call>", ["</tool_call>"]),
        ('<tool_call>{"name": "g", "arguments": {"x": "größe"}}</tool_call>',
         [ParsedCall("g", '{"x": "größe"}')]),
    ],
)  # fmt: skip
def test_calls_and_text_wherever_the_output_is_cut(
    text: str, expected: list[str | ParsedCall]
) -> None:
    assert parse(TaggedCalls(), text) == expected
    assert parse(TaggedCalls(), *text) == expected
    for cut in range(len(text)):
        assert parse(TaggedCalls(), text[:cut], text[cut:]) == expected


@given(st.lists(st.sampled_from(["<tool_call>", "</tool_call>", "<tool", "_call>", "a", "{}"])))
def test_text_without_a_call_is_never_lost(pieces: list[str]) -> None:
    assert "".join(map(str, parse(TaggedCalls(), *pieces))) == "".join(pieces)


def test_text_is_shown_as_soon_as_it_can_be_no_tag() -> None:
    parser = TaggedCalls()
    assert list(parser.push("so <")) == ["so "]
    assert list(parser.push("tool")) == []
    assert list(parser.push("s>")) == ["<tools>"]


def test_each_call_has_an_id_of_its_own() -> None:
    calls = [part for part in parse(TaggedCalls(), CALL + CALL) if isinstance(part, ParsedCall)]
    assert len({call.call_id for call in calls}) == 2


def test_a_forced_call_is_the_whole_output() -> None:
    call = json.dumps({"name": "f", "arguments": {"x": 1}})
    assert parse(OneCall(), *call) == [ParsedCall("f", '{"x": 1}')]
    assert parse(OneCall(), call[:-3]) == [call[:-3]]
    assert parse(OneCall()) == []


def test_without_tools_tags_are_text() -> None:
    assert parse(PlainText(), CALL, "") == [CALL]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>" + "x" * 300_000,
        CALL + " " * 300_000,
        "<tool_call></tool_call>" * 15_000,
        "<tool_cal" * 35_000,
        "<tool_call>" + "</tool_cal" * 30_000,
    ],
    ids=["a call", "blanks", "calls", "beginnings", "ends"],
)
@pytest.mark.parametrize("size", [1, 400_000])
def test_a_long_output_is_parsed_in_time_that_grows_with_it_only(text: str, size: int) -> None:
    began_at = time.process_time()
    found = parse(TaggedCalls(), *(text[i : i + size] for i in range(0, len(text), size)))
    assert time.process_time() - began_at < 8  # what was quadratic took minutes
    assert sum(len(one) for one in found if isinstance(one, str)) in (len(text), 0)


def test_a_call_that_cannot_be_sent_to_anybody_is_text() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"x": "\\ud800"}}</tool_call>'
    assert parse(TaggedCalls(), text) == [text]
