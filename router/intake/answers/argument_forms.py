"""Argument forms: write grammars for model families that write each argument separately.

<parameter=city>           weather(city="Bonn", days=3)
Bonn
</parameter>

A text between tags has no quotes or escapes, so the schema of a text becomes a regex of the plain
text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from baton.api.structured_output import MAX_TEXT_BYTES
from baton.text.schemas.repairs import end_of_class
from baton.text.schemas.rewrites import rewritten

_MAX_DEPTH = 16
_MAX_PARTS = 2  # number of members of allOf whose types are read
_MAX_SCHEMAS = 2_000  # maximum number of subschemas read per function
# Keywords of parameters that name arguments or constrain nothing.
_PLAIN = frozenset(
    {
        "type", "properties", "required", "additionalProperties", "$defs", "definitions", "title",
        "description", "$schema", "$id", "$comment", "default", "examples", "deprecated", "strict",
        "x-guidance", "components", "example", "externalDocs", "xml",
    }
)  # fmt: skip
_ANNOTATIONS = frozenset(
    {"title", "description", "$comment", "default", "examples", "deprecated", "readOnly",
     "writeOnly", "contentMediaType", "contentEncoding", "discriminator"}
)  # fmt: skip
# Keywords that constrain only values of types other than text.
_OF_OTHERS = frozenset(
    {
        "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "items",
        "prefixItems", "minItems", "maxItems", "uniqueItems", "properties", "required",
        "additionalProperties", "patternProperties", "minProperties", "maxProperties",
    }
)  # fmt: skip
_TEXT_KEYWORDS = (
    _ANNOTATIONS | _OF_OTHERS | {"type", "minLength", "maxLength", "pattern", "format", "allOf"}
)
_HEX = "[0-9a-fA-F]"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
# Format -> regex of texts; the regex accepts the format or a part of it.
_FORMATS = {
    "duration": "P([0-9]{1,9}W|[0-9]{1,9}D|([0-9]{1,9}D)?T([0-9]{1,9}H)?[0-9]{1,9}M)",
    "uuid": f"{_HEX}{{8}}(-{_HEX}{{4}}){{3}}-{_HEX}{{12}}",
    "hostname": rf"{_LABEL}(\.{_LABEL}){{0,2}}",
    "uri": r"[a-z][a-z0-9+.\-]*:[A-Za-z0-9\-._~:\/?#@!$&'()*+,;=]+",
    "ipv4": rf"({_BYTE}\.){{3}}{_BYTE}",
}
# Regex of texts that would be read as a value of another type, if the schema allows this type.
_OF_OTHER_TYPES = r"(?s:\s*([\[{\"0-9+\-.](?s:.*)|(?i:true|false|null|none)\s*)?)"
# Start of a non-capturing group, or of a group in which dots match newlines
_GROUP = re.compile(r"\?s?:")
_ESCAPE = re.compile(r"\\.")
_WORDS = {"null": "null", "boolean": "(true|false)"}
# Regex classes match only ASCII characters, as in JSON Schema
_CLASSES = {"d": "0-9", "w": "A-Za-z0-9_"}


class InexpressibleError(Exception):
    """Raised if a grammar in the family's form cannot express the schema's constraints."""


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a function.

    Attributes:
        name: the argument's name; empty: any name that the schema does not list.
        value: name of the grammar rule for the argument's value.
    """

    name: str
    value: str
    is_required: bool


class ValueForm(Protocol):
    """Writes the grammar of argument values, in the form of one family of models."""

    def json(self, rule: str) -> str:
        """Return the grammar of a JSON value; ``rule`` is the grammar rule of the JSON itself."""
        ...

    def text(self, conditions: Sequence[str]) -> str | None:
        """Return a terminal for texts that match all conditions.

        Returns None if the family writes texts as JSON, too.
        """
        ...

    def behind_text(self) -> str:
        """Return the grammar of what follows a text."""
        ...


