"""Qwen3 and DeepSeek-R1: reasoning between ``<think>`` and ``</think>``, before all else."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from router.intake.parsers.base import OutputParser, ParserContext, Part, Reasoning
from router.intake.parsers.source import ScriptedParser, Source, Steps, rest_as_text

_NEWLINES = re.compile(r"[\r\n]*")
_SPACE = re.compile(r"[ \t\r\n]*")


@dataclass(frozen=True, slots=True)
class ThinkForm:
    """Marks of reasoning at the beginning of an output, or in what the prompt has of it.

    Attributes:
        always_thinks: the model thinks without saying so, until the mark that ends it.
        within: special tokens that reasoning may have in it.
    """

    open: str
    close: str
    always_thinks: bool = False
    within: tuple[str, ...] = ()

    @property
    def special_tokens(self) -> tuple[str, ...]:
        return (self.open, self.close)

    @property
    def inner_tokens(self) -> tuple[str, ...]:
        return (self.open, self.close, *self.within)

    def make_parser(self, context: ParserContext) -> OutputParser:
        """Make a parser of one output."""
        prompt = context.prompt_end
        begun, ended = prompt.rfind(self.open), prompt.rfind(self.close)
        thinks = begun > ended or (self.always_thinks and ended < 0)
        goes_on = begun > ended and bool(prompt[begun + len(self.open) :].strip())

        def script(source: Source) -> Steps[None]:
            if goes_on:
                yield from _reasoning(source, self.close)
                yield from source.match(_NEWLINES)
                yield from rest_as_text(source)
                return
            blanks = yield from source.match(_SPACE)
            if (yield from source.take(self.open)) or thinks:
                yield from source.match(_NEWLINES)
                yield from _reasoning(source, self.close)
                yield from source.match(_NEWLINES)
            elif blanks:
                yield blanks
            yield from rest_as_text(source)

        return ScriptedParser(script)


def _reasoning(source: Source, close: str) -> Steps[None]:
    """Read up to the mark; the newlines before the mark are no reasoning."""
    newlines = ""

    def take(text: str) -> Part | None:
        nonlocal newlines
        text, newlines = newlines + text, ""
        kept = text.rstrip("\r\n")
        newlines = text[len(kept) :]
        return Reasoning(kept) if kept else None

    yield from source.until((close,), take)


class ThinkFirst:
    """Reasoning as one parser finds it, and what is no reasoning as another one divides it."""

    def __init__(self, reasoning: OutputParser, rest: OutputParser) -> None:
        self._reasoning = reasoning
        self._rest = rest

    def push(self, text: str) -> Iterator[Part]:
        for part in self._reasoning.push(text):
            yield from self._divide(part)

    def finish(self) -> Iterator[Part]:
        for part in self._reasoning.finish():
            yield from self._divide(part)
        yield from self._rest.finish()

    def _divide(self, part: Part) -> Iterator[Part]:
        if isinstance(part, str):
            yield from self._rest.push(part)
        else:
            yield part
