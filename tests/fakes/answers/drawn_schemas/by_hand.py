"""Schemas as people write them: as OpenAI's guides have them, as OpenAPI has them, and by keywords.

Keywords are those that tell values apart: conditions, exclusions, needs and counts.
"""

from __future__ import annotations

import random
from typing import Any

from tests.fakes.answers.drawn_schemas.drawn import DrawnSchema, Schema

NAMES = ("name", "steps", "final_answer", "city", "größe", "unit", "日付", "value", "ui-type", "n")
WORDS = ("celsius", "fahrenheit", "div", "button", "été", "a b", "日本", "x/y", "1", "none")


def of_guides(rng: random.Random) -> DrawnSchema:
    """Draw a schema as OpenAI's guide to structured outputs has them: closed, all required."""
    if rng.random() < 0.3:
        return DrawnSchema(rng.choice((_linked_list, _interface, _chain))(rng), "guides")
    return DrawnSchema(_closed(rng, rng.choice((1, 2, 2))), "guides")


def of_openapi(rng: random.Random) -> DrawnSchema:
    """Draw a schema of components that refer to one another."""
    base = {**_closed(rng, 0), "additionalProperties": True}
    base["example"] = {"name": "x"}
    more = {
        "allOf": [
            {"$ref": "#/components/schemas/Base"},
            {
                "type": "object",
                "properties": {
                    "extra_": _value(rng, 1),
                    "format": {"type": "string", "maxLength": 4},
                },
                "required": ["extra_"],
            },
        ]
    }  # fmt: skip
    pets = {
        "oneOf": [{"$ref": "#/components/schemas/Cat"}, {"$ref": "#/components/schemas/Dog"}],
        "discriminator": {
            "propertyName": "petType",
            "mapping": {"cat": "#/components/schemas/Cat", "dog": "#/components/schemas/Dog"},
        },
    }
    properties = {
        "id": {"type": "integer", "format": "int64", "minimum": 1, "maximum": 2**40},
        "amount": {"type": "number", "format": "double", "minimum": 0, "exclusiveMaximum": 100},
        "base": {"$ref": "#/components/schemas/Base"},
        "more": more,
        "pet": pets,
        "labels": {
            "type": "object", "maxProperties": 2,
            "additionalProperties": {"type": "string", "maxLength": 3},
        },
        "codes": {
            "type": "object", "patternProperties": {"^x-[a-z]{1,3}$": {"type": "boolean"}},
            "additionalProperties": False,
        },
        "when": {"type": "string", "format": rng.choice(("date", "date-time", "time"))},
        "secret": {"type": "string", "format": "password", "maxLength": 5, "writeOnly": True},
    }  # fmt: skip
    names = rng.sample(sorted(properties), rng.randint(1, 4))
    schema: Schema = {
        "type": "object",
        "properties": {name: properties[name] for name in names},
        "required": [name for name in names if rng.random() < 0.7],
        "additionalProperties": False,
        "components": {
            "schemas": {
                "Base": base,
                "Cat": _pet("cat", {"lives": {"type": "integer", "minimum": 0, "maximum": 9}}),
                "Dog": _pet("dog", {"loud": {"type": "boolean"}}),
            }
        },
    }
    return DrawnSchema(schema, "openapi")


def of_keywords(rng: random.Random) -> DrawnSchema:
    """Draw a schema with a keyword that says more than the shape of a value."""
    made = rng.choice(_KEYWORDS)(rng)
    if rng.random() < 0.4:
        made = {
            "type": "object", "properties": {"within": made, "also": _value(rng, 0)},
            "required": ["within"], "additionalProperties": False,
        }  # fmt: skip
    return DrawnSchema(made, "keywords")


def _pet(tag: str, properties: Schema) -> Schema:
    return {
        "type": "object",
        "properties": {"petType": {"type": "string", "enum": [tag]}, **properties},
        "required": ["petType", *properties],
        "additionalProperties": False,
    }


def _closed(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(NAMES, rng.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: _value(rng, depth) for name in names},
        "required": names,
        "additionalProperties": False,
    }


def _value(rng: random.Random, depth: int) -> Schema:
    kinds: list[Any] = ["string", "number", "integer", "boolean", "enum", "or null", "short"]
    if depth > 0:
        kinds += ["array", "array", "object", "object", "anyOf"]
    match rng.choice(kinds):
        case "enum":
            return {"type": "string", "enum": rng.sample(WORDS, 3), "description": "One of them."}
        case "or null":
            kind = rng.choice(("string", "integer", "boolean"))
            return {"type": [kind, "null"], "maxLength": 6, "minimum": 0, "maximum": 99}
        case "short":
            return {"type": "string", "minLength": 1, "maxLength": 5}
        case "integer":
            return {
                "type": "integer",
                "minimum": rng.randint(-5, 5),
                "maximum": rng.randint(6, 900),
            }
        case "array":
            return {"type": "array", "items": _value(rng, depth - 1), "maxItems": 3}
        case "object":
            return _closed(rng, depth - 1)
        case "anyOf":
            return {"anyOf": [_closed(rng, 0), _value(rng, 0)]}
        case kind:
            return {"type": kind}


def _linked_list(rng: random.Random) -> Schema:
    node = {
        "type": "object",
        "properties": {
            "value": _value(rng, 0),
            "next": {"anyOf": [{"$ref": "#/$defs/linked_list_node"}, {"type": "null"}]},
        },
        "required": ["value", "next"],
        "additionalProperties": False,
    }
    return {
        "type": "object",
        "properties": {"linked_list": {"$ref": "#/$defs/linked_list_node"}},
        "$defs": {"linked_list_node": node},
        "required": ["linked_list"],
        "additionalProperties": False,
    }


