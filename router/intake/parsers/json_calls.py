"""Calls as JSON objects, either between marks anywhere in a text or as the whole output.

I will look.<tool_call>
{"name": "get_weather", "arguments": {"city": "Bonn"}}
</tool_call>
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from router.intake.parsers.base import MakeId, OutputParser, ParserContext
from router.intake.parsers.json_call import BEHIND, SPACE, call_steps, list_steps
from router.intake.parsers.source import (
    ScriptedParser,
    Source,
    Steps,
    as_text,
    rest_as_text,
)

_BETWEEN = re.compile(r"[ \t\r\n;,]*")
Block = Callable[[Source], Steps[str | None]]
"""Function that reads calls after a mark; returns the consumed text if there is no call."""


@dataclass(frozen=True, slots=True)
class JsonForm:
    """Calls in JSON between marks, anywhere in a text; if no call follows a mark, the mark is text.

    Attributes:
        opens: marks that may begin calls; grammars use the first one.
        close: mark that ends calls; empty: none.
        is_list: whether grammars put all calls into a list after one mark; parsers accept single
            calls, too.
    """

    opens: tuple[str, ...]
    close: str
    is_list: bool = False

    @property
    def special_tokens(self) -> tuple[str, ...]:
        return (*self.opens, *filter(None, (self.close,)))

    @property
    def begins(self) -> tuple[str, ...]:
        return self.opens

    def make_parser(self, context: ParserContext, make_id: MakeId) -> OutputParser:
        """Make a parser of calls anywhere in a text."""

        def block(source: Source) -> Steps[str | None]:
            read = yield from source.match(SPACE)
            if (yield from source.consume("[")):
                return (yield from list_steps(source, read + "[", make_id=make_id))
            no_call = yield from call_steps(source, make_id=make_id)
            if no_call is not None:
                return read + no_call
            yield from source.match(BEHIND)
            return None

        return ScriptedParser(lambda source: marked_steps(source, self.opens, self.close, block))


@dataclass(frozen=True, slots=True)
class BareJsonForm:
    """Calls in JSON as the whole output, separated by semicolons, perhaps after a mark.

    Only calls of offered functions count; other JSON is text.
    """

    tag: str

    @property
    def special_tokens(self) -> tuple[str, ...]:
        return (self.tag,)

    @property
    def begins(self) -> tuple[str, ...]:
        return ()

    def make_parser(self, context: ParserContext, make_id: MakeId) -> OutputParser:
        """Make a parser of an output that is only calls, or only text."""
        names = frozenset(context.tools)

        def script(source: Source) -> Steps[None]:
            blanks = yield from source.match(SPACE)
            if (yield from source.consume(self.tag)):
                blanks = yield from source.match(SPACE)
            before = blanks
            while (yield from source.peek()) == "{":
                no_call = yield from call_steps(source, names=names, make_id=make_id)
                if no_call is not None:
                    yield before + no_call
                    before = ""
                    break
                before = yield from source.match(_BETWEEN)
            if before:
                yield before
            yield from rest_as_text(source)

        return ScriptedParser(script)


def marked_steps(source: Source, opens: tuple[str, ...], close: str, block: Block) -> Steps[None]:
    """Read calls between marks, anywhere in a text.

    Args:
        opens: marks that begin calls.
        close: mark that ends calls; empty: none.
        block: reads the calls after a mark.
    """
    ends = (close, *opens) if close else opens
    tag = yield from source.until(opens, as_text)
    while tag:
        no_call = yield from block(source)
        if no_call is not None:
            yield tag + no_call
        tag = yield from source.until(ends, as_text)
        if tag and tag == close:  # models sometimes leave the closing mark out
            if no_call is not None:
                yield close
            tag = yield from source.until(opens, as_text)
