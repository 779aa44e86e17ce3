"""Qwen3 and DeepSeek-R1: reasoning between ``<think>`` and ``</think>``, before all else."""

from __future__ import annotations

import re
from collections.abc import Iterator

from router.intake.parsers.base import OutputParser, ParserContext, Part, Reasoning
from router.intake.parsers.source import ScriptedParser, Source, Steps, rest_as_text

OPEN, CLOSE = "<think>", "</think>"
_NEWLINES = re.compile(r"[\r\n]*")
_SPACE = re.compile(r"[ \t\r\n]*")


class Think(ScriptedParser):
    """Divides an output that begins with the tag, or whose prompt ends in a thought."""

    special_tokens = (OPEN, CLOSE)
    inner_tokens = (OPEN, CLOSE)
    always_thinks = False

    def __init__(self, context: ParserContext) -> None:
        prompt = context.prompt_end
        begun, ended = prompt.rfind(OPEN), prompt.rfind(CLOSE)
        thinks = begun > ended or (self.always_thinks and ended < 0)
        goes_on = begun > ended and bool(prompt[begun + len(OPEN) :].strip())

        def script(source: Source) -> Steps[None]:
            if goes_on:
                yield from _reasoning(source)
                yield from source.match(_NEWLINES)
                yield from rest_as_text(source)
                return
            blanks = yield from source.match(_SPACE)
            if (yield from source.take(OPEN)) or thinks:
                yield from source.match(_NEWLINES)
                yield from _reasoning(source)
                yield from source.match(_NEWLINES)
            elif blanks:
                yield blanks
            yield from rest_as_text(source)

        super().__init__(script)


class AlwaysThink(Think):
    """For models that think without saying so, until the tag that ends it."""

    always_thinks = True


def _reasoning(source: Source) -> Steps[None]:
    """Read up to the tag; the newlines before the tag are no reasoning."""
    newlines = ""

    def take(text: str) -> Part | None:
        nonlocal newlines
        text, newlines = newlines + text, ""
        kept = text.rstrip("\r\n")
        newlines = text[len(kept) :]
        return Reasoning(kept) if kept else None

    yield from source.until((CLOSE,), take)


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
