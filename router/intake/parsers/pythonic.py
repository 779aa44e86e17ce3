"""Llama 3.2 and 4: an output that is a list of calls in Python's words, ``[f(x=1), g(y="a")]``."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass

from router.intake.parsers.base import (
    CallArguments,
    CallBegins,
    MakeId,
    OutputParser,
    ParserContext,
)
from router.intake.parsers.json_call import SPACE
from router.intake.parsers.source import ScriptedParser, Source, Steps, rest_as_text

_NAME = re.compile(r"[\w.]*")
_PLAIN = re.compile(r"[^\"'\\()\[\]{},]*")
_WORDS = {"true": "true", "false": "false", "null": "null"}
_CLOSES = {")": "(", "]": "[", "}": "{"}


@dataclass(frozen=True, slots=True)
class PythonForm:
    """Marks of calls in Python's words.

    Attributes:
        open, close: marks that may be around an output that is a list of calls.
    """

    open: str
    close: str

    @property
    def special_tokens(self) -> tuple[str, ...]:
        return (self.open, self.close)

    @property
    def begins(self) -> tuple[str, ...]:
        return ()

    def make_parser(self, context: ParserContext, make_id: MakeId) -> OutputParser:
        """Make a parser; only functions that are offered are called: other lists are text."""
        names = frozenset(context.tools)

        def script(source: Source) -> Steps[None]:
            yield from source.take(self.open)
            read = yield from source.match(SPACE)
            if (yield from source.take("[")):
                read = yield from _calls(source, names, read + "[", make_id)
            yield from source.take(self.close)
            if read:
                yield read
            yield from rest_as_text(source)

        return ScriptedParser(script)


def _calls(source: Source, names: frozenset[str], read: str, make_id: MakeId) -> Steps[str]:
    """Read calls; returns what was consumed and is none."""
    is_first = True
    while True:
        read += yield from source.match(SPACE)
        name = yield from source.match(_NAME)
        read += name
        if name not in names or not (yield from source.take("(")):
            return read
        yield CallBegins(name, make_id(name))
        rest = yield from _arguments(source)
        if rest is not None:
            return rest
        is_first, read = False, ""
        yield from source.match(SPACE)
        if not (yield from source.take(",")):
            yield from source.take("]")
            return "" if not is_first else read


def _arguments(source: Source) -> Steps[str | None]:
    """Read ``x=1, y="a")`` as a JSON object; returns what was consumed and is no argument."""
    sign = "{"
    while True:
        yield from source.match(SPACE)
        if (yield from source.take(")")):
            yield CallArguments("{}" if sign == "{" else "}")
            return None
        name = yield from source.match(_NAME)
        yield from source.match(SPACE)
        if not name or not (yield from source.take("=")):
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
        yield from source.take(",")


def _value(source: Source) -> Steps[str]:
    """Consume text up to a comma or a parenthesis outside of strings and brackets."""
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
    """A literal of Python as JSON; None if it is none, or cannot be said in JSON."""
    text = text.strip()
    if text in _WORDS:
        return _WORDS[text]
    try:
        written = json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
        written.encode()
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None
    return written
