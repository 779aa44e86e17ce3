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
from collections.abc import Mapping
from typing import Any

from router.intake.parsers.base import CallArguments, CallBegins, ParserContext, Part, new_call_id
from router.intake.parsers.json_call import SPACE
from router.intake.parsers.source import ScriptedParser, Source, Steps, as_text

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION, _END_FUNCTION = "<function=", "</function>"
_PARAMETER, _END_PARAMETER = "<parameter=", "</parameter>"
_NAME = re.compile(r"[^<>\r\n]*")


class Qwen3Coder(ScriptedParser):
    """What a parameter's schema says is a string is one; the others are JSON, or else strings."""

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
                schema = context.tools.get(name.strip(), {})
                yield from _arguments(source, schema)
                if tag == OPEN:
                    yield from source.match(SPACE)
                    yield from source.take(CLOSE)

        super().__init__(script)


def _arguments(source: Source, schema: Mapping[str, Any]) -> Steps[None]:
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
        if _is_string(schema, name):
            yield CallArguments('"')
            yield from _value(source, _escaped)
            yield CallArguments('"')
        else:
            parts: list[str] = []

            def keep(text: str, parts: list[str] = parts) -> Part | None:
                parts.append(text)
                return None

            yield from _value(source, keep)
            yield CallArguments(_as_json("".join(parts)))
    yield CallArguments("{}" if sign == "{" else "}")


def _value(source: Source, take: Any) -> Steps[str]:
    return (yield from source.until((f"\n{_END_PARAMETER}", _END_PARAMETER), take))


def _escaped(text: str) -> Part:
    return CallArguments(json.dumps(text, ensure_ascii=False)[1:-1])


def _as_json(text: str) -> str:
    try:
        value = json.loads(text)
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
        written.encode()
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return written


def _is_string(schema: Mapping[str, Any], name: str) -> bool:
    properties = schema.get("properties")
    declared = properties.get(name) if isinstance(properties, Mapping) else None
    return isinstance(declared, Mapping) and declared.get("type") == "string"
