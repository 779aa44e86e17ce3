"""Joins the deltas that parsers find in an output, for tests that compare them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from router.intake.parsers import REASONING_PARSERS, TOOL_CALL_PARSERS
from router.intake.parsers.base import (
    CallArguments,
    CallBegins,
    OutputParser,
    ParserContext,
    Part,
    Reasoning,
)
from router.intake.parsers.plain import PlainText
from router.intake.parsers.think import ThinkFirst

Found = list[str | Reasoning | tuple[str, str]]
"""Texts, reasoning, and calls with their arguments, in their order."""
TOOLS: dict[str, Any] = {
    "f": {"properties": {"x": {"type": "string"}, "n": {"type": "integer"}}},
    "g": {},
}


def make_parser(name: str, prompt_end: str = "") -> OutputParser:
    """Make a parser of calls by its name."""
    return TOOL_CALL_PARSERS.load(name)(ParserContext(TOOLS, prompt_end))


def make_reasoning_parser(name: str, prompt_end: str = "") -> OutputParser:
    """Make a parser of reasoning by its name."""
    context = ParserContext(TOOLS, prompt_end)
    return ThinkFirst(REASONING_PARSERS.load(name)(context), PlainText())


def parse(parser: OutputParser, pieces: Iterable[str]) -> Found:
    """Return what a parser finds in these pieces, with neighbours of one kind joined."""
    parts = [part for piece in pieces for part in parser.push(piece)]
    return put_together([*parts, *parser.flush()])


def put_together(parts: Iterable[Part]) -> Found:
    found: Found = []
    for part in parts:
        last = found[-1] if found else None
        match part:
            case CallBegins(name):
                found.append((name, ""))
            case CallArguments(text):
                assert isinstance(last, tuple), "arguments of no call"
                found[-1] = (last[0], last[1] + text)
            case Reasoning(text) if isinstance(last, Reasoning):
                found[-1] = Reasoning(last.text + text)
            case str() if isinstance(last, str):
                found[-1] = last + part
            case _:
                found.append(part)
    return found
