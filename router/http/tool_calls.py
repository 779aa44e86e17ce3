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
        self._held = ""  # outside: what may become a tag
        self._inside = False
        self._parts: list[str] = []  # inside: the text so far,
        self._end = ""  # and its end, in which a tag may begin
        self._after_call = False  # nothing but blanks came since
        self._blanks: list[str] = []

    def push(self, text: str) -> Iterator[str | ParsedCall]:
        position = 0
        while True:
            # A tag may have begun in what came before.
            held, self._held, self._end = self._held or self._end, "", ""
            if held:
                text, position = held + text[position:], 0
            tag = CLOSE_TAG if self._inside else OPEN_TAG
            found_at = text.find(tag, position)
            if found_at < 0:
                break
            before, position = text[position:found_at], found_at + len(tag)
            if self._inside:
                yield from self._call(self._take(before))
            else:
                yield from self._text(before)
            self._inside = not self._inside
        if self._inside:
            certain = max(len(text) - len(CLOSE_TAG) + 1, position)
            self._parts.append(text[position:certain])
            self._end = text[certain:]
        else:
            certain = max(len(text) - _num_held(text), position)
            self._held = text[certain:]
            yield from self._text(text[position:certain])

    def finish(self) -> Iterator[str | ParsedCall]:
        if not self._inside:
            held, self._held = self._held, ""
            yield from self._text(held)
            return
        held = self._take(self._end)
        if (call := parse_call(held)) is not None:  # the model may end without its tag
            yield call
        else:
            yield from self._text(OPEN_TAG + held)

    def _take(self, last: str) -> str:
        """All the text between the tags."""
        text = "".join([*self._parts, last])
        self._parts.clear()
        self._end = ""
        return text

    def _text(self, text: str) -> Iterator[str]:
        if self._after_call and (not text or text.isspace()):
            self._blanks.append(text)
            return
        text = "".join([*self._blanks, text])
        self._blanks.clear()
        if text:
            self._after_call = False
            yield text

    def _call(self, text: str) -> Iterator[str | ParsedCall]:
        call = parse_call(text)
        if call is None:
            yield from self._text(f"{OPEN_TAG}{text}{CLOSE_TAG}")
            return
        self._after_call = True
        self._blanks.clear()
        yield call


class OneCall:
    """The whole output is one call without tags: a grammar saw to it."""

    def __init__(self) -> None:
        self._parts: list[str] = []

    def push(self, text: str) -> Iterator[str | ParsedCall]:
        self._parts.append(text)
        return iter(())

    def finish(self) -> Iterator[str | ParsedCall]:
        if held := "".join(self._parts):  # what was cut short is no call
            yield parse_call(held) or held


def parse_call(text: str) -> ParsedCall | None:
    """The call that a text describes; None if it does not."""
    try:
        call = json.loads(text)
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return None
        arguments = call.get("arguments", {})
        if not isinstance(arguments, dict):
            return None
        name, written = call["name"], json.dumps(arguments, ensure_ascii=False)
        (name + written).encode()  # half a surrogate pair can be sent to nobody
    except (ValueError, RecursionError):
        return None
    return ParsedCall(name, written)


def _num_held(text: str) -> int:
    """Length of the longest end of the text that the tag begins with."""
    for length in range(min(len(OPEN_TAG) - 1, len(text)), 0, -1):
        if text.endswith(OPEN_TAG[:length]):
            return length
    return 0
