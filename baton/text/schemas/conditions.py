"""Schema conditions: rewrites `if`, `not`, `dependentRequired` and others as alternatives.

if A then B else C  ->  anyOf: [A and B, not A and C]
not A               ->  anyOf: all other values

The grammar library knows alternatives but no negation. So a schema of the excluded values is
written, keyword by keyword: the other listed values, the numbers beyond a limit, a property that is
absent. A condition that cannot be written so stays in the schema, and the request is refused with
the condition's name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from baton.text.schemas.references import ANNOTATIONS, Schema, is_of, resolved

_TYPES = ("string", "integer", "number", "boolean", "null", "object", "array")
_TELLING = ("type", "const", "enum")
_MAX_EXCLUDED_CHARS = 1_000
_MAX_WAYS = 8
_MAX_DEPTH = 8
_MAX_SCHEMAS = 300  # maximum number of schemas per condition; references may repeat schemas
# Keyword with a limit -> the opposite keyword, what to add to the limit, and the types of values
# that both keywords limit.
_NUMBERS, _TEXTS, _LISTS = ("integer", "number"), ("string",), ("array",)
_OPPOSITES: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "minimum": ("exclusiveMaximum", 0, _NUMBERS),
    "maximum": ("exclusiveMinimum", 0, _NUMBERS),
    "exclusiveMinimum": ("maximum", 0, _NUMBERS),
    "exclusiveMaximum": ("minimum", 0, _NUMBERS),
    "minLength": ("maxLength", -1, _TEXTS),
    "maxLength": ("minLength", 1, _TEXTS),
    "minItems": ("maxItems", -1, _LISTS),
    "maxItems": ("minItems", 1, _LISTS),
}


class _UnknownOppositeError(Exception):
    """No schema can be written for the values that a schema excludes."""


def without_conditions(schema: Schema, root: Schema, beside: Schema) -> Schema:
    """Return the schema with its conditions written as alternatives, as far as possible.

    Args:
        root: the whole schema, into which `$ref`s point.
        beside: types and properties that enclosing schemas require of the same value.
    """
    found = _without_dependencies(schema)
    for rewrite in (_if, _not, _one_of):
        try:
            found = rewrite(found, _Opposites(root), said_beside(found, beside))
        except _UnknownOppositeError:
            continue
    return found


def said_beside(schema: Schema, beside: Schema) -> Schema:
    """Return the types and properties that two schemas of the same value require together."""
    found = {key: one[key] for one in (beside, schema) for key in _TELLING if key in one}
    properties = {**beside.get("properties", {}), **schema.get("properties", {})}
    return {**found, "properties": properties}


def _and(schema: Schema, ways: Sequence[Any]) -> Schema:
    """Return the schema with the added requirement that a value fits one of the alternatives."""
    if True in ways:
        return schema
    more = ways[0] if len(ways) == 1 else {"anyOf": list(ways)}
    return {**schema, "allOf": [*schema.get("allOf", ()), more if ways else False]}


def _all(*schemas: Any) -> Any:
    """Return one schema for the values that fit all given schemas."""
    told = [one for one in schemas if one not in (True, {})]
    return {"allOf": told} if len(told) > 1 else told[0] if told else True


def _without_dependencies(schema: Schema) -> Schema:
    """Replace a dependency by two alternatives: the property is absent, or its condition holds."""
    found, needs = dict(schema), list[tuple[str, Any]]()
    for keyword in ("dependencies", "dependentRequired", "dependentSchemas"):
        needs += found.pop(keyword, {}).items()
    for name, needed in needs:
        more = {"required": needed} if isinstance(needed, list) else needed
        present = _all({"required": [name]}, more)
        found = _and(found, [{"properties": {name: False}}, present])
    return found


def _if(schema: Schema, opposites: _Opposites, beside: Schema) -> Schema:
    found = dict(schema)
    then, otherwise = found.pop("then", True), found.pop("else", True)
    if "if" not in found:
        return found  # without "if", "then" and "else" have no effect
    condition = found.pop("if")
    ways = [_all(condition, then)]
    ways += [_all(one, otherwise) for one in opposites.of(condition, beside)]
    return _and(found, [way for way in ways if way is not False])


def _not(schema: Schema, opposites: _Opposites, beside: Schema) -> Schema:
    if "not" not in schema:
        return schema
    found = dict(schema)
    ways = opposites.of(found.pop("not"), beside)
    if "enum" in found and len(ways) == 1 and ways[0] is not True and set(ways[0]) == {"enum"}:
        # Both schemas list the allowed values, so the shorter list replaces the old list.
        return {**found, **ways[0]}
    return _and(found, ways)


def _one_of(schema: Schema, opposites: _Opposites, beside: Schema) -> Schema:
    """Rewrite oneOf as alternatives that exclude each other.

    Only alternatives that limit nothing but properties are rewritten.
    """
    ways = schema.get("oneOf")
    if not isinstance(ways, list) or not 1 < len(ways) <= _MAX_WAYS:
        return schema
    if not all(
        isinstance(way, Mapping) and set(way) - ANNOTATIONS <= {"required", "properties"}
        for way in ways
    ):
        return schema
    found = {key: value for key, value in schema.items() if key != "oneOf"}
    excluded = [opposites.of(way, beside) for way in ways]
    alone = []
    for index, way in enumerate(ways):
        others = [one for other, one in enumerate(excluded) if other != index]
        if all(others):
            alone.append(_all(way, *map(_any, others)))
    return _and(found, alone)


class _Opposites:
    """Writer of schemas for the values that other schemas exclude.

    Args:
        root: the whole schema, into which `$ref`s point.
    """

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._num_left = _MAX_SCHEMAS

    def of(self, schema: Any, beside: Any, depth: int = 0) -> list[Any]:
        """Return alternative schemas that together match all values that do not fit a schema.

        Args:
            beside: another schema that the values must fit.
            depth: number of schemas around this schema.

        Raises:
            _UnknownOppositeError: these values cannot be written as schemas.
        """
        self._num_left -= 1
        schema, beside = resolved(schema, self._root), resolved(beside, self._root)
        if schema in (True, {}):
            return []
        if schema is False:
            return [True]
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH or self._num_left < 0:
            raise _UnknownOppositeError
        beside = beside if isinstance(beside, Mapping) else {}
        ways = []
        for keyword, value in schema.items():
            if keyword not in ANNOTATIONS:
                ways += self._of_keyword(keyword, value, schema, beside, depth + 1)
        return [True] if True in ways else ways

    def _of_keyword(
        self, keyword: str, value: Any, schema: Mapping[str, Any], beside: Schema, depth: int
    ) -> list[Any]:
        types = _types_of(beside)
        if keyword in ("const", "enum"):
            return _unlisted([value] if keyword == "const" else value, beside)
        if keyword == "type":
            return _other_types(value, types)
        if keyword in _OPPOSITES:
            opposite, step, fitting = _OPPOSITES[keyword]
            if isinstance(value, bool):
                raise _UnknownOppositeError
            ways = [] if step < 0 and value <= 0 else [{opposite: value + step}]
            return _typed(ways, [kind for kind in types if kind in fitting])
        if keyword in ("required", "properties"):
            objects = ["object"] if "object" in types else []
            if keyword == "required":
                return _typed([{"properties": {name: False}} for name in value], objects)
            return _typed(self._of_properties(value, beside, depth), objects)
        if keyword == "not":
            return [value]
        if keyword == "anyOf":
            opposites = [self.of(way, beside, depth) for way in value]
            return [_all(*map(_any, opposites))] if all(opposites) else []
        if keyword == "allOf":
            return [one for way in value for one in self.of(way, beside, depth)]
        raise _UnknownOppositeError

    def _of_properties(self, properties: Any, beside: Schema, depth: int) -> list[Any]:
        """Return one alternative per property: objects in which this property does not fit."""
        declared = beside.get("properties", {})
        ways = []
        for name, one in properties.items():
            opposites = self.of(one, declared.get(name, {}), depth)
            if opposites:
                ways.append({"properties": {name: _any(opposites)}, "required": [name]})
        return ways


def _typed(ways: Sequence[Schema], types: Sequence[str]) -> list[Any]:
    """Limit alternatives to the types that a keyword checks; the keyword allows all other types."""
    return [{"type": list(types), **way} for way in ways] if types else []


def _any(ways: Sequence[Any]) -> Any:
    return ways[0] if len(ways) == 1 else {"anyOf": list(ways)}


def _types_of(schema: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the types that the keyword ``type`` of a schema allows."""
    kind = schema.get("type")
    if isinstance(kind, str):
        return (kind,)
    return tuple(kind) if isinstance(kind, list) else _TYPES