class ArgumentRules:
    """Writes the grammar rules for one function's arguments.

    Args:
        schema: JSON Schema of the parameters.
        prefix: beginning of all rule names, which no other function may have.
        form: writes the grammar of a value in the family's form.
        json_rule: writes the grammar of a JSON value that fits a schema.

    Attributes:
        rules: the rules written so far, as text.
        names: the arguments that the schema lists.

    Raises:
        InexpressibleError: the grammar cannot express the schema.
    """

    def __init__(
        self,
        schema: Mapping[str, Any],
        prefix: str,
        form: ValueForm,
        json_rule: Callable[[Any], str],
    ) -> None:
        self.rules: list[str] = []
        self.names = list(schema.get("properties") or {})
        self._schema = dict(schema)
        self._prefix = prefix
        self._form = form
        self._json_rule = json_rule
        self._num_left = _MAX_SCHEMAS
        self._num_chars = 0

    def arguments(self) -> list[Argument]:
        """Write the rules; return the arguments in the schema's order.

        If other names are allowed, the last argument stands for them.
        """
        schema = self._schema
        if more := set(schema) - _PLAIN:
            raise InexpressibleError(f"{min(more)} is not enforced beside the properties")
        properties, required = schema.get("properties") or {}, schema.get("required") or ()
        others = schema.get("additionalProperties", True)
        if not isinstance(properties, Mapping) or set(required) - set(properties):
            raise InexpressibleError("required lists names that properties lacks")
        found = [
            Argument(name, self._value(f"{self._prefix}v{index}", one), name in required)
            for index, (name, one) in enumerate(properties.items())
            if one is not False
        ]
        if others is not False:
            found.append(Argument("", self._value(f"{self._prefix}v", others), False))
        return found

    def _value(self, rule: str, schema: Any) -> str:
        """Write the rule of a value, with all terminals that it needs; return the rule's name."""
        used = []
        for index, (kind, value) in enumerate(self._ways(schema)):
            if kind == "json":
                used.append(self._form.json(self._json_rule(self._whole(value))))
                continue
            terminal = f"{rule.upper()}_{index}"
            self.rules.append(f"{terminal}: {self._form.text(value)}")
            used.append(f"{terminal} {self._form.behind_text()}")
        if not used:
            raise InexpressibleError("no argument can match it")
        self.rules.append(f"{rule}: {' | '.join(used)}")
        self._num_chars += len(self.rules[-1])
        if self._num_chars > MAX_TEXT_BYTES:
            raise InexpressibleError("the schema is too large")
        return rule

    def _whole(self, schema: Any) -> Any:
        """Make a part of the schema a document of its own, in which all references resolve."""
        if "$ref" not in json.dumps(schema):
            return schema
        return {**_rebased(schema), "$defs": {"whole": _rebased(self._schema)}}

    def _ways(self, schema: Any) -> list[tuple[str, Any]]:
        """Return the ways to write a value that fits a schema.

        Each is ("json", schema) or ("text", conditions).
        """
        if self._form.text(()) is None:
            return [("json", {} if schema is True else schema)]
        ways = list(self._flat(schema, 0))
        if ("text", []) in ways:
            return [("text", [])]
        kinds = {kind for kind, _ in ways}
        others = [value for kind, value in ways if kind == "json"]
        whole = [("json", {"anyOf": others} if len(others) > 1 else others[0])] if others else []
        words = [f"/{word}/" for kind, word in ways if kind == "word"]
        listed = [("text", [f"({' | '.join(words)})"])] if words else []
        # A text must not look like a value of another allowed type, because it would be read as
        # this type.
        more = [] if kinds <= {"text"} else [f"~/{_OF_OTHER_TYPES}/"]
        texts = [("text", [*one, *more]) for kind, one in ways if kind == "text"]
        return [*whole, *listed, *texts]

    def _flat(self, schema: Any, depth: int) -> Iterator[tuple[str, Any]]:
        if schema is False:
            return
        self._num_left -= 1
        if self._num_left < 0:
            raise InexpressibleError("the schema is too large")
        if depth > _MAX_DEPTH or not isinstance(schema, Mapping):
            if schema is not True:
                raise InexpressibleError("a schema is nested too deeply")
            schema = {}
        try:
            found = rewritten(dict(schema), self._schema)
        except (TypeError, AttributeError, ValueError, KeyError) as error:
            raise InexpressibleError(f"a schema in it is not valid: {error}") from None
        if isinstance(found, bool):
            yield from self._flat(found, depth + 1)
            return
        said = set(found) - _ANNOTATIONS
        ways = found.get("anyOf") or found.get("oneOf")
        if not said:
            yield "text", []
        elif said == {"$ref"}:
            yield from self._flat(self._target(found["$ref"]), depth + 1)
        elif said in ({"anyOf"}, {"oneOf"}) and isinstance(ways, list):
            for way in ways:
                yield from self._flat(way, depth + 1)
        elif said == {"allOf"} and len(found["allOf"]) == 1:
            yield from self._flat(found["allOf"][0], depth + 1)
        elif "const" in said or "enum" in said:
            yield from self._listed(found, said)
        elif isinstance(found.get("type"), list):
            for kind in found["type"]:
                yield from self._flat({**found, "type": kind}, depth + 1)
        elif found.get("type") == "string":
            yield "text", _regexes(found)
        elif found.get("type") in _WORDS and said == {"type"}:
            yield "word", _WORDS[found["type"]]
        elif isinstance(found.get("type"), str) or self._is_structure(found, depth):
            yield "json", dict(schema)
        else:
            raise InexpressibleError(f"{min(said)} without a type is not enforced here")

    def _is_structure(self, schema: Any, depth: int) -> bool:
        """Return whether a schema allows only objects or arrays."""
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            return False
        if "type" in schema:
            return schema["type"] in ("object", "array")
        parts = list(schema.get("allOf") or ())
        if "$ref" in schema:
            parts.append(self._target(schema["$ref"]))
        return any(self._is_structure(part, depth + 1) for part in parts[:_MAX_PARTS])

    def _listed(self, schema: Mapping[str, Any], said: set[str]) -> Iterator[tuple[str, Any]]:
        """Yield the ways to write the values of ``enum`` or ``const``."""
        if more := said - {"const", "enum", "type", "nullable"}:
            raise InexpressibleError(f"{min(more)} beside enum or const is not enforced here")
        values = [schema["const"]] if "const" in schema else schema["enum"]
        for value in values:
            if isinstance(value, dict | list):
                yield "json", {"const": value}
            else:
                yield "word", _escaped(value if isinstance(value, str) else json.dumps(value))

    def _target(self, reference: Any) -> Any:
        if not isinstance(reference, str) or not reference.startswith("#/"):
            raise InexpressibleError(f"$ref {str(reference)[:80]!r} is not enforced here")
        found: Any = self._schema
        for step in reference[2:].split("/"):
            key = step.replace("~1", "/").replace("~0", "~")
            found = found.get(key) if isinstance(found, Mapping) else None
        if found is None:
            raise InexpressibleError(f"$ref {reference[:80]!r} has no target")
        return found


