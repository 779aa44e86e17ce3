"""Parsers of a text, of one call, and of calls or a text; a filter that keeps the first call."""

from __future__ import annotations

from collections.abc import Iterator

from router.intake.parsers.base import (
    CallArguments,
    CallBegins,
    MakeId,
    OutputParser,
    Part,
    new_call_id,
)
from router.intake.parsers.json_call import call_steps
from router.intake.parsers.source import ScriptedParser, Source, Steps, rest_as_text


class PlainText:
    """Treats the whole output as text."""

    def push(self, text: str) -> Iterator[Part]:
        if text:
            yield text

    def flush(self) -> Iterator[Part]:
        return iter(())


class OneCall(ScriptedParser):
    """Reads an output that a grammar forced to be one call.

    Args:
        make_id: makes the call's id.
    """

    def __init__(self, make_id: MakeId = new_call_id) -> None:
        def script(source: Source) -> Steps[None]:
            if no_call := (yield from call_steps(source, make_id=make_id)):
                yield no_call
            yield from rest_as_text(source)

        super().__init__(script)


class CallsOrText:
    """Reads an output as calls if it begins with a mark of calls, else as text.

    Marks in the middle of a text are ignored.

    Args:
        marks: marks that calls may begin with.
        calls: the parser of calls.
    """

    def __init__(self, marks: tuple[str, ...], calls: OutputParser) -> None:
        self._marks = marks
        self._calls = calls
        self._held = ""
        self._chosen: OutputParser | None = None

    def push(self, text: str) -> Iterator[Part]:
        if self._chosen is None:
            text = self._held = self._held + text
            is_call = text.startswith(self._marks)
            if not is_call and any(mark.startswith(text) for mark in self._marks):
                return
            self._chosen = self._calls if is_call else PlainText()
        yield from self._chosen.push(text)

    def flush(self) -> Iterator[Part]:
        if self._chosen is None:
            self._chosen = PlainText()
            yield from self._chosen.push(self._held)
        yield from self._chosen.flush()


class FirstCall:
    """Drops all calls after an output's first one, for requests that allow only one.

    Args:
        parts: the parser of the output, whose parts are filtered.
    """

    def __init__(self, parts: OutputParser) -> None:
        self._parts = parts
        self._num_begun = 0

    def push(self, text: str) -> Iterator[Part]:
        return filter(self._is_kept, self._parts.push(text))

    def flush(self) -> Iterator[Part]:
        return filter(self._is_kept, self._parts.flush())

    def _is_kept(self, part: Part) -> bool:
        self._num_begun += isinstance(part, CallBegins)
        return self._num_begun <= 1 or not isinstance(part, CallBegins | CallArguments)
