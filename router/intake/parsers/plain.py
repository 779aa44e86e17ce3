"""Outputs that are not divided: all of it text, or all of it one call."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from router.intake.parsers.base import Part, new_call_id
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
    """Reads an output that is one call: a grammar saw to it.

    Args:
        make_id: makes the call's id.
    """

    def __init__(self, make_id: Callable[[], str] = new_call_id) -> None:
        def script(source: Source) -> Steps[None]:
            if no_call := (yield from call_steps(source, make_id=make_id)):
                yield no_call
            yield from rest_as_text(source)

        super().__init__(script)