def _rebased(schema: Any) -> Any:
    """Move a schema's references to ``#/$defs/whole``, where the whole schema will be."""
    if isinstance(schema, list):
        return [_rebased(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        key: f"#/$defs/whole{value[1:]}"
        if key == "$ref" and isinstance(value, str) and value.startswith("#")
        else _rebased(value)
        for key, value in schema.items()
        if key != "$id"
    }


def _regexes(schema: Mapping[str, Any]) -> list[str]:
    """Return the regexes that a text must match to fit a schema, in the grammar's syntax."""
    if more := set(schema) - _TEXT_KEYWORDS:
        raise InexpressibleError(f"{min(more)} is not enforced on texts here")
    found = []
    low, high = schema.get("minLength", 0), schema.get("maxLength", "")
    if low or high != "":
        found.append(f"/(?s:.{{{low},{high}}})/")
    if "format" in schema:
        if schema["format"] not in _FORMATS:
            raise InexpressibleError(f"format {schema['format']!r} is not enforced on texts here")
        found.append(f"/{_FORMATS[schema['format']]}/")
    if "pattern" in schema:
        found.append(f"/{_searched(str(schema['pattern']))}/")
    for one in schema.get("allOf") or ():
        found.extend(_regexes(one))
    return found


def _searched(pattern: str) -> str:
    """Convert a pattern that may match anywhere in a text to a regex of whole texts.

    The regex is in the grammar's syntax.
    """
    ways, way, depth, position = [], "", 0, 0
    while position < len(pattern):
        sign, end = pattern[position], position + 1
        if sign == "\\":
            end = position + 2
        elif sign == "[":
            end = end_of_class(pattern, position)
        elif sign == "(" and pattern.startswith("?", end) and not _GROUP.match(pattern, end):
            raise InexpressibleError(f"pattern {pattern[:80]!r} is not enforced on texts here")
        depth += (sign == "(") - (sign == ")")
        is_end = (sign == "^" and not way) or (sign == "$" and _ends(pattern[end:]))
        if sign in "^$" and (depth or not is_end):
            raise InexpressibleError(f"pattern {pattern[:80]!r} is not enforced on texts here")
        part = pattern[position:end]
        if sign == "|" and not depth:
            ways.append(way)
            way = ""
        else:
            way += _part(part)
        position = end
    return "|".join(map(_anywhere, [*ways, way]))


def _ends(rest: str) -> bool:
    return not rest or rest[0] == "|"


def _part(part: str) -> str:
    """Convert one character or class of a pattern to the grammar's regex syntax."""
    if part[:1] == "[":
        return _ESCAPE.sub(lambda one: _CLASSES.get(one[0][1:], one[0]), part).replace("/", "\\/")
    if part[:1] == "\\":
        found = _CLASSES.get(part[1:])
        return f"[{found}]" if found else part
    return part.replace("/", "\\/").replace("\n", "\\n")


def _anywhere(way: str) -> str:
    """Return a regex for texts that contain a match of one of a pattern's alternatives."""
    is_ended = way.endswith("$") and not way.endswith("\\$")
    inner = (way[:-1] if is_ended else way).removeprefix("^")
    before = "" if way.startswith("^") else "(?s:.*)"
    return f"{before}(?:{inner}){'' if is_ended else '(?s:.*)'}"


def _escaped(text: str) -> str:
    """Return a regex that matches only this text."""
    if not text:
        return "(?:)"  # an empty regex, ``//``, would begin a comment in Lark
    return re.escape(text).replace("/", "\\/").replace("\n", "n")
