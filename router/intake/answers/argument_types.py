"""Argument types: convert the texts of arguments in tagged calls to JSON values.

The function's JSON Schema decides the type. Schemas come from clients, so the work of reading a
schema is limited, and patterns in schemas are not matched here.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import unquote

# Maximum number of subschemas read for one argument; what remains counts as allowing anything.
MAX_SCHEMAS = 1_000
_MAX_DEPTH = 32
# Python's ``None`` is read too, because some families' templates show it.
_NULLS = ("null", "None")
_BOOLS = {"true": True, "false": False}
# Longer texts are not read as Python literals, because Python's reader is slow.
_MAX_LITERAL_CHARS = 10_000
_SAMPLES: tuple[Any, ...] = (None, True, 0, 0.5, {}, [])  # one value of each type except string
_NOT_THERE: Final = object()
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "object": (dict,),
    "array": (list,),
}


class ArgumentTypes:
    """The types of one function's arguments, by its JSON Schema.

    Args:
        schema: JSON Schema of the function's parameters.
    """

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._root = schema
        self._num_left = 0
        self._by_lists = True

    def is_text(self, name: str, begun: str) -> bool:
        """Return whether an argument can only be a string.

        Args:
            begun: the beginning of the argument's text.
        """
        schema = self._schema_of(name)
        if schema is None or not self._accepts_any(schema, "-"):
            return False
        # ``enum`` and ``const`` are ignored, because a sample hardly ever equals a listed value;
        # the types count.
        takes_null, *others = (
            self._accepts_any(schema, other, by_lists=False) for other in _SAMPLES
        )
        if any(others):
            return False
        if not takes_null:
            return True
        text = begun.lstrip()
        return bool(text) and not any(word.startswith(text.rstrip()) for word in _NULLS)

    def value_of(self, name: str, text: str) -> Any:
        """Return the JSON value that an argument's text stands for.

        If the schema allows several types, the first that the text fits is taken: null, boolean,
        number, object or array, string. A text that fits no type is passed on unchanged: the
        function may reject it.
        """
        schema = self._schema_of(name)
        if schema is None or all(self._accepts_any(schema, one) for one in ("-", *_SAMPLES)):
            return next(_readings(text, is_json=True))
        values = list(_readings(text))
        for by_lists in (True, False):
            for value in values:
                if self._accepts_any(schema, value, by_lists=by_lists):
                    whole = isinstance(value, float) and value.is_integer()
                    return int(value) if whole and not self._accepts_any(schema, 0.5) else value
        return values[0]

    def json_of(self, name: str, text: str) -> str:
        """Return the value that an argument's text stands for, as JSON; see `value_of`."""
        value = self.value_of(name, text)
        try:
            return json.dumps(value, ensure_ascii=False, allow_nan=False)
        except ValueError:
            return text.strip()  # the text is JSON with a number too large for a float

    def _schema_of(self, name: str) -> Any:
        self._num_left = MAX_SCHEMAS
        return self._property(self._root, name)

    def _accepts_any(self, schema: Any, value: Any, *, by_lists: bool = True) -> bool:
        """Return whether a schema accepts a value, by its types.

        Args:
            by_lists: whether to check ``enum`` and ``const``, too.
        """
        self._num_left = MAX_SCHEMAS
        self._by_lists = by_lists
        return self._accepts(schema, value)

    def _property(self, schema: Any, name: str, depth: int = 0) -> Any:
        """Return the schema of an argument; None if the schema says nothing about the argument."""
        if not isinstance(schema, Mapping) or self._is_too_far(depth):
            return None
        found = []
        properties, more = schema.get("properties"), schema.get("additionalProperties")
        if isinstance(properties, Mapping) and name in properties:
            found.append(properties[name])
        elif isinstance(more, Mapping) and more:
            found.append(more)
        if "$ref" in schema:
            found.append(self._property(self._target(schema["$ref"]), name, depth + 1))
        found.extend(self._property(part, name, depth + 1) for part in self._parts(schema, "allOf"))
        for keyword in ("anyOf", "oneOf"):
            ways = [self._property(way, name, depth + 1) for way in self._parts(schema, keyword)]
            ways = [way for way in ways if way is not None]
            found.append({"anyOf": ways} if ways else None)
        found = [one for one in found if one is not None]
        if not found:
            return None
        return found[0] if len(found) == 1 else {"allOf": found}

    def _accepts(self, schema: Any, value: Any, depth: int = 0) -> bool:
        if self._is_too_far(depth) or not isinstance(schema, Mapping):
            return schema is not False
        if value is None and schema.get("nullable") is True:  # a keyword of OpenAPI 3.0
            return True
        if not _has_type(schema.get("type"), value):
            return False
        if self._by_lists and not _is_listed(schema, value):
            return False
        if "$ref" in schema and not self._accepts(self._target(schema["$ref"]), value, depth + 1):
            return False
        if not all(self._accepts(part, value, depth + 1) for part in self._parts(schema, "allOf")):
            return False
        for keyword in ("anyOf", "oneOf"):
            ways = self._parts(schema, keyword)
            if ways and not any(self._accepts(way, value, depth + 1) for way in ways):
                return False
        return True

    def _parts(self, schema: Mapping[str, Any], keyword: str) -> list[Any]:
        found = schema.get(keyword)
        return found[: max(self._num_left, 0)] if isinstance(found, list) else []

    def _is_too_far(self, depth: int) -> bool:
        self._num_left -= 1
        return self._num_left < 0 or depth > _MAX_DEPTH

    def _target(self, reference: object) -> Any:
        """Return the schema that a reference points to; True (allows anything) if there is none."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            return True
        found: Any = self._root
        for step in unquote(reference[1:]).split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list):
                found = found[int(key)] if key in map(str, range(len(found))) else True
            else:
                found = found.get(key, True) if isinstance(found, Mapping) else True
        return found


def _is_listed(schema: Mapping[str, Any], value: object) -> bool:
    if "const" in schema and not _equal(schema["const"], value):
        return False
    listed = schema.get("enum")
    return not isinstance(listed, list) or any(_equal(one, value) for one in listed)


def _has_type(declared: object, value: object) -> bool:
    names = declared if isinstance(declared, list) else [declared]
    kinds = [_TYPES[name] for name in names if isinstance(name, str) and name in _TYPES]
    if not kinds:
        return True
    if isinstance(value, bool):
        return (bool,) in kinds
    if isinstance(value, float) and value.is_integer():
        return any(int in one or float in one for one in kinds)
    return any(isinstance(value, one) for one in kinds)


def _equal(one: object, other: object) -> bool:
    """Compare two values as JSON does, where true differs from 1."""
    return isinstance(one, bool) is isinstance(other, bool) and one == other


def _readings(text: str, *, is_json: bool = False) -> Iterator[Any]:
    """Yield the values that a text may stand for, the most specific first.

    Args:
        is_json: whether quotes delimit a JSON string; if not, quotes belong to the text.
    """
    plain = text.strip()
    if plain in _NULLS:
        yield None
    elif plain.lower() in _BOOLS:
        yield _BOOLS[plain.lower()]
    value = _json(plain)
    if value is _NOT_THERE and plain[:1] in ("{", "["):
        value = _literal(plain)
    is_there = value is not _NOT_THERE and not isinstance(value, bool | None)
    is_quoted = isinstance(value, str)
    if is_there and (is_json or not is_quoted):
        yield value
    yield text
    if is_there and is_quoted:
        yield value


def is_json(text: str) -> bool:
    """Return whether a text is JSON; its numbers may be too large for a float."""
    return _json(text) is not _NOT_THERE


def _json(text: str) -> Any:
    """Return the value of a JSON text, or `_NOT_THERE` if the text is not JSON.

    Numbers too large for a float become infinite.
    """
    try:
        value = json.loads(text, parse_constant=_refuse)
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return _NOT_THERE
    return value


def _refuse(name: str) -> None:
    raise ValueError(f"JSON has no {name}")


def _literal(text: str) -> Any:
    """Return the object or list that a text in Python's notation stands for, or `_NOT_THERE`."""
    if len(text) > _MAX_LITERAL_CHARS:
        return _NOT_THERE
    try:
        value = ast.literal_eval(text)
        return _json(json.dumps(value, allow_nan=False))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return _NOT_THERE
