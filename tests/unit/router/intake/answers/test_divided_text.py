"""Unit tests of divided texts: a stop string ends an answer, but no reasoning or call."""

from __future__ import annotations

from typing import Any

import pytest

from baton.api.sampling_params import SamplingParams
from baton.text.stop_strings import DetokenizeOptions
from baton.text.tokenizer import Tokenizer
from router.intake.answers.divided_text import DividedText
from router.intake.parsers.base import OutputParser, ParserContext, Reasoning
from router.intake.parsers.choice import OutputParsers
from router.intake.parsers.plain import OneCall, PlainText
from tests.fakes.answers.parsed_outputs import put_together
from tests.fakes.checkpoints.demo_model import DEMO_MODEL

TOKENIZER = Tokenizer(DEMO_MODEL)
THINKS_AND_CALLS = OutputParsers(None, "hermes", "qwen3")
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": "a\\n\\nb STOP"}}\n</tool_call>'
F = ("f", '{"x": "a\\n\\nb STOP"}')


def parser() -> OutputParser:
    return THINKS_AND_CALLS.make(ParserContext({"f": {}}))


def read(
    text: str, stop: tuple[str, ...], made: OutputParser, size: int = 1, **more: Any
) -> tuple[list[Any], DividedText, int]:
    """Read an output that comes so many tokens at a time; gives parts, reader, and all tokens."""
    include = more.pop("include_stop", False)
    token_ids = TOKENIZER.encode(text)
    params = SamplingParams(stop=stop, max_tokens=1000, **more)
    options = DetokenizeOptions(include_stop=include)
    reader = DividedText(TOKENIZER, params, options, made)
    parts = []
    for start in range(0, len(token_ids), size):
        step = token_ids[start : start + size]
        reader.push(step, last=start + size >= len(token_ids))
        parts += reader.parts
        if reader.stopped:
            break
    return put_together(parts), reader, len(token_ids)


CASES: list[tuple[str, tuple[str, ...], list[Any], str | None]] = [
    (
        "<think>One.\n\nTwo.</think>Yes.\n\nNo.",
        ("\n\n",),
        [Reasoning("One.\n\nTwo."), "Yes."],
        "\n\n",
    ),
    ("<think>STOP?</think>Go STOP on", ("STOP",), [Reasoning("STOP?"), "Go "], "STOP"),
    ("<think>STOP?</think>Go", ("STOP",), [Reasoning("STOP?"), "Go"], None),
    (f"I look.{CALL}\n and STOP here", ("STOP",), ["I look.", F, "\n and "], "STOP"),
    (f"I look. STO{CALL}P", ("STOP",), ["I look. STO", F, "P"], None),
    (f"{CALL}{CALL}", ("STOP", "\n", "}", "</tool_call>", "<tool_call>"), [F, F], None),
    ("Yes. <tool", ("STOP", "<"), ["Yes. "], "<"),
    ("STOP", ("STOP",), [], "STOP"),
]


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(("text", "stop", "expected", "stop_string"), CASES)
def test_a_stop_string_is_looked_for_in_the_answer_alone(
    text: str, stop: tuple[str, ...], expected: list[Any], stop_string: str | None, size: int
) -> None:
    """Regression: a blank line in the reasoning ended the answer before its beginning."""
    parts, reader, num_tokens = read(text, stop, parser(), size)
    assert parts == expected
    assert reader.stopped is (stop_string is not None)
    assert reader.stop_string == stop_string
    assert reader.num_tokens <= num_tokens


def test_the_token_that_completes_it_is_the_last_one() -> None:
    text = "<think>a STOP</think>one STOP two three four"
    _, reader, num_tokens = read(text, ("STOP",), parser(), 1000)
    kept = TOKENIZER.decode(TOKENIZER.encode(text)[: reader.num_tokens])
    assert kept.startswith("<think>a STOP</think>one STOP")
    assert "three" not in kept
    assert reader.num_tokens < num_tokens


def test_a_stop_string_is_shown_or_looked_for_later_as_the_request_says() -> None:
    text = "<think>a STOP</think>one STOP two STOP three"
    parts, _, _ = read(text, ("STOP",), parser(), include_stop=True)
    assert parts == [Reasoning("a STOP"), "one STOP"]
    num_before = len(TOKENIZER.encode("<think>a STOP</think>one STOP two"))
    parts, _, _ = read(text, ("STOP",), parser(), min_tokens=num_before)
    assert parts == [Reasoning("a STOP"), "one STOP two "]


def test_the_arguments_of_a_forced_call_are_no_answer() -> None:
    text = '{"name": "f", "arguments": {"x": "STOP"}}'
    assert read(text, ("STOP", "}"), OneCall())[0] == [("f", '{"x": "STOP"}')]


@pytest.mark.parametrize("stop", [(), ("none",), ("STOP",)])
def test_a_text_without_parts_is_the_text(stop: tuple[str, ...]) -> None:
    assert read("one STOP two", stop, PlainText())[0] == (
        ["one "] if stop == ("STOP",) else ["one STOP two"]
    )
