"""Outputs that are not divided: all of it text, or all of it one call."""

from __future__ import annotations

from collections.abc import Iterator

from router.intake.parsers.base import Part
from router.intake.parsers.json_call import call_steps
from router.intake.parsers.source import ScriptedParser, Source, Steps, rest_as_text


class PlainText:
    """Everything is text."""

    def push(self, text: str) -> Iterator[Part]:
        if text:
            yield text

    def finish(self) -> Iterator[Part]:
        return iter(())


class OneCall(ScriptedParser):
    """The whole output is one call: a grammar saw to it."""

    def __init__(self) -> None:
        super().__init__(_one_call)


def _one_call(source: Source) -> Steps[None]:
    if no_call := (yield from call_steps(source)):
        yield no_call
    yield from rest_as_text(source)