def _other_types(kind: Any, types: Sequence[str]) -> list[Any]:
    excluded = {kind} if isinstance(kind, str) else set(kind)
    if "integer" in excluded and "number" in types and "number" not in excluded:
        # JSON Schema has no type for numbers that are no integers.
        raise _UnknownOppositeError
    if "number" in excluded:
        excluded.add("integer")
    left = [one for one in types if one not in excluded]
    return [{"type": left}] if left else []


def _unlisted(values: Sequence[Any], beside: Mapping[str, Any]) -> list[Any]:
    """Return alternatives for all values that fit ``beside``, except the given values."""
    excluded = {_key(value) for value in values}
    if "const" in beside or "enum" in beside:
        listed = [beside["const"]] if "const" in beside else beside["enum"]
        left = [value for value in listed if _key(value) not in excluded]
        return [{"enum": left}] if left else []
    ways: list[Any] = []
    free = []
    for kind in _types_of(beside):
        found = [value for value in values if is_of(value, kind)]
        if not found:
            free.append(kind)
        elif kind == "string":
            ways.append({"type": kind, "pattern": _other_texts(found)})
        elif kind == "boolean":
            ways += [{"const": one} for one in (False, True) if one not in found]
        elif kind == "integer":
            ways += _other_integers(sorted(set(map(int, found))))
        elif kind != "null":
            raise _UnknownOppositeError
    if "number" in free and "integer" in free:
        free.remove("integer")
    return [*ways, {"type": free}] if free else ways


