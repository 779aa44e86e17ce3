"""Unit tests of schema conditions and lists: what is written out says the same as the keyword."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import pytest

from baton.api.errors import InvalidRequestError
from baton.text.schemas.lists import MAX_PLACES
from baton.text.schemas.repairs import enforceable_schema
from tests.fakes.answers.drawn_schemas import by_hand
from tests.unit.baton.test_schema_rewrites import fits, matcher_of

KIND = {"type": "string", "enum": ["card", "cash", "check"]}
PAY: dict[str, Any] = {
    "type": "object",
    "properties": {"kind": KIND, "number": {"type": "integer"}, "paid": {"type": "boolean"}},
    "required": ["kind"],
    "additionalProperties": False,
}
IS_CARD = {"properties": {"kind": {"const": "card"}}}
NEEDS_NUMBER = {"required": ["number"]}
CARD, PAID = {"kind": "card"}, {"kind": "cash", "paid": True}
AGE = {
    "type": "object", "properties": {"age": {"type": "integer"}, "school": {"type": "string"}},
    "additionalProperties": False,
}  # fmt: skip


def pay(**more: Any) -> dict[str, Any]:
    return {**PAY, **more}


def listed(items: Any, **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, **more}


CASES: list[tuple[str, Any, list[Any], list[Any]]] = [
    ("if and then", pay(**{"if": IS_CARD, "then": NEEDS_NUMBER}),
     [{**CARD, "number": 1}, PAID], [CARD]),
    ("if, then and else", pay(**{"if": IS_CARD, "then": NEEDS_NUMBER,
     "else": {"properties": {"number": False}}}),
     [{**CARD, "number": 1}, PAID], [CARD, {"kind": "cash", "number": 1}]),
    ("ifs in allOf", pay(allOf=[{"if": IS_CARD, "then": NEEDS_NUMBER}]), [PAID], [CARD]),
    ("if a property is there", pay(**{"if": {"required": ["paid"]}, "then": NEEDS_NUMBER}),
     [CARD, {"kind": "cash", "number": 1, "paid": True}], [PAID]),
    ("if a number is large", {**AGE, "if": {"properties": {"age": {"minimum": 18}},
     "required": ["age"]}, "then": {"properties": {"school": False}}},
     [{"age": 18}, {"age": 17, "school": "x"}, {}], [{"age": 18, "school": "x"}]),
    ("if a free text is", {"type": "object", "properties": {"c": {"type": "string"}, "z": True},
     "required": ["c"], "if": {"properties": {"c": {"const": "US"}}}, "then": {"required": ["z"]},
     "additionalProperties": False},
     [{"c": "US", "z": 1}, {"c": "UK"}, {"c": "U"}, {"c": ""}, {"c": "USA"}], [{"c": "US"}]),
    ("then without if", pay(then=NEEDS_NUMBER), [CARD], []),
    ("dependentRequired", pay(dependentRequired={"paid": ["number"]}), [CARD], [PAID]),
    ("dependencies", pay(dependencies={"paid": ["number"]}), [CARD], [PAID]),
    ("dependentSchemas", pay(dependentSchemas={"paid": IS_CARD}),
     [CARD, {"kind": "card", "paid": True}], [PAID]),
    ("not required, and of no type", {"not": {"required": ["paid"]}}, [CARD], [PAID, 5, "a"]),
    ("not long, and of no type", {"enum": ["a", "abc", 7], "not": {"minLength": 2}}, ["a"],
     ["abc", 7]),
    ("not required", pay(**{"not": {"required": ["number", "paid"]}}), [CARD, PAID],
     [{"kind": "card", "number": 1, "paid": True}]),
    ("not a listed text", {"type": "string", "not": {"enum": ["a", "ab", ""]}},
     ["b", "abc", "ba"], ["a", "ab", ""]),
    ("not a type", {"type": ["string", "null"], "not": {"type": "null"}}, ["a"], [None]),
    ("not an integer", {"type": "integer", "not": {"const": 3}}, [2, 4, -7], [3]),
    ("one property of two", pay(oneOf=[NEEDS_NUMBER, {"required": ["paid"]}]),
     [PAID, {"kind": "card", "number": 1}], [CARD, {"kind": "card", "number": 1, "paid": True}]),
    ("unlike listed items", listed({"enum": ["a", "b", 1]}, uniqueItems=True),
     [[], ["b", "a"], [1, "a", "b"]], [["a", "a"], [1, "b", 1]]),
    ("unlike items of a type", listed({"type": "integer", "enum": [1, 2, "a"]}, uniqueItems=True),
     [[2, 1], []], [[1, 1], ["a"]]),
    ("some unlike items", listed({"enum": ["a", "b", "c"]}, uniqueItems=True, minItems=2,
     maxItems=2), [["c", "a"]], [["a"], ["a", "a"], ["a", "b", "c"]]),
    ("contains", listed({"type": "integer"}, contains={"const": 3}, maxItems=3),
     [[3], [1, 3], [1, 2, 3], [3, 3]], [[], [1, 2], [1, 2, 4, 3]]),
    ("contains in a list of any length", listed({"type": "integer"}, contains={"minimum": 9}),
     [[9], [1] * (MAX_PLACES - 1) + [9, 1, 1]], [[], [1]]),
    ("minContains: 0", listed({"enum": ["a"]}, contains={"const": 3}, minContains=0), [["a"]], []),
]  # fmt: skip


@pytest.mark.parametrize(
    ("schema", "good", "bad"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
@pytest.mark.parametrize("is_within", [False, True])
def test_conditions_and_lists_are_enforced(
    schema: Any, good: list[Any], bad: list[Any], is_within: bool
) -> None:
    """Regression: schemas with these keywords were refused, and `dependencies` was ignored."""
    if is_within:
        schema = {"type": "object", "properties": {"v": schema}, "required": ["v"]}
        good, bad = ([{"v": value} for value in values] for values in (good, bad))
    assert [value for value in good if not fits(schema, value)] == []
    assert [value for value in bad if fits(schema, value)] == []


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        (listed({"type": "string"}, uniqueItems=True), "uniqueItems at # cannot be enforced"),
        (
            {"type": "object", "properties": {"tags": listed(True, uniqueItems=True)}},
            "uniqueItems at #/properties/tags cannot be enforced",
        ),
        (listed({"enum": list(range(6))}, uniqueItems=True), "uniqueItems at # .* at most 5"),
        (listed(True, contains=True, maxContains=2), "contains at # cannot be enforced"),
        ({"contains": {"const": 1}}, "contains at # cannot be enforced"),
        ({"not": {"pattern": "a"}}, "not at # cannot be enforced"),
        ({"if": {"format": "date"}, "then": {"maxLength": 3}}, "if at # cannot be enforced"),
        ({"type": "array", "items": True, "unevaluatedItems": False}, "unevaluatedItems at #"),
        ({"$defs": {"a": {"not": {"pattern": "b"}}}}, "not at #/\\$defs/a cannot"),
    ],
)
def test_a_keyword_that_cannot_be_written_out_is_refused_by_its_place(
    schema: Any, problem: str
) -> None:
    with pytest.raises(InvalidRequestError, match=problem) as refused:
        enforceable_schema(json.dumps(schema))
    assert "\n" not in str(refused.value)


def test_what_multiplies_is_refused() -> None:
    schema: Any = {"type": "integer"}
    for _ in range(12):
        schema = listed(schema, contains={"const": []}, maxItems=8)
    with pytest.raises(InvalidRequestError, match="has more than 5000 parts"):
        enforceable_schema(json.dumps(schema))


def test_a_condition_whose_references_multiply_is_refused_at_once() -> None:
    many = {"allOf": [{"$ref": "#/$defs/a"}] * 50}
    schema = {"$defs": {"a": many}, "not": {"$ref": "#/$defs/a"}}
    with pytest.raises(InvalidRequestError, match="not at # cannot be enforced"):
        enforceable_schema(json.dumps(schema))


def draw_value(rng: random.Random, schema: Any) -> Any:
    """Draw an object that is near to what `by_hand` writes of conditions and lists."""
    ways: dict[str, list[Any]] = {
        "kind": ["card", "cash", "été", "x"],
        "number": [0, 50, 99],
        "note": ["", "ok", "no", "abcd"],
        "paid": [True, False],
        "a": ["x", "y", 3, "", "no", "n", "non"],
        "list": [[], [3], [3, 3], ["a"], ["a", "b"], ["b", 3, "a"], [7], [7, 7], [1, "1", None],
                 [True, False], [True, 1], [0, 3], ["a", "a"]],
        "also": [1, 0.5, "a", None, True, "celsius"],
    }  # fmt: skip
    return {
        name: draw_value(rng, one) if name == "within" else rng.choice(ways[name])
        for name, one in schema["properties"].items()
        if name in ("within", "kind", "a", "list") or rng.random() < 0.6
    }


def test_a_schema_that_is_written_out_says_the_same() -> None:
    rng, counts = random.Random("written out"), {True: 0, False: 0}
    for _ in range(80):
        schema = by_hand.of_keywords(rng).schema
        text = json.dumps(schema)
        found = json.loads(enforceable_schema(text))
        validators = [jsonschema.Draft202012Validator(one) for one in (schema, found)]
        if '"dependencies"' in text:  # a word of older drafts
            validators[0] = jsonschema.Draft7Validator(schema)
        for _ in range(40):
            value = draw_value(rng, schema)
            before, after = (one.is_valid(value) for one in validators)
            assert before is after, (schema, found, value)
            counts[before] += 1
    assert min(counts.values()) > 300


def test_a_pattern_of_all_other_texts_has_none_of_some() -> None:
    rng = random.Random("other texts")
    for _ in range(100):
        excluded = {"".join(rng.choices("ab]^-\\", k=rng.randint(0, 3))) for _ in range(4)}
        schema = {"type": "string", "not": {"enum": sorted(excluded)}}
        (one,) = json.loads(enforceable_schema(json.dumps(schema)))["allOf"]
        for _ in range(200):
            text = "".join(rng.choices("ab]^-\\", k=rng.randint(0, 4)))
            python = one["pattern"].replace(r"&&[^\x00-\x1F]]", "")
            python = re.sub(r"\[\[(\^)", r"[\1", python)
            assert (re.search(python, text) is None) is (text in excluded), (excluded, text)
    assert matcher_of(schema)
