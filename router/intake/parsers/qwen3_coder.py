"""Qwen3-Coder: a call as tags, its arguments one by one.

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

from router.intake.answers.argument_types import ArgumentTypes
from router.intake.parsers.base import CallArguments, CallBegins, ParserContext, Part, new_call_id
from router.intake.parsers.json_call import SPACE
from router.intake.parsers.source import ScriptedParser, Source, Steps, as_text

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION, _END_FUNCTION = "<function=", "</function>"
_PARAMETER, _END_PARAMETER = "<parameter=", "</parameter>"
_DECIDED_CHARS = 64
_NAME = re.compile(r"[^<>\r\n]*")


class Qwen3Coder(ScriptedParser):
    """Gives each argument the type that the function's schema says, resolved."""

    def __init__(self, context: ParserContext) -> None:
        def script(source: Source) -> Steps[None]:
            while tag := (yield from source.until((OPEN, _FUNCTION), as_text)):
                read = tag
                if tag == OPEN:
                    read += yield from source.match(SPACE)
                    if not (yield from source.take(_FUNCTION)):
                        yield read
                        continue
                    read += _FUNCTION
                name = yield from source.match(_NAME)
                if not name.strip() or not (yield from source.take(">")):
                    yield read + name
                    continue
                yield CallBegins(name.strip(), new_call_id())
                types = ArgumentTypes(context.tools.get(name.strip(), {}))
                yield from _arguments(source, types)
                if tag == OPEN:
                    yield from source.match(SPACE)
                    yield from source.take(CLOSE)

        super().__init__(script)


def _arguments(source: Source, types: ArgumentTypes) -> Steps[None]:
    """Read parameters as a JSON object, up to the end of the function."""
    sign, ignore = "{", lambda text: None
    ends = (_PARAMETER, _END_FUNCTION, CLOSE)
    while (yield from source.until(ends, ignore)) == _PARAMETER:
        name = (yield from source.match(_NAME)).strip()
        if not (yield from source.take(">")):
            break
        yield CallArguments(f"{sign}{json.dumps(name, ensure_ascii=False)}: ")
        sign = ", "
        yield from source.take("\n")
        yield from _value(source, _Value(types, name))
    yield CallArguments("{}" if sign == "{" else "}")


def _value(source: Source, value: _Value) -> Steps[None]:
    yield from source.until((f"\n{_END_PARAMETER}", _END_PARAMETER), value.push)
    yield CallArguments(value.finish())


class _Value:
    """Writes one argument as JSON; a string as the string comes."""

    def __init__(self, types: ArgumentTypes, name: str) -> None:
        self._types = types
        self._name = name
        self._held: list[str] = []
        self._num_held = 0
        self._is_text = False

    def push(self, text: str) -> Part | None:
        """Take the next piece of the argument's text, and return what is certain of its JSON."""
        if self._is_text:
            return CallArguments(_escaped(text))
        self._held.append(text)
        self._num_held += len(text)
        # A text that is none in its first characters is none in the later ones.
        if self._num_held - len(text) > _DECIDED_CHARS:
            return None
        begun = "".join(self._held)
        if not self._types.is_text(self._name, begun):
            return None
        self._is_text = True
        return CallArguments('"' + _escaped(begun))

    def finish(self) -> str:
        """Return the rest of the argument's JSON."""
        if self._is_text:
            return '"'
        value = self._types.value_of(self._name, "".join(self._held))
        return json.dumps(value, ensure_ascii=False)


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
