"""Unit tests of the format of events: what we write is what the reader of the standard reads.

The reader is `tests/fakes/network/event_source.py`: the standard's examples check it first.
"""

from __future__ import annotations

import json

import pytest

from baton.api.outputs import FinishReason
from tests.fakes.network.event_source import EventSourceReader
from tests.fakes.router.http_scene import HttpScene, on_http

pytestmark = pytest.mark.medium

EXAMPLES = [
    (b"data: YHOO\ndata: +2\ndata: 10\n\n", ["YHOO\n+2\n10"]),
    (b": test stream\n\ndata: first event\nid: 1\n\ndata:second event\nid\n\n",
     ["first event", "second event"]),
    (b"data:  third event\n\n", [" third event"]),
    (b"data\n\ndata\ndata\n\ndata:", ["", "\n"]),
    (b"data:test\n\ndata: test\n\n", ["test", "test"]),
    (b"data: a\r\n\r\ndata: b\r\rdata: c\n\n", ["a", "b", "c"]),
    ("\ufeffdata: größe €\n\n".encode(), ["größe €"]),
]  # fmt: skip


@pytest.mark.parametrize(("data", "expected"), EXAMPLES)
def test_the_reader_reads_the_standards_examples_wherever_they_are_cut(
    data: bytes, expected: list[str]
) -> None:
    for cut in range(len(data)):
        reader = EventSourceReader()
        assert [*reader.push(data[:cut]), *reader.push(data[cut:])] == expected
    reader = EventSourceReader()
    assert [event for i in range(len(data)) for event in reader.push(data[i : i + 1])] == expected


@on_http()
async def test_lines_in_a_text_do_not_break_events(scene: HttpScene) -> None:
    text = "one\n\ndata: [DONE]\r\n\r\u2028€ two"
    reply = scene.post(stream=True, max_tokens=100)
    scene.say(await scene.command(), 0, text, last=FinishReason.LENGTH)
    response = await reply
    *chunks, done = EventSourceReader().push(await response.read())
    assert done == "[DONE]"
    assert "".join(json.loads(chunk)["choices"][0]["text"] for chunk in chunks) == text
