"""Tool calls in a model's output, as the Hermes and Qwen families write them.

    I will look.<tool_call>
    {"name": "get_weather", "arguments": {"city": "Bonn"}}
    </tool_call>

What is between tags and is no call stays text: nothing that the model said is lost.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

OPEN_TAG = "<tool_call>"
CLOSE_TAG = "</tool_call>"


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A call of a function.

    Attributes:
        arguments: JSON of an object.
    """

    name: str
    arguments: str
    call_id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex}", compare=False)


class OutputParser(Protocol):
    """Divides an output that comes in pieces into text and calls, in their order."""

    def push(self, text: str) -> Iterator[str | ParsedCall]:
        """What is certain now: a tag's beginning is held back until it is whole or none."""
        ...

    def finish(self) -> Iterator[str | ParsedCall]:
        """The rest; the output is at its end."""
        ...


class PlainText:
    """For requests without tools: everything is text."""

    def push(self, text: str) -> Iterator[str | ParsedCall]:
        if text:
            yield text

    def finish(self) -> Iterator[str | ParsedCall]:
        return iter(())


class TaggedCalls:
    """Calls between tags, anywhere in the text; blanks between and behind calls are no text."""

    def __init__(self) -> None:
        self._held = ""
        self._inside = False
        self._after_call = False  # nothing but blanks came since
        self._blanks = ""

    def push(self, text: str) -> Iterator[str | ParsedCall]:
        self._held += text
        while True:
            tag = CLOSE_TAG if self._inside else OPEN_TAG
            before, found, after = self._held.partition(tag)
            if not found:
                break
            self._held = after
            yield from self._call(before) if self._inside else self._text(before)
            self._inside = not self._inside
        if not self._inside:
            certain = len(self._held) - _num_held(self._held)
            text, self._held = self._held[:certain], self._held[certain:]
            yield from self._text(text)

    def finish(self) -> Iterator[str | ParsedCall]:
        held, self._held = self._held, ""
        if not self._inside:
            yield from self._text(held)
        elif (call := parse_call(held)) is not None:  # the model may end without its tag
            yield call
        else:
            yield from self._text(OPEN_TAG + held)

    def _text(self, text: str) -> Iterator[str]:
        text = self._blanks + text
        self._blanks = ""
        if self._after_call and (not text or text.isspace()):
            self._blanks = text
        elif text:
            self._after_call = False
            yield text

    def _call(self, text: str) -> Iterator[str | ParsedCall]:
        call = parse_call(text)
        if call is None:
            yield from self._text(f"{OPEN_TAG}{text}{CLOSE_TAG}")
            return
        self._after_call, self._blanks = True, ""
        yield call


class OneCall:
    """The whole output is one call without tags: a grammar saw to it."""

    def __init__(self) -> None:
        self._held = ""

    def push(self, text: str) -> Iterator[str | ParsedCall]:
        self._held += text
        return iter(())

    def finish(self) -> Iterator[str | ParsedCall]:
        if self._held:  # what was cut short is no call
            yield parse_call(self._held) or self._held


def parse_call(text: str) -> ParsedCall | None:
    """The call that a text describes; None if it does not."""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return None
    return ParsedCall(call["name"], json.dumps(arguments, ensure_ascii=False))


def _num_held(text: str) -> int:
    """Length of the longest end of the text that the tag begins with."""
    for length in range(min(len(OPEN_TAG) - 1, len(text)), 0, -1):
        if text.endswith(OPEN_TAG[:length]):
            return length
    return 0
