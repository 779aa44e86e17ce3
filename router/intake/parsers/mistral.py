"""Mistral: ``[TOOL_CALLS]`` and a list of calls, or (since 2025) a name and its arguments each.

[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}, ...]
[TOOL_CALLS]f{"x": 1}[TOOL_CALLS]g[ARGS]{}
"""

from __future__ import annotations

import re
import uuid

from router.intake.parsers.base import CallArguments, CallBegins, ParserContext
from router.intake.parsers.json_call import NO_ARGUMENTS, SPACE, call_steps, value_steps
from router.intake.parsers.source import ScriptedParser, Source, Steps, as_text, rest_as_text

TAG, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_NAME = re.compile(r"[\w.\-]*")
_COMMA = re.compile(r"[ \t\r\n,]*")


def _new_id() -> str:
    return uuid.uuid4().hex[:9]


class Mistral(ScriptedParser):
    """Calls behind their tag; ids as its templates want them: nine letters or digits."""

    special_tokens = (TAG, CALL_ID, ARGS)
    make_id = staticmethod(_new_id)

    def __init__(self, context: ParserContext) -> None:
        super().__init__(_script)


def _script(source: Source) -> Steps[None]:
    while (yield from source.until((TAG,), as_text)):
        read = yield from source.match(SPACE)
        if (yield from source.take("[")):
            no_call = yield from _list(source, read + "[")
        else:
            no_call = yield from _named(source, read)
        if no_call is not None:
            yield TAG + no_call
    yield from rest_as_text(source)


def _list(source: Source, read: str) -> Steps[str | None]:
    """Calls of a list; returns what was read when not even the first one is a call."""
    is_first = True
    while True:
        read += yield from source.match(_COMMA)
        if (yield from source.take("]")):
            return f"{read}]" if is_first else None
        if (yield from source.peek()) != "{":
            return read if is_first else None
        no_call = yield from call_steps(source, make_id=_new_id)
        if no_call is not None:
            if is_first:
                return read + no_call
            yield no_call
            return None
        is_first, read = False, ""


def _named(source: Source, read: str) -> Steps[str | None]:
    name = yield from source.match(_NAME)
    read += name
    tag_before = ""
    for tag in (CALL_ID, ARGS):
        if (yield from source.take(tag)):
            read, tag_before = read + tag, tag
            if tag == CALL_ID:
                read += yield from source.match(_NAME)
    read += yield from source.match(SPACE)
    if name and tag_before == ARGS and (yield from source.take("null")):
        yield CallBegins(name, _new_id())
        yield CallArguments(NO_ARGUMENTS)
        return None
    if not name or (yield from source.peek()) != "{":
        return read
    yield CallBegins(name, _new_id())
    yield from value_steps(source, CallArguments)
    return None
