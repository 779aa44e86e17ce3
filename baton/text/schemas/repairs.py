"""Schema repairs: close gaps through which the grammar library would let wrong outputs pass.

* A regex's character class that contains control characters but not ``"`` or not ``\\``, such as
  ``[^"]``, also matches the JSON escape of the excluded character. The class is narrowed so that it
  does not match control characters.
* If an object may have any names, a name may occur twice, and ``minProperties`` would count the
  name twice. A schema with ``minProperties`` and any names is refused.
* A keyword that neither the library nor a rewriting enforces is refused, with its place.
"""

from __future__ import annotations

import functools
import json
import re
from typing import Any

from baton.api.errors import InvalidRequestError
from baton.text.schemas.conditions import said_beside
from baton.text.schemas.lists import MAX_LISTED, MAX_PLACES
from baton.text.schemas.references import ANNOTATIONS
from baton.text.schemas.rewrites import rewritten

_OF_NAMES = ("properties", "$defs", "definitions", "dependentSchemas")
_OF_THE_SAME = ("allOf", "anyOf", "oneOf")  # keywords whose schemas apply to the same value
_VALUES = ("enum", "const")
# Keywords that limit values but are only enforced if they can be rewritten, each with advice for
# the error text.
_UNENFORCED = {
    "uniqueItems": f": list at most {MAX_LISTED} values in enum, or leave maxItems at 1",
    "contains": f": give type array, and items as a schema; of maxItems, {MAX_PLACES} are tried",
    "minContains": "",
    "maxContains": "",
    "if": ": write alternatives with anyOf",
    "not": ": write alternatives with anyOf",
    "dependentRequired": ": give type object",
    "dependentSchemas": ": give type object",
    "dependencies": ": give type object",
    "propertyNames": ": list the names in properties, or give patternProperties",
    "unevaluatedItems": ": use items",
    "unevaluatedProperties": ": use additionalProperties",
    "$dynamicRef": ": use $ref",
    "$recursiveRef": ": use $ref",
}
_MAX_WRITTEN = 5_000  # maximum number of schemas and listed values that rewriting may add
_MAX_PATH_CHARS = 200
# Syntax in character classes that Python's `re` and llguidance read differently.
_ANOTHER_SYNTAX = re.compile(r"\[|&&|--|~~|\\[pPhHuxQ]")
_PROPERTY = re.compile(r"\\[pP](?:\{[^}]*\}|.)")
_CONTROL = "".join(map(chr, range(0x20)))


def enforceable_schema(text: str) -> str:
    """Return a JSON Schema that the library can enforce, and that accepts at most the same values.

    Raises:
        InvalidRequestError: a keyword cannot be enforced, or the text is no JSON Schema.
    """
    root = json.loads(text)
    try:
        found = _Repairs(root).repaired(root, "#")
    except (TypeError, AttributeError, ValueError, KeyError) as error:
        if isinstance(error, InvalidRequestError):
            raise
        # A keyword of the schema has a value of a wrong type.
        raise _invalid(f"is not a JSON schema: {error}") from None
    if found is False:
        raise _invalid("no output can match it")
    return json.dumps(found, separators=(",", ":"))


def _invalid(problem: str) -> InvalidRequestError:
    return InvalidRequestError("structured_output.json_schema", problem)


class _Repairs:
    """Repair of a JSON schema and of all schemas inside it.

    Args:
        root: the whole schema.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._num_left = _size_of(root) + _MAX_WRITTEN

    def repaired(self, schema: Any, path: str, beside: Any = None) -> Any:
        """Return a schema that the library can enforce; raises InvalidRequestError.

        Args:
            path: place of the schema in the whole schema, in the form of a `$ref`.
            beside: types and properties that enclosing schemas require of the same value.
        """
        self._num_left -= 1
        if self._num_left < 0:
            raise _invalid(f"has more than {_MAX_WRITTEN} parts, with conditions and lists")
        if isinstance(schema, list):
            return [
                self.repaired(one, f"{path}/{index}", beside) for index, one in enumerate(schema)
            ]
        if not isinstance(schema, dict):
            return schema
        schema = rewritten(schema, self._root, beside)
        if isinstance(schema, bool):
            return schema
        if isinstance(schema.get("enum"), list):
            self._num_left -= len(schema["enum"])
        for keyword, hint in _UNENFORCED.items():
            if keyword in schema:
                raise _invalid(f"{keyword} at {path[:_MAX_PATH_CHARS]} cannot be enforced{hint}")
        _check_min_properties(schema)
        inner = said_beside(schema, beside or {})
        return {
            key: self._value(key, value, f"{path}/{key}", inner)
            for key, value in schema.items()
            # Annotations are dropped, because they may make up most of a schema
            if key not in ANNOTATIONS
        }

    def _value(self, key: str, value: Any, path: str, beside: Any) -> Any:
        if key in _VALUES:
            return value
        if key == "pattern" and isinstance(value, str):
            return repair_pattern(value)
        if key in _OF_NAMES and isinstance(value, dict):
            return {name: self.repaired(one, f"{path}/{name}") for name, one in value.items()}
        # OpenAPI keeps definitions in "components"
        if key == "components" and isinstance(value, dict):
            return {
                kind: self._value("$defs", ones, f"{path}/{kind}", None)
                for kind, ones in value.items()
            }
        if key == "patternProperties" and isinstance(value, dict):
            return {
                repair_pattern(name): self.repaired(one, f"{path}/{name}")
                for name, one in value.items()
            }
        return self.repaired(value, path, beside if key in _OF_THE_SAME else None)


def _size_of(value: Any) -> int:
    """Return the number of mappings, lists and list items in a value."""
    if isinstance(value, list):
        return 1 + len(value) + sum(map(_size_of, value))
    return 1 + sum(map(_size_of, value.values())) if isinstance(value, dict) else 0


def _check_min_properties(schema: dict[str, Any]) -> None:
    wanted = schema.get("minProperties")
    if not isinstance(wanted, int | float) or schema.get("type", "object") != "object":
        return
    is_open = schema.get("additionalProperties") is not False or schema.get("patternProperties")
    properties, required = schema.get("properties"), schema.get("required")
    num_certain = 1  # the first name of an object cannot be a repetition
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
    """Narrow a regex's character classes: they must not match escapes of excluded characters."""
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
    """Return the position after the closing bracket of a class, which may contain classes."""
    depth, position = 0, start
    while position < len(pattern):
        sign = pattern[position]
        if sign == "\\":
            position += 1
        elif sign == "[":
            depth += 1
            if pattern[position + 1 : position + 2] == "^":
                position += 1
            # A "]" at the beginning of a class is a character of the class.
            if pattern[position + 1 : position + 2] == "]":
                position += 1
        elif sign == "]":
            depth -= 1
            if not depth:
                return position + 1
        position += 1
    return len(pattern)


@functools.lru_cache(maxsize=1024)
def _may_leak(one: str) -> bool:
    """Return whether a character class may match the escape of a character that it excludes.

    A class may do so if it excludes ``"`` or the backslash, but matches DEL and another control
    character. Returns True, too, for a class that `re` cannot compile or reads differently from
    llguidance.
    """
    if _ANOTHER_SYNTAX.search(one, 1):
        return True
    try:
        matches = re.compile(one).match
    except re.error:
        return True
    if matches('"') and matches("\\"):
        return False
    # A class that does not match DEL, such as `[a-z\n]`, lists only a few control characters and
    # needs no repair.
    return any(map(matches, _CONTROL)) and matches("\x7f") is not None
