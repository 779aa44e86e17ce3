"""Outputs of one kind: text, one call, or what their beginning says."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from router.intake.parsers.base import OutputParser, Part, new_call_id
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


class CallsOrText:
    """Reads an output that is calls if it begins with their mark, and a text otherwise.

    A text may have the mark within it.

    Args:
        calls: divides calls.
    """

    def __init__(self, mark: str, calls: OutputParser) -> None:
        self._mark = mark
        self._calls = calls
        self._held = ""
        self._chosen: OutputParser | None = None

    def push(self, text: str) -> Iterator[Part]:
        if self._chosen is None:
            text = self._held = self._held + text
            if len(text) < len(self._mark) and self._mark.startswith(text):
                return
            self._chosen = self._calls if text.startswith(self._mark) else PlainText()
        yield from self._chosen.push(text)

    def finish(self) -> Iterator[Part]:
        if self._chosen is None:
            self._chosen = PlainText()
            yield from self._chosen.push(self._held)
        yield from self._chosen.finish()
