"""Schemas as `z.toJSONSchema` of zod 4 writes them, and as zod-to-json-schema did before."""

from __future__ import annotations

import random
from typing import Any

from tests.fakes.answers.drawn_schemas.drawn import DrawnSchema, Schema

NAMES = ("id", "title", "isDone", "größe", "数", "createdAt", "meta", "list", "value", "a b", "_x")
WORDS = ("admin", "user", "été", "日本", "a-b", "1", "", 'q"q', "line\nbreak")
_SAFE = 9007199254740991
_UUID = (
    "^([0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[1-8][0-9a-fA-F]{3}-[89abAB][0-9a-fA-F]{3}-[0-9a-fA-F]{12}"
    "|00000000-0000-0000-0000-000000000000|ffffffff-ffff-ffff-ffff-ffffffffffff)$"
)
_EMAIL = (
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+"
    r"[A-Za-z]{2,}$"
)


def draw(rng: random.Random) -> DrawnSchema:
    """Draw the schema of a `z.object`."""
    schema = _object(rng, rng.choice((1, 1, 2)))
    if rng.random() < 0.2:
        schema = _lazy(rng)
    dialect = rng.choice(
        ("https://json-schema.org/draft/2020-12/schema", "http://json-schema.org/draft-07/schema#")
    )
    if dialect.endswith("#"):
        schema = _of_draft_7(schema)
    return DrawnSchema({"$schema": dialect, **schema}, "zod")


def _of_draft_7(schema: Any) -> Any:
    """Write tuples and references as the older draft has them."""
    if isinstance(schema, list):
        return [_of_draft_7(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: _of_draft_7(value) for key, value in schema.items()}
    if "prefixItems" in found:
        found["items"] = found.pop("prefixItems")
        found["additionalItems"] = False
    if "$defs" in found:
        found["definitions"] = found.pop("$defs")
    if isinstance(found.get("$ref"), str):
        found["$ref"] = found["$ref"].replace("#/$defs/", "#/definitions/")
    return found


def _any(rng: random.Random, depth: int) -> Schema:
    kinds = [_string, _string, _number, _plain, _enum, _nullable]
    if depth > 0:
        kinds += [_object, _object, _array, _array, _tuple, _record, _union, _tagged, _both]
    return rng.choice(kinds)(rng, depth)


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(NAMES, rng.randint(0 if rng.random() < 0.1 else 1, 4))
    properties = {name: _any(rng, depth - 1) for name in names}
    found: Schema = {"type": "object", "properties": properties}
    if required := [name for name in names if rng.random() < 0.7]:
        found["required"] = required
    return {**found, "additionalProperties": {} if rng.random() < 0.08 else False}


def _string(rng: random.Random, depth: int) -> Schema:
    return rng.choice(
        (
            {},
            {"maxLength": rng.randint(2, 8)},
            {"minLength": 1, "maxLength": 6},
            {"minLength": 4, "maxLength": 4},
            {"pattern": "^a.*", "maxLength": 6},
            {"pattern": r"^[a-z0-9]+(?:-[a-z0-9]+)*$", "maxLength": 9},
            {"pattern": "[0-9]$", "maxLength": 5},
            {"format": "uuid", "pattern": _UUID},
            {"format": "email", "pattern": _EMAIL},
            {"format": "ipv4"},
            {"format": "date"},
            {"format": "date-time"},
        )
    ) | {"type": "string"}


def _number(rng: random.Random, depth: int) -> Schema:
    return rng.choice(
        (
            {"type": "integer", "minimum": -_SAFE, "maximum": _SAFE},
            {"type": "integer", "exclusiveMinimum": 0, "maximum": _SAFE},
            {"type": "integer", "minimum": 1, "maximum": 12},
            {"type": "number"},
            {"type": "number", "minimum": 0, "maximum": 1},
            {"type": "number", "multipleOf": 5, "minimum": 0, "maximum": 100},
            {"type": "integer", "exclusiveMinimum": -3, "exclusiveMaximum": 3},
        )
    )


def _plain(rng: random.Random, depth: int) -> Schema:
    shown = {} if rng.random() < 0.7 else {"description": "Said of it.", "default": True}
    return {"type": "boolean", **shown} if rng.random() < 0.8 else {"type": "null"}


def _enum(rng: random.Random, depth: int) -> Schema:
    words = rng.sample(WORDS, rng.randint(1, 4))
    if rng.random() < 0.3:
        return {"type": "string", "const": words[0]}
    if rng.random() < 0.2:
        return {"enum": [*words, 1, None]}
    return {"type": "string", "enum": words}


def _nullable(rng: random.Random, depth: int) -> Schema:
    one = rng.choice((_string, _number, _enum))(rng, depth)
    return {"anyOf": [one, {"type": "null"}]}


def _array(rng: random.Random, depth: int) -> Schema:
    limits = rng.choice(({}, {"maxItems": 2}, {"minItems": 1, "maxItems": 3}, {"minItems": 1}))
    return {**limits, "type": "array", "items": _any(rng, depth - 1)}


def _tuple(rng: random.Random, depth: int) -> Schema:
    items = [_any(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    return {"type": "array", "prefixItems": items}


def _record(rng: random.Random, depth: int) -> Schema:
    names: Schema = rng.choice(
        (
            {"type": "string"},
            {"type": "string", "enum": ["first", "second"]},
            {"type": "string", "pattern": "^[a-z]{1,3}$"},
        )
    )
    return {"type": "object", "propertyNames": names, "additionalProperties": _any(rng, 0)}


def _union(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [_any(rng, depth - 1) for _ in range(rng.randint(2, 3))]}


def _tagged(rng: random.Random, depth: int) -> Schema:
    ways = []
    for tag in rng.sample(("ok", "error", "été"), rng.randint(2, 3)):
        one = _object(rng, depth - 1)
        properties = {"type": {"type": "string", "const": tag}, **one["properties"]}
        required = ["type", *one.get("required", ())]
        ways.append({**one, "properties": properties, "required": required})
    return {"oneOf": ways}


def _both(rng: random.Random, depth: int) -> Schema:
    """Write a `z.intersection` of open objects."""
    left, right = ({**_object(rng, 0), "additionalProperties": {}} for _ in range(2))
    shared = set(left["properties"]) & set(right["properties"])
    right["properties"] = {
        name: one for name, one in right["properties"].items() if name not in shared
    }
    if "required" in right:
        right["required"] = [name for name in right["required"] if name not in shared]
    return {"allOf": [left, right]}


def _lazy(rng: random.Random) -> Schema:
    """Write a category with categories in it, by reference."""
    inner = {"type": "array", "items": {"$ref": "#/$defs/__schema0"}, "maxItems": 2}
    node: Schema = {
        "type": "object",
        "properties": {"name": _any(rng, 0), "subcategories": inner},
        "required": ["name", "subcategories"],
        "additionalProperties": False,
    }
    if rng.random() < 0.5:
        node["properties"]["subcategories"] = {**inner, "items": {"$ref": "#"}}
        return node
    properties = {"root": {"$ref": "#/$defs/__schema0"}}
    return {
        "type": "object", "properties": properties, "required": ["root"],
        "additionalProperties": False, "$defs": {"__schema0": node},
    }  # fmt: skip
