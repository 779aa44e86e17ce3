"""Mistral's calls: one mark and a list, or (since 2025) mark, name and arguments per call.

[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}, ...]
[TOOL_CALLS]f{"x": 1}[TOOL_CALLS]g[ARGS]{}
"""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass

from router.intake.parsers.base import (
    CallArguments,
    CallBegins,
    MakeId,
    OutputParser,
    ParserContext,
)
from router.intake.parsers.json_call import NO_ARGUMENTS, SPACE, list_steps, value_steps
from router.intake.parsers.source import ScriptedParser, Source, Steps, as_text

TAG, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_NAME = re.compile(r"[\w.\-]*")


def new_short_id(name: str = "", number: int = 0) -> str:
    """Return a random call id of nine letters or digits, as Mistral's templates require."""
    return uuid.uuid4().hex[:9]


@dataclass(frozen=True, slots=True)
class MistralForm:
    """Calls in both of Mistral's forms, after their mark."""

    special_tokens: tuple[str, ...] = (TAG, CALL_ID, ARGS)
    begins: tuple[str, ...] = (TAG,)

    def make_parser(self, context: ParserContext, make_id: MakeId) -> OutputParser:
        """Make a parser of calls anywhere in a text."""

        def script(source: Source) -> Steps[None]:
            while (yield from source.until((TAG,), as_text)):
                read = yield from source.match(SPACE)
                if (yield from source.consume("[")):
                    no_call = yield from list_steps(source, read + "[", make_id=make_id)
                else:
                    no_call = yield from _named(source, read, make_id)
                if no_call is not None:
                    yield TAG + no_call

        return ScriptedParser(script)


def _named(source: Source, read: str, make_id: MakeId) -> Steps[str | None]:
    name = yield from source.match(_NAME)
    read += name
    tag_before = ""
    for tag in (CALL_ID, ARGS):
        if (yield from source.consume(tag)):
            read, tag_before = read + tag, tag
            if tag == CALL_ID:
                read += yield from source.match(_NAME)
    read += yield from source.match(SPACE)
    if name and tag_before == ARGS and (yield from source.consume("null")):
        yield CallBegins(name, make_id(name))
        yield CallArguments(NO_ARGUMENTS)
        return None
    if not name or (yield from source.peek()) != "{":
        return read
    yield CallBegins(name, make_id(name))
    yield from value_steps(source, CallArguments)
    return None
