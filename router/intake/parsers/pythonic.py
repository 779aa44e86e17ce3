"""Reads calls in Python syntax: an output like ``[f(x=1), g(y="a")]``, or calls between marks."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass

from router.intake.answers.argument_types import is_json
from router.intake.parsers.base import (
    CallArguments,
    CallBegins,
    MakeId,
    OutputParser,
    ParserContext,
)
from router.intake.parsers.json_call import BEHIND, SPACE, list_steps
from router.intake.parsers.json_calls import marked_steps
from router.intake.parsers.source import ScriptedParser, Source, Steps, rest_as_text

_NAME = re.compile(r"[\w.]*")
_PLAIN = re.compile(r"[^\"'\\()\[\]{},]*")
_WORDS = {"true": "true", "false": "false", "null": "null"}
_ESCAPES = {0: "\\0", 10: "\\n", 13: "\\r"}
_CLOSES = {")": "(", "]": "[", "}": "{"}


@dataclass(frozen=True, slots=True)
class PythonForm:
    """Marks of calls in Python syntax.

    Attributes:
        open, close: enclose calls.
        is_marked: whether calls stand between marks, anywhere in a text. If not, the whole output
            is a list of calls, marks are optional, and only calls of offered functions count.
        is_list: whether calls form a list in brackets; if not, each call has its own line.
    """

    open: str
    close: str
    is_marked: bool = False
    is_list: bool = True

    @property
    def special_tokens(self) -> tuple[str, ...]:
        return (self.open, self.close)

    @property
    def begins(self) -> tuple[str, ...]:
        return (self.open,) if self.is_marked else ()

    def make_parser(self, context: ParserContext, make_id: MakeId) -> OutputParser:
        """Make a parser of one output; everything but calls is text."""
        names = None if self.is_marked else frozenset(context.tools)

        def block(source: Source) -> Steps[str | None]:
            read = yield from source.match(SPACE)
            if (yield from source.consume("[")):
                read += "[" + (yield from source.match(SPACE))
            # Calls in JSON, which some templates show to the model
            if (yield from source.peek()) == "{":
                return (yield from list_steps(source, read, make_id=make_id))
            no_call = yield from _calls(source, names, read, make_id)
            if no_call is None:
                yield from source.match(BEHIND)
            return no_call

        def script(source: Source) -> Steps[None]:
            yield from source.consume(self.open)
            read: str | None = yield from source.match(SPACE)
            if (yield from source.consume("[")):
                read = yield from _calls(source, names, f"{read}[", make_id)
            yield from source.consume(self.close)
            if read:
                yield read
            yield from rest_as_text(source)

        if not self.is_marked:
            return ScriptedParser(script)
        return ScriptedParser(lambda source: marked_steps(source, (self.open,), self.close, block))


def _calls(
    source: Source, names: frozenset[str] | None, read: str, make_id: MakeId
) -> Steps[str | None]:
    """Read calls and return None; if the text has no call, return the text that was consumed.

    Args:
        names: functions that may be called; None: any.
    """
    is_first = True
    while True:
        read += yield from source.match(SPACE)
        name = yield from source.match(_NAME)
        read += name
        is_name = bool(name) if names is None else name in names
        if not is_name or not (yield from source.consume("(")):
            break
        yield CallBegins(name, make_id(name))
        rest = yield from _arguments(source)
        if rest is not None:
            is_first, read = False, rest
            break
        is_first, read = False, ""
        yield from source.match(SPACE)
        if not (yield from source.consume(",")) and names is not None:
            yield from source.consume("]")
            return None
    if is_first:
        return read
    if read:
        yield read
    return None


def _arguments(source: Source) -> Steps[str | None]:
    """Read ``x=1, y="a")``, yield it as a JSON object, and return None.

    If a text is no argument, end the object and return this text.
    """
    sign = "{"
    while True:
        yield from source.match(SPACE)
        if (yield from source.consume(")")):
            yield CallArguments("{}" if sign == "{" else "}")
            return None
        name = yield from source.match(_NAME)
        yield from source.match(SPACE)
        if not name or not (yield from source.consume("=")):
            yield CallArguments("{}" if sign == "{" else "}")
            return name
        text = yield from _value(source)
        written = _as_json(text)
        if written is None:
            yield CallArguments("{}" if sign == "{" else "}")
            return f"{name}={text}"
        yield CallArguments(f"{sign}{json.dumps(name)}: {written}")
        sign = ", "
        yield from source.match(SPACE)
        yield from source.consume(",")


def _value(source: Source) -> Steps[str]:
    """Consume and return text up to a comma or parenthesis outside of strings and brackets."""
    parts: list[str] = []
    opened: list[str] = []
    quote = ""
    while True:
        parts.append((yield from source.match(_PLAIN)))
        sign = yield from source.peek()
        if not sign or (not quote and not opened and sign in ",)"):
            return "".join(parts)
        source.skip(1)
        parts.append(sign)
        if sign == "\\":
            parts.append((yield from source.peek()))
            source.skip(len(parts[-1]))
        elif quote:
            quote = "" if sign == quote else quote
        elif sign in "\"'":
            quote = sign
        elif sign in "([{":
            opened.append(sign)
        elif sign in _CLOSES and (not opened or opened.pop() != _CLOSES[sign]):
            return "".join(parts)


def _as_json(text: str) -> str | None:
    """Convert a Python or JSON literal to JSON; return None for another text."""
    text = text.strip()
    if text in _WORDS:
        return _WORDS[text]
    for read in (json.loads, ast.literal_eval, _read_lines):
        try:
            written = json.dumps(read(text), ensure_ascii=False, allow_nan=False)
            written.encode()
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            continue
        return written
    # The text is JSON with a number that is too large for a float
    return text if is_json(text) else None


def _read_lines(text: str) -> object:
    """Read a Python string with unescaped line breaks, which some templates show to the model."""
    return ast.literal_eval(text.translate(_ESCAPES))
