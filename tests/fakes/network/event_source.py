"""EventSourceReader: server-sent events as a browser reads them, from bytes cut anywhere.

By https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass
class EventSourceReader:
    """Feed it bytes; it gives the data of each event that is complete."""

    _decode: codecs.IncrementalDecoder = field(
        default_factory=codecs.getincrementaldecoder("utf-8-sig")
    )
    _text: str = ""
    _data: list[str] = field(default_factory=list)

    def push(self, data: bytes) -> Iterator[str]:
        self._text += self._decode.decode(data)
        # A line ends with CRLF, LF or CR; a CR at the end may be the half of a CRLF.
        held = self._text.endswith("\r")
        text = (self._text[:-1] if held else self._text).replace("\r\n", "\n").replace("\r", "\n")
        *lines, rest = text.split("\n")
        self._text = rest + ("\r" if held else "")
        for line in lines:
            yield from self._line(line)

    def _line(self, line: str) -> Iterator[str]:
        if not line:
            if self._data:
                yield "\n".join(self._data)
            self._data = []
            return
        name, _, value = line.partition(":")  # a comment is a field without a name
        if name == "data":
            self._data.append(value.removeprefix(" "))


def typed_events(text: str) -> list[dict[str, Any]]:
    """Return the JSON of a whole stream's events; each event has its type for its name."""
    events = []
    for block in text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events
