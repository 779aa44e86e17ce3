"""Calls with each argument between tags: Qwen3-Coder's form and similar ones.

<tool_call>
<function=get_weather>
<parameter=city>
Bonn
</parameter>
</function>
</tool_call>
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from router.intake.answers.argument_types import ArgumentTypes
from router.intake.parsers.base import (
    CallArguments,
    CallBegins,
    MakeId,
    OutputParser,
    ParserContext,
    Part,
)
from router.intake.parsers.json_call import SPACE
from router.intake.parsers.source import ScriptedParser, Source, Steps, as_text

_DECIDED_CHARS = 64
_NAME = re.compile(r"[^<>\r\n]*")
_PLAIN_NAME = re.compile(r"[\w.:/\-]+")


@dataclass(frozen=True, slots=True)
class TaggedForm:
    """Marks of a call, in the order in which models write them; empty: the family lacks the mark.

    Attributes:
        open, close: enclose the call.
        function, name_end: enclose the function's name.
        key, key_end: enclose an argument's name.
        value, value_end: enclose an argument's value.
        end: follows the arguments.
        has_lines: whether a value stands on lines of its own; the line breaks around it do not
            belong to the value.
    """

    open: str
    close: str
    key: str
    key_end: str
    value_end: str
    function: str = ""
    name_end: str = ""
    value: str = ""
    end: str = ""
    has_lines: bool = False

    @property
    def special_tokens(self) -> tuple[str, ...]:
        arguments = (self.key, self.key_end, self.value, self.value_end, self.end)
        marks = (self.open, self.close, *arguments)
        return tuple(mark for mark in marks if mark[:1] == "<" and mark[-1:] == ">")

    @property
    def begins(self) -> tuple[str, ...]:
        return (self.open,)

    def make_parser(self, context: ParserContext, make_id: MakeId) -> OutputParser:
        """Make a parser of one output.

        The function's schema decides the type of each argument.
        """
        return ScriptedParser(_Reader(self, context, make_id).steps)


class _Reader:
    def __init__(self, form: TaggedForm, context: ParserContext, make_id: MakeId) -> None:
        self._form = form
        self._context = context
        self._make_id = make_id
        self._tags = tuple(filter(None, (form.open, form.function)))
        self._ends = tuple(filter(None, (form.key, form.end, form.close, *self._tags)))

    def steps(self, source: Source) -> Steps[None]:
        form = self._form
        tag = yield from source.until(self._tags, as_text)
        while tag:
            name = yield from self._name(source, tag)
            if not name:
                tag = yield from source.until(self._tags, as_text)
                continue
            yield CallBegins(name, self._make_id(name))
            ended = yield from self._arguments(source, ArgumentTypes(self._tools(name)))
            if ended == form.end and tag == form.open:
                yield from source.match(SPACE)
                yield from source.consume(form.close)
            # The model left the end mark out, so the next call begins here
            is_next = ended in self._tags
            tag = ended if is_next else (yield from source.until(self._tags, as_text))

    def _tools(self, name: str) -> dict[str, object]:
        return dict(self._context.tools.get(name, {}))

    def _name(self, source: Source, tag: str) -> Steps[str]:
        """Read a function's name; if there is none, yield the consumed text and return ""."""
        form, read = self._form, tag
        if tag == form.open:
            read += yield from source.match(SPACE)
            if not (yield from source.consume(form.function)):
                yield read
                return ""
            read += form.function
        name = yield from source.match(_NAME)
        read += name
        name = name.strip()
        if form.name_end:
            is_call = bool(name) and (yield from source.consume(form.name_end))
        else:
            read += yield from source.match(SPACE)
            is_call = bool(_PLAIN_NAME.fullmatch(name)) and (yield from self._goes_on(source))
        if not is_call:
            yield read
            return ""
        return name

    def _goes_on(self, source: Source) -> Steps[bool]:
        """Return whether an argument or the end of the call comes next."""
        if (yield from source.comes(self._form.key)):
            return True
        return (yield from source.comes(self._form.close))

    def _arguments(self, source: Source, types: ArgumentTypes) -> Steps[str]:
        """Read arguments and yield them as a JSON object; return the mark behind the arguments."""
        form, sign = self._form, "{"
        while (ended := (yield from source.until(self._ends, _nothing))) == form.key:
            name = (yield from source.match(_NAME)).strip()
            if not (yield from source.consume(form.key_end)):
                continue
            if form.value:
                yield from source.match(SPACE)
                if not (yield from source.consume(form.value)):
                    continue
            yield CallArguments(f"{sign}{json.dumps(name, ensure_ascii=False)}: ")
            sign = ", "
            yield from self._value(source, _Value(types, name))
        yield CallArguments("{}" if sign == "{" else "}")
        return ended

    def _value(self, source: Source, value: _Value) -> Steps[None]:
        ends: tuple[str, ...] = (self._form.value_end,)
        if self._form.has_lines:
            yield from source.consume("\n")
            ends = (f"\n{self._form.value_end}", self._form.value_end)
        yield from source.until(ends, value.push)
        yield CallArguments(value.rest())


def _nothing(text: str) -> None:
    """Drop the text between arguments, by returning no part for it."""


class _Value:
    """Converts the text of one argument to JSON; a string is passed on while it arrives."""

    def __init__(self, types: ArgumentTypes, name: str) -> None:
        self._types = types
        self._name = name
        self._held: list[str] = []
        self._num_held = 0
        self._is_text = False

    def push(self, text: str) -> Part | None:
        """Add a piece of the argument's text; return the JSON that is certain by now, or None."""
        if self._is_text:
            return CallArguments(_escaped(text))
        self._held.append(text)
        self._num_held += len(text)
        # If the first characters do not show that the value is a string, later characters will not,
        # either.
        if self._num_held - len(text) > _DECIDED_CHARS:
            return None
        begun = "".join(self._held)
        if not self._types.is_text(self._name, begun):
            return None
        self._is_text = True
        return CallArguments('"' + _escaped(begun))

    def rest(self) -> str:
        """Return the rest of the JSON when the argument's text is complete."""
        if self._is_text:
            return '"'
        return self._types.json_of(self._name, "".join(self._held))


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
