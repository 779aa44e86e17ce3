"""Schema repairs: close gaps through which the grammar library would let wrong outputs pass.

* A class of characters that contains control characters but not ``"`` or ``\\`` (such as
  ``[^"]``) also matches the escaped form of the excluded ones. It is narrowed to match no
  control characters.
* With open names, a name may come twice, and ``minProperties`` would count it twice. Such
  a schema is refused.
"""

from __future__ import annotations

import functools
import json
import re
from typing import Any

from baton.api.errors import InvalidRequestError
from baton.text.schema_rewrites import rewritten

_OF_NAMES = ("properties", "$defs", "definitions", "dependentSchemas")
_VALUES = ("enum", "const", "default", "examples")
# Class syntax that Python's `re` reads differently than the library.
_ANOTHER_SYNTAX = re.compile(r"\[|&&|--|~~|\\[pPhHuxQ]")
_PROPERTY = re.compile(r"\\[pP](?:\{[^}]*\}|.)")
_CONTROL = "".join(map(chr, range(0x20)))


def enforceable_schema(text: str) -> str:
    """Narrow a JSON Schema to what can be enforced; raises InvalidRequestError if nothing can."""
    root = json.loads(text)
    try:
        found = _repair(root, root)
    except (TypeError, AttributeError) as error:  # a keyword has a value of a wrong type
        problem = f"is no JSON schema: {error}"
        raise InvalidRequestError("structured_output.json_schema", problem) from None
    if found is False:
        raise InvalidRequestError("structured_output.json_schema", "no output can match it")
    return json.dumps(found, separators=(",", ":"))


def _repair(schema: Any, root: Any) -> Any:
    if isinstance(schema, list):
        return [_repair(one, root) for one in schema]
    if not isinstance(schema, dict):
        return schema
    schema = rewritten(schema, root)
    if isinstance(schema, bool):
        return schema
    _check_min_properties(schema)
    return {key: _repair_value(key, value, root) for key, value in schema.items()}


def _repair_value(key: str, value: Any, root: Any) -> Any:
    if key in _VALUES:
        return value
    if key == "pattern" and isinstance(value, str):
        return repair_pattern(value)
    if key in _OF_NAMES and isinstance(value, dict):
        return {name: _repair(schema, root) for name, schema in value.items()}
    if key == "patternProperties" and isinstance(value, dict):
        return {repair_pattern(name): _repair(schema, root) for name, schema in value.items()}
    return _repair(value, root)


def _check_min_properties(schema: dict[str, Any]) -> None:
    wanted = schema.get("minProperties")
    if not isinstance(wanted, int | float) or schema.get("type", "object") != "object":
        return
    is_open = schema.get("additionalProperties") is not False or schema.get("patternProperties")
    properties, required = schema.get("properties"), schema.get("required")
    num_certain = 1  # the first of the other names, if any, is unique
    if isinstance(properties, dict) and isinstance(required, list):
        num_certain += sum(isinstance(name, str) and name in properties for name in required)
    if is_open and wanted > num_certain:
        raise InvalidRequestError(
            "structured_output.json_schema",
            f"minProperties: {wanted} cannot be enforced where names are open, as one may come "
            "twice: list them in properties, with additionalProperties: false and without "
            "patternProperties",
        )


def repair_pattern(pattern: str) -> str:
    """Narrow a regex's classes so that they match no escapes of excluded characters."""
    parts: list[str] = []
    position = 0
    while position < len(pattern):
        end = position + 1
        if pattern[position] == "\\":
            found = _PROPERTY.match(pattern, position)
            end = found.end() if found else position + 2
            part = pattern[position:end]
            parts.append(_narrowed(f"[{part}]") if found else part)
        elif pattern[position] == "[":
            end = end_of_class(pattern, position)
            part = pattern[position:end]
            parts.append(_narrowed(part) if _may_leak(part) else part)
        else:
            parts.append(pattern[position])
        position = end
    return "".join(parts)


def _narrowed(one: str) -> str:
    return rf"[{one}&&[^\x00-\x1F]]"


def end_of_class(pattern: str, start: int) -> int:
    """Return the end of a class, after its closing bracket; classes may be nested."""
    depth, position = 0, start
    while position < len(pattern):
        sign = pattern[position]
        if sign == "\\":
            position += 1
        elif sign == "[":
            depth += 1
            if pattern[position + 1 : position + 2] == "^":
                position += 1
            if pattern[position + 1 : position + 2] == "]":  # a first bracket is a character
                position += 1
        elif sign == "]":
            depth -= 1
            if not depth:
                return position + 1
        position += 1
    return len(pattern)


@functools.lru_cache(maxsize=1024)
def _may_leak(one: str) -> bool:
    """Return whether a class matches control characters but not both characters with escapes."""
    if _ANOTHER_SYNTAX.search(one, 1):
        return True
    try:
        matches = re.compile(one).match
    except re.error:
        return True
    if matches('"') and matches("\\"):
        return False
    # A few listed ones, as in `[a-z
    # ]`, do no harm.
    return any(map(matches, _CONTROL)) and matches("\x7f") is not None