def _key(value: Any) -> str:
    """Return a text that is equal for values that JSON Schema counts as equal."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, sort_keys=True)


def _other_integers(values: Sequence[int]) -> list[Schema]:
    lows: list[int | None] = [None, *(value + 1 for value in values)]
    highs: list[int | None] = [*(value - 1 for value in values), None]
    ways = []
    for low, high in zip(lows, highs, strict=True):
        if low is None or high is None or low <= high:
            limits = {"minimum": low, "maximum": high}
            known = {key: value for key, value in limits.items() if value is not None}
            ways.append({"type": "integer", **known})
    return ways


def _other_texts(texts: Sequence[str]) -> str:
    """Return an anchored pattern that matches all texts except the given texts."""
    if sum(map(len, texts)) > _MAX_EXCLUDED_CHARS:
        raise _UnknownOppositeError
    return f"^{_behind(frozenset(texts))}$"


def _behind(texts: frozenset[str]) -> str:
    """Return a regex without anchors that matches all texts except the given texts."""
    firsts = sorted({text[0] for text in texts if text})
    if not firsts:
        return "(?s:.+)"
    others = "".join(map(re.escape, firsts))
    ways = [rf"[^{others}](?s:.*)"]
    for first in firsts:
        rest = frozenset(text[1:] for text in texts if text.startswith(first))
        ways.append(f"{re.escape(first)}{_behind(rest)}")
    return f"({'|'.join(ways)}){'' if '' in texts else '?'}"
