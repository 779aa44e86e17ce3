"""Unit tests of argument types: the schema decides what an argument's text stands for."""

from __future__ import annotations

import time
from typing import Any

import pytest

from router.intake.answers.argument_types import ArgumentTypes

STRING, INTEGER, NULL = {"type": "string"}, {"type": "integer"}, {"type": "null"}
BOOLEAN, NUMBER = {"type": "boolean"}, {"type": "number"}
CASES: list[tuple[Any, str, Any]] = [
    ({"anyOf": [{"type": "integer", "enum": [1, 10]}, {"type": "string"}]}, "1", 1),
    ({"anyOf": [{"type": "integer", "enum": [1, 10]}, {"type": "string"}]}, "2", "2"),
    ({"anyOf": [STRING, NULL]}, "2024", "2024"),  # what pydantic makes of str | None
    ({"anyOf": [STRING, NULL]}, "null", None),
    ({"anyOf": [STRING, NULL]}, "None", None),  # as templates show it
    ({"anyOf": [STRING, NULL]}, "nullable", "nullable"),
    ({"oneOf": [NULL, STRING]}, "7", "7"),
    ({"type": ["string", "null"]}, "2024", "2024"),
    ({"type": ["string", "null"]}, "true", "true"),
    ({**STRING, "nullable": True}, "null", None),
    (STRING, "null", "null"),
    (STRING, "True", "True"),
    (STRING, '"a"', '"a"'),
    (STRING, " a\n", " a\n"),
    ({"$ref": "#/$defs/Code"}, "42", "42"),
    ({"$ref": "#/$defs/Size"}, "42", 42),
    ({"allOf": [{"$ref": "#/$defs/Code"}], "description": "x"}, "42", "42"),
    ({"$ref": "#/$defs/Again"}, "42", 42),
    ({"$ref": "#/nowhere"}, "42", 42),
    ({"$ref": "https://example.com/x"}, "a", "a"),
    ({"enum": ["1", "2"]}, "1", "1"),
    ({"enum": [1, 2]}, "1", 1),
    ({"enum": ["1", "2"]}, '"1"', "1"),
    ({"enum": [True, "x"]}, "1", 1),
    ({"const": "5"}, "5", "5"),
    ({"const": 5}, "5", 5),
    ({"enum": ["a", None]}, "null", None),
    ({**STRING, "enum": ["a"]}, "null", "null"),
    (BOOLEAN, "True", True),
    (BOOLEAN, "false", False),
    (BOOLEAN, " FALSE ", False),
    (BOOLEAN, "maybe", "maybe"),
    ({"anyOf": [BOOLEAN, NULL]}, "False", False),
    (INTEGER, "3", 3),
    (INTEGER, "3.0", 3),
    (INTEGER, "3.5", 3.5),
    (INTEGER, "three", "three"),
    ({"anyOf": [INTEGER, NULL]}, "3", 3),
    ({"anyOf": [INTEGER, STRING]}, "3", 3),
    ({"anyOf": [INTEGER, STRING]}, "3a", "3a"),
    (NUMBER, "3.0", 3.0),
    (NUMBER, "1e999", float("inf")),
    (NUMBER, "NaN", "NaN"),
    ({"type": "array", "items": STRING}, '["a"]', ["a"]),
    ({"type": "array", "items": STRING}, "['a', None]", ["a", None]),
    ({"type": "object"}, "{'a': True}", {"a": True}),
    ({"type": "object"}, '{"a": "\\ud800"}', '{"a": "\\ud800"}'),
    ({}, "True", True),
    ({}, "12", 12),
    ({}, '"a"', "a"),
    (True, "12", 12),
    (None, "12", 12),
    (None, "a b", "a b"),
    ({"type": "unheard of"}, "12", 12),
    ({"type": 5}, "12", 12),
]
DEFS = {
    "Code": STRING,
    "Size": {"anyOf": [INTEGER, NULL]},
    "Again": {"allOf": [{"$ref": "#/$defs/Again"}]},
}


def same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and one == other


@pytest.mark.parametrize(("schema", "text", "value"), CASES)
def test_a_text_is_what_the_schema_says(schema: Any, text: str, value: Any) -> None:
    properties = {} if schema is None else {"x": schema}
    types = ArgumentTypes({"type": "object", "properties": properties, "$defs": DEFS})
    assert same(types.value_of("x", text), value)
    for length in range(len(text) + 1):  # a string that is shown as it comes stays one
        if types.is_text("x", text[:length]):
            assert same(types.value_of("x", text), text)


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"x": STRING}},
        {"additionalProperties": STRING},
        {"$ref": "#/$defs/P", "$defs": {"P": {"properties": {"x": STRING}}}},
        {"allOf": [{"properties": {"y": INTEGER}}, {"properties": {"x": STRING}}]},
        {"anyOf": [{"properties": {"x": STRING}}, {"properties": {"y": INTEGER}}]},
        {"allOf": [{"properties": {"x": STRING}}, {"properties": {"x": {"minLength": 1}}}]},
    ],
)
def test_a_property_is_found_wherever_the_schema_has_it(schema: dict[str, Any]) -> None:
    types = ArgumentTypes(schema)
    assert types.value_of("x", "2024") == "2024"
    assert types.is_text("x", "2")


def test_a_string_is_known_as_soon_as_it_can_be_nothing_else() -> None:
    types = ArgumentTypes({"properties": {"x": {"anyOf": [STRING, NULL]}, "y": INTEGER}})
    assert [types.is_text("x", text) for text in ("", "n", "null", "null ", "nu m")] == [
        False, False, False, False, True,
    ]  # fmt: skip
    assert not types.is_text("y", "abc")


def test_reading_a_schema_is_bounded() -> None:
    many: dict[str, Any] = {"anyOf": [{"$ref": "#/properties/x"}] * 5000}
    types = ArgumentTypes({"properties": {"x": many}})
    began_at = time.process_time()
    assert types.value_of("x", "12") == 12
    assert time.process_time() - began_at < 5  # without a bound: for ever


@pytest.mark.parametrize(
    ("schema", "text", "written"),
    [
        (NUMBER, "7e+232992113", "7e+232992113"),
        (NUMBER, "-1e999\n", "-1e999"),
        ({"type": "array"}, "[1, 2e400]", "[1, 2e400]"),
        (NUMBER, "1e3", "1000.0"),
        (NUMBER, "NaN", '"NaN"'),
        (STRING, "1e999", '"1e999"'),
    ],
)
def test_a_number_that_no_float_has_is_written_as_it_is(
    schema: dict[str, Any], text: str, written: str
) -> None:
    """Regression: numbers like these became strings."""
    assert ArgumentTypes({"properties": {"x": schema}}).json_of("x", text) == written
