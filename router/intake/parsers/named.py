"""Calls as function name and JSON arguments between marks, in DeepSeek's and Kimi's form.

<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Bonn"}<｜tool▁call▁end｜>
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from router.intake.parsers.base import (
    CallArguments,
    CallBegins,
    MakeId,
    OutputParser,
    ParserContext,
)
from router.intake.parsers.json_call import (
    BEHIND,
    NO_ARGUMENTS,
    SPACE,
    is_nothing,
    value_steps,
)
from router.intake.parsers.source import ScriptedParser, Source, Steps, as_text

_NAME = re.compile(r"[\w.:\-]*")
_NUMBERED = re.compile(r"(.+):[0-9]+")
_FENCE = re.compile(r"[`a-z \t\r\n}\]]*")


@dataclass(frozen=True, slots=True)
class NamedForm:
    """Marks of calls that have the function's name outside of the JSON.

    Attributes:
        all_open, all_close: enclose all calls of an output.
        open, close: enclose one call.
        separator: mark between name and arguments.
        is_fenced: whether the name may follow the separator, with the arguments in a code block.
        prefix: text before the name; if there is one, ``:`` and the call's number follow the
            name.
    """

    all_open: str
    all_close: str
    open: str
    separator: str
    close: str
    is_fenced: bool = False
    prefix: str = ""

    @property
    def special_tokens(self) -> tuple[str, ...]:
        return (self.all_open, self.all_close, self.open, self.separator, self.close)

    @property
    def begins(self) -> tuple[str, ...]:
        return (self.all_open,)

    def make_parser(self, context: ParserContext, make_id: MakeId) -> OutputParser:
        """Make a parser of one output.

        A call counts once its name and the ``{`` of its arguments were read.
        """
        return ScriptedParser(_Reader(self, make_id).steps)


class _Reader:
    def __init__(self, form: NamedForm, make_id: MakeId) -> None:
        self._form = form
        self._make_id = make_id

    def steps(self, source: Source) -> Steps[None]:
        form = self._form
        while tag := (yield from source.until((form.all_open, form.all_close, form.open), as_text)):
            if tag != form.open:
                continue
            no_call = yield from self._call(source)
            if no_call is not None:
                yield form.open + no_call

    def _call(self, source: Source) -> Steps[str | None]:
        """Read a call and return None; if it is no call, return the text that was consumed."""
        form = self._form
        name = yield from source.match(_NAME)
        read = name + (yield from source.match(SPACE))
        if not (yield from source.consume(form.separator)):
            return read
        read += form.separator + (yield from source.match(SPACE))
        if (yield from source.peek()) != "{":
            word = yield from source.match(_NAME)
            read += word + (yield from source.match(_FENCE if form.is_fenced else SPACE))
            inner = word if form.is_fenced else ""
            called = name if is_nothing(word) else inner
            if called and (yield from source.consume(form.close)):
                yield self._begin(called)
                yield CallArguments(NO_ARGUMENTS)
                return None
            name = inner
        if not name or (yield from source.peek()) != "{":
            return read
        yield self._begin(name)
        yield from value_steps(source, CallArguments)
        yield from source.match(_FENCE if form.is_fenced else BEHIND)
        yield from source.consume(form.close)
        return None

    def _begin(self, written: str) -> CallBegins:
        """Begin a call; keep an id that the model wrote, because the model refers to it later."""
        if not self._form.prefix:
            return CallBegins(written, self._make_id(written))
        name = written.removeprefix(self._form.prefix)
        numbered = _NUMBERED.fullmatch(name)
        name = numbered[1] if numbered else name
        new_id = self._make_id(name)
        return CallBegins(name, written if numbered else new_id)
