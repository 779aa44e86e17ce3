"""Source: lets a parser read an output as if it were complete, although it arrives in pieces.

A parser is a generator that yields parts of the output, and yields `MORE` when it needs more text.
The result does not depend on how the output is cut into pieces, and only text that may begin a
marker is read twice.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Generator, Iterator
from typing import Final, TypeVar

from router.intake.parsers.base import CallArguments, CallBegins, Part


class _More:
    """The type of `MORE`, by which a parser asks for more text."""


MORE: Final = _More()
T = TypeVar("T")
Step = Part | _More
Steps = Generator[Step, None, T]


class Source:
    """The text of an output that has arrived and is not consumed yet."""

    def __init__(self) -> None:
        self._text = ""
        self._position = 0
        self._has_ended = False

    def feed(self, text: str) -> None:
        """Add text that has arrived."""
        self._text = self._text[self._position :] + text
        self._position = 0

    def close_input(self) -> None:
        """Note that the output has ended, so that no more text comes."""
        self._has_ended = True

    def until(self, markers: tuple[str, ...], take: Callable[[str], Part | None]) -> Steps[str]:
        """Consume text up to and including a marker; return the marker, or "" at the output's end.

        No marker may contain another marker, except at its end.

        Args:
            take: called with each piece of text before the marker; returns a part to yield, or
                None.
        """
        pattern = _any_of(markers)
        while True:
            found = pattern.search(self._text, self._position)
            end = found.start() if found else len(self._text) - self._num_held(markers)
            if end > self._position:
                text = self._text[self._position : end]
                self._position = end
                if (part := take(text)) is not None:
                    yield part
            if found:
                self._position = found.end()
                return found[0]
            if self._has_ended:
                return ""
            yield MORE

    def peek(self, num_chars: int = 1) -> Steps[str]:
        """Return the next characters without consuming them; fewer only at the output's end."""
        while len(self._text) - self._position < num_chars and not self._has_ended:
            yield MORE
        return self._text[self._position : self._position + num_chars]

    def match(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Consume and return the longest text that matches a pattern like ``[a-z]*``."""
        runs = []
        while True:
            found = pattern.match(self._text, self._position)
            if found is not None:
                runs.append(found[0])
                self._position = found.end()
            if self._position < len(self._text) or self._has_ended:
                return "".join(runs)
            yield MORE

    def comes(self, text: str) -> Steps[bool]:
        """Return whether exactly this text comes next, without consuming it."""
        for length in range(1, len(text) + 1):
            if (yield from self.peek(length)) != text[:length]:
                return False
        return True

    def consume(self, text: str) -> Steps[bool]:
        """Consume this text if it comes next; return whether it did."""
        if not (yield from self.comes(text)):
            return False
        self._position += len(text)
        return True

    def chunk(self) -> Steps[str]:
        """Return all text that is there, without consuming it; empty only at the output's end."""
        while self._position == len(self._text) and not self._has_ended:
            yield MORE
        return self._text[self._position :]

    def skip(self, num_chars: int) -> None:
        """Consume this many characters; `chunk` or `peek` must have returned them before."""
        self._position += num_chars

    def _num_held(self, markers: tuple[str, ...]) -> int:
        """Return the length of the longest end of the text that may begin a marker."""
        if self._has_ended:
            return 0
        num_there = len(self._text) - self._position
        for length in range(min(max(map(len, markers)) - 1, num_there), 0, -1):
            end = self._text[len(self._text) - length :]
            if any(marker.startswith(end) for marker in markers if len(marker) > length):
                return length
        return 0


class ScriptedParser:
    """A parser made from a script: a generator that reads a `Source` and consumes all text.

    White space between calls and after the last call is dropped.
    """

    def __init__(self, script: Callable[[Source], Steps[None]]) -> None:
        self._source = Source()
        self._steps = script(self._source)
        self._after_call = False  # whether only white space has arrived since the last call
        self._blanks: list[str] = []

    def push(self, text: str) -> Iterator[Part]:
        if text:
            self._source.feed(text)
            yield from self._run()

    def flush(self) -> Iterator[Part]:
        self._source.close_input()
        yield from self._run()

    def _run(self) -> Iterator[Part]:
        for step in self._steps:
            if isinstance(step, _More):
                return
            if not isinstance(step, str):
                self._after_call = isinstance(step, CallBegins | CallArguments)
                self._blanks.clear()
                yield step
            elif self._after_call and step.isspace():
                self._blanks.append(step)
            else:
                text = "".join([*self._blanks, step])
                self._blanks.clear()
                self._after_call = False
                yield text


def as_text(text: str) -> Part:
    """Return a text as a part of the answer's text."""
    return text


@functools.cache
def _any_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, markers)))


def rest_as_text(source: Source) -> Steps[None]:
    """Consume the rest of the output, and yield it as parts of the answer's text."""
    while text := (yield from source.chunk()):
        source.skip(len(text))
        yield text