def _interface(rng: random.Random) -> Schema:
    attribute = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 4}, "value": _value(rng, 0)},
        "additionalProperties": False,
        "required": ["name", "value"],
    }
    return {
        "type": "object",
        "properties": {
            "type": {"type": "string", "enum": ["div", "button", "header"]},
            "label": {"type": "string", "maxLength": 6},
            "children": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2},
            "attributes": {"type": "array", "items": attribute, "maxItems": 2},
        },
        "required": ["type", "label", "children", "attributes"],
        "additionalProperties": False,
    }


def _chain(rng: random.Random) -> Schema:
    step = {
        "type": "object",
        "properties": {"explanation": {"type": "string"}, "output": {"type": "string"}},
        "required": ["explanation", "output"],
        "additionalProperties": False,
    }
    return {
        "type": "object",
        "properties": {
            "steps": {"type": "array", "items": {"$ref": "#/$defs/step"}},
            "final_answer": {"type": "string"},
        },
        "$defs": {"step": step},
        "required": ["steps", "final_answer"],
        "additionalProperties": False,
    }


# ------------------------------------------------------------------ keywords


def _record(rng: random.Random, **more: Any) -> Schema:
    """Write an object of three properties, for conditions about them."""
    return {
        "type": "object",
        "properties": {
            "kind": {"type": "string", "enum": ["card", "cash", "été"]},
            "number": {"type": "integer", "minimum": 0, "maximum": 99},
            "note": {"type": "string", "maxLength": 4},
            "paid": {"type": "boolean"},
        },
        "required": ["kind"] if rng.random() < 0.8 else [],
        "additionalProperties": False,
        **more,
    }


def _condition(rng: random.Random) -> Schema:
    return rng.choice(
        (
            {"properties": {"kind": {"const": "card"}}, "required": ["kind"]},
            {"properties": {"kind": {"const": "cash"}}},
            {"properties": {"kind": {"enum": ["card", "été"]}}, "required": ["kind"]},
            {"properties": {"paid": {"const": True}}, "required": ["paid"]},
            {"required": ["note"]},
            {"properties": {"kind": {"const": "card"}, "paid": {"const": False}},
             "required": ["kind", "paid"]},
        )
    )  # fmt: skip


def _consequence(rng: random.Random) -> Schema:
    return rng.choice(
        (
            {"required": ["number"]},
            {"properties": {"number": {"minimum": 50}}, "required": ["number"]},
            {"properties": {"note": {"const": "ok"}}},
            {"properties": {"note": False}},
            {"required": ["number", "paid"]},
        )
    )


def _if(rng: random.Random) -> Schema:
    found = {"if": _condition(rng), "then": _consequence(rng)}
    if rng.random() < 0.5:
        found["else"] = _consequence(rng)
    return _record(rng, **found)


def _ifs(rng: random.Random) -> Schema:
    return _record(rng, allOf=[
        {"if": {"properties": {"kind": {"const": kind}}}, "then": _consequence(rng)}
        for kind in rng.sample(("card", "cash", "été"), 2)
    ])  # fmt: skip


def _dependent(rng: random.Random) -> Schema:
    return rng.choice(
        (
            _record(rng, dependentRequired={"number": ["note"], "note": ["paid"]}),
            _record(rng, dependentRequired={"paid": ["number", "note"]}),
            _record(rng, dependentSchemas={"note": _consequence(rng)}),
            _record(rng, dependencies={"note": ["paid"]}),
        )
    )


def _not(rng: random.Random) -> Schema:
    return rng.choice(
        (
            _record(rng, **{"not": {"required": ["number", "note"]}}),
            _record(rng, **{"not": {"required": ["paid"]}}),
            _record(rng, **{"not": _condition(rng)}),
            {"type": "object", "properties": {"a": {"type": "string", "maxLength": 3,
             "not": {"enum": ["", "no"]}}}, "required": ["a"], "additionalProperties": False},
            {"type": "object", "properties": {"a": {"enum": ["x", "y", 3], "not": {"const": "y"}}},
             "required": ["a"], "additionalProperties": False},
        )
    )  # fmt: skip


def _one_of(rng: random.Random) -> Schema:
    return _record(
        rng,
        oneOf=rng.choice(
            (
                [{"required": ["number"]}, {"required": ["note"]}],
                [{"required": ["number"]}, {"required": ["note"]}, {"required": ["paid"]}],
                [{"properties": {"kind": {"const": "card"}}, "required": ["number"]},
                 {"properties": {"kind": {"const": "cash"}}, "required": ["note"]}],
            )
        ),
    )  # fmt: skip


def _unique(rng: random.Random) -> Schema:
    items: Schema = rng.choice(
        (
            {"type": "string", "enum": ["a", "b", "é"]},
            {"enum": [1, "1", True, None]},
            {"type": "boolean"},
            {"const": 7},
        )
    )
    limits = rng.choice(({}, {"minItems": 1}, {"maxItems": 2}, {"minItems": 1, "maxItems": 2}))
    return _holding({"type": "array", "items": items, "uniqueItems": True, **limits})


def _contains(rng: random.Random) -> Schema:
    items = rng.choice(({"type": "integer", "minimum": 0, "maximum": 9}, {"enum": ["a", "b", 3]}))
    wanted = {"const": 3}
    limits = rng.choice(({"maxItems": 3}, {"minItems": 2, "maxItems": 3}, {}))
    return _holding({"type": "array", "items": items, "contains": wanted, **limits})


def _holding(schema: Schema) -> Schema:
    return {
        "type": "object", "properties": {"list": schema}, "required": ["list"],
        "additionalProperties": False,
    }  # fmt: skip


_KEYWORDS = (_if, _if, _ifs, _dependent, _not, _one_of, _unique, _contains)
