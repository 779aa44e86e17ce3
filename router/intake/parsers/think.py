"""Reads reasoning between marks at an output's start, such as Qwen3's and DeepSeek-R1's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from baton.text.thoughts.marks import ThoughtMarks
from router.intake.parsers.base import CLOSE_SIGN, OutputParser, ParserContext, Part, Reasoning
from router.intake.parsers.source import ScriptedParser, Source, Steps, rest_as_text

_NEWLINES = re.compile(r"[\r\n]*")
_SPACE = re.compile(r"[ \t\r\n]*")


@dataclass(frozen=True, slots=True)
class ThinkForm:
    """Reasoning between marks at the start of an output; the prompt may have begun it already."""

    marks: ThoughtMarks

    @property
    def special_tokens(self) -> tuple[str, ...]:
        return (self.marks.open, self.marks.close)

    def make_parser(self, context: ParserContext) -> OutputParser:
        """Make a parser for one output."""
        opening = self.marks.open
        closing = CLOSE_SIGN if context.closes_by_token else self.marks.close
        thinks, _ = self.marks.place_of(context.prompt_end)
        _, mark, begun = context.prompt_end.rpartition(opening)
        goes_on = thinks and bool(mark) and bool(begun.strip())

        def script(source: Source) -> Steps[None]:
            if goes_on:
                yield from _reasoning(source, closing)
                yield from source.match(_NEWLINES)
                yield from rest_as_text(source)
                return
            blanks = yield from source.match(_SPACE)
            if (yield from source.consume(opening)) or thinks:
                yield from source.match(_NEWLINES)
                yield from _reasoning(source, closing)
                yield from source.match(_NEWLINES)
            elif blanks:
                yield blanks
            yield from rest_as_text(source)

        return ScriptedParser(script)


def _reasoning(source: Source, close: str) -> Steps[None]:
    """Read reasoning up to the closing mark; leave out newlines before the mark."""
    newlines = ""

    def take(text: str) -> Part | None:
        nonlocal newlines
        text, newlines = newlines + text, ""
        kept = text.rstrip("\r\n")
        newlines = text[len(kept) :]
        return Reasoning(kept) if kept else None

    yield from source.until((close,), take)


class ThinkFirst:
    """Lets one parser find the reasoning, and another parser divide the rest of the output."""

    def __init__(self, reasoning: OutputParser, rest: OutputParser) -> None:
        self._reasoning = reasoning
        self._rest = rest

    def push(self, text: str) -> Iterator[Part]:
        for part in self._reasoning.push(text):
            yield from self._divide(part)

    def flush(self) -> Iterator[Part]:
        for part in self._reasoning.flush():
            yield from self._divide(part)
        yield from self._rest.flush()

    def _divide(self, part: Part) -> Iterator[Part]:
        if isinstance(part, str):
            yield from self._rest.push(part)
        else:
            yield part
