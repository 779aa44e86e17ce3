"""Strict arguments: grammars of a function's arguments where a family writes each by itself.

Families that write arguments as one JSON object need none of this: there the schema is the grammar.
A schema that these rules cannot hold to is refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.api.errors import InvalidRequestError
from router.intake.answers.argument_types import ArgumentTypes

_NOTES = frozenset(
    {"type", "title", "description", "default", "examples", "deprecated", "nullable"}
)
_OF_OBJECTS = frozenset(
    {
        "type", "properties", "required", "additionalProperties", "$defs", "definitions",
        "$schema", "$id", "title", "description", "strict", "examples",
    }
)  # fmt: skip
_LENGTHS = frozenset({"minLength", "maxLength"})
_DEFINITIONS = ("$defs", "definitions")
_MAX_LENGTH = 10_000
_NAME = re.compile(r"[A-Za-z_][\w.]*")


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a strict function.

    Attributes:
        schema: what a value must fit, with the definitions that the schema refers to.
        is_text: the schema takes texts.
        texts: the only texts that the schema takes; None: not listed.
        lengths: least and most characters of a text; None: no limit.
    """

    name: str
    is_required: bool
    schema: Mapping[str, Any]
    is_text: bool
    texts: tuple[str, ...] | None = None
    lengths: tuple[int, int | None] = (0, None)


def strict_arguments(name: str, parameters: Mapping[str, Any]) -> list[Argument]:
    """List a function's arguments in the order of its schema.

    Raises InvalidRequestError naming the function and the keyword that cannot be enforced.
    """
    for keyword in parameters:
        if keyword not in _OF_OBJECTS:
            raise _refused(name, f"{keyword!r} beside properties")
    properties, required = parameters.get("properties", {}), parameters.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        raise _refused(name, "properties that are no object, or required that is no list")
    if missing := [one for one in required if one not in properties]:
        raise _refused(name, f"required {str(missing[0])[:64]!r}, which is not among properties")
    found = []
    for argument in properties:
        if not _NAME.fullmatch(argument):
            raise _refused(name, f"the name {argument[:64]!r}")
        found.append(_argument(name, argument, argument in required, parameters))
    return found


def _argument(
    function: str, name: str, is_required: bool, parameters: Mapping[str, Any]
) -> Argument:
    types = ArgumentTypes(parameters)
    schema = _resolved(parameters, parameters["properties"][name])
    definitions = {key: parameters[key] for key in _DEFINITIONS if key in parameters}
    whole = {**definitions, **schema}
    if not types.accepts_text(name):
        return Argument(name, is_required, whole, is_text=False)
    ways = _ways(parameters, schema)
    if ways and any(set(way) <= _NOTES and "string" in _types(way) for way in ways):
        if all(set(way) <= _NOTES for way in ways):
            return Argument(name, is_required, whole, is_text=True)
    elif ways and all(listed := [_listed(way) for way in ways]):
        texts = tuple(dict.fromkeys(text for one in listed for text in one))
        if not all(texts):
            raise _refused(function, f"the empty text among the values of {name!r}")
        return Argument(name, is_required, whole, is_text=True, texts=texts)
    if unknown := set(schema) - _NOTES - _LENGTHS:
        raise _refused(function, f"{min(unknown)!r} of the text {name!r}")
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if _LENGTHS & set(schema) and schema.get("type") != "string":
        raise _refused(function, f"a length of {name!r}, which is not only a text")
    if any(isinstance(one, int) and one > _MAX_LENGTH for one in (least, most)):
        raise _refused(function, f"a length of {name!r} above {_MAX_LENGTH}")
    return Argument(name, is_required, whole, is_text=True, lengths=(least, most))


def _ways(root: Mapping[str, Any], schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """List the schemas of which a value fits one; none where other keywords join them."""
    for keyword in ("anyOf", "oneOf"):
        ways = schema.get(keyword)
        if isinstance(ways, list) and set(schema) <= {keyword, *_NOTES} and "type" not in schema:
            return [_resolved(root, way) for way in ways]
    return [schema]


def _types(schema: Mapping[str, Any]) -> Sequence[str]:
    """List the types of a schema; one that names none takes texts, too."""
    types = schema.get("type", ["string"])
    return types if isinstance(types, list) else [types]


def _listed(schema: Mapping[str, Any]) -> list[str]:
    """List what a value may be written as, if that is a list; empty: it is not."""
    if not set(schema) <= _NOTES | {"enum", "const"}:
        return []
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return [one if isinstance(one, str) else json.dumps(one) for one in values]
    written = {"null": ["null"], "boolean": ["true", "false"]}
    return [text for kind in _types(schema) for text in written.get(kind, [])]


def _resolved(root: Mapping[str, Any], schema: Any) -> Mapping[str, Any]:
    """Follow a schema that is a reference alone to one of the root's definitions."""
    for _ in range(32):
        if not isinstance(schema, Mapping):
            return {}
        reference = schema.get("$ref")
        parts = reference.split("/") if isinstance(reference, str) else []
        if len(parts) != 3 or parts[0] != "#" or not set(schema) <= {"$ref", *_NOTES}:
            break
        schema = root.get(parts[1], {}).get(parts[2], {})
    return schema if isinstance(schema, Mapping) else {}


def _refused(name: str, what: str) -> InvalidRequestError:
    return InvalidRequestError(
        "tools",
        f"{name[:64]!r} cannot be strict: this model's form of calls cannot enforce {what}",
    )


def in_order(items: Sequence[tuple[str, bool]], comma: str, rule: str) -> Iterator[str]:
    """Write rules of items in their order, divided by a comma; items may be left out.

    Args:
        items: a rule's name, and whether the item must be there.
        comma: as a grammar has it.
        rule: name of the rule of all items; others begin with this name.
    """
    # `head`: nothing has been written yet. `tail`: behind an item.
    for index, (item, is_required) in enumerate(items):
        yield f"{rule}_tail{index}: {comma} {item} {rule}_tail{index + 1}" + (
            "" if is_required else f" | {rule}_tail{index + 1}"
        )
        yield f"{rule}_head{index}: {item} {rule}_tail{index + 1}" + (
            "" if is_required else f" | {rule}_head{index + 1}"
        )
    yield f'{rule}_tail{len(items)}: ""'
    yield f'{rule}_head{len(items)}: ""'
    yield f"{rule}: {rule}_head0"
