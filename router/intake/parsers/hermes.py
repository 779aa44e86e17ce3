"""Hermes and Qwen: a call as JSON between tags, anywhere in the text.

I will look.<tool_call>
{"name": "get_weather", "arguments": {"city": "Bonn"}}
</tool_call>
"""

from __future__ import annotations

import re

from router.intake.parsers.base import ParserContext
from router.intake.parsers.json_call import call_steps
from router.intake.parsers.source import ScriptedParser, Source, Steps, as_text

OPEN, CLOSE = "<tool_call>", "</tool_call>"
# Between the arguments of a call and its tag: what ends the call, and too much of it.
BEHIND = re.compile(r"[ \t\r\n}\]]*")


class Hermes(ScriptedParser):
    """What is between tags and is no call stays text, tags included."""

    def __init__(self, context: ParserContext) -> None:
        super().__init__(_script)


def _script(source: Source) -> Steps[None]:
    tag = yield from source.until((OPEN,), as_text)
    while tag:
        no_call = yield from call_steps(source)
        if no_call is not None:
            yield OPEN + no_call
        else:
            yield from source.match(BEHIND)
        tag = yield from source.until((CLOSE, OPEN), as_text)
        if tag == CLOSE:  # models forget it
            if no_call is not None:
                yield CLOSE
            tag = yield from source.until((OPEN,), as_text)
