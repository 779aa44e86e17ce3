"""Unit tests of StructuredOutput and of the command line's options for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from baton.api.errors import InvalidRequestError
from baton.api.sampling_params import SamplingParams
from baton.api.structured_output import MAX_CHOICES, MAX_TEXT_BYTES, StructuredOutput
from baton.cli.structured_output_options import make_structured_output


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({}, "structured_output"),
        ({"regex": "a", "choice": ("a",)}, "structured_output"),
        ({"choice": ()}, "structured_output"),
        ({"regex": ""}, "structured_output.regex"),
        ({"regex": 5}, "structured_output.regex"),
        ({"regex": "\ud800"}, "structured_output.regex"),
        ({"regex": "a" * (MAX_TEXT_BYTES + 1)}, "structured_output.regex"),
        ({"regex": "é" * (MAX_TEXT_BYTES // 2 + 1)}, "structured_output.regex"),
        ({"grammar": ""}, "structured_output.grammar"),
        ({"grammar": "x" * (MAX_TEXT_BYTES + 1)}, "structured_output.grammar"),
        ({"json_schema": ""}, "structured_output.json_schema"),
        ({"json_schema": "{"}, "structured_output.json_schema"),
        ({"json_schema": "[]"}, "structured_output.json_schema"),
        ({"json_schema": 5}, "structured_output.json_schema"),
        ({"json_schema": {"const": object()}}, "structured_output.json_schema"),
        ({"json_schema": {"const": float("nan")}}, "structured_output.json_schema"),
        ({"json_schema": "[" * 60_000}, "structured_output.json_schema"),
        ({"json_schema": '{"maximum":' + "9" * 5000 + "}"}, "structured_output.json_schema"),
        ({"json_schema": {"const": "x" * MAX_TEXT_BYTES}}, "structured_output.json_schema"),
        ({"choice": "yes"}, "structured_output.choice"),
        ({"choice": 0}, "structured_output.choice"),
        ({"choice": ("yes", "")}, "structured_output.choice"),
        ({"choice": ("yes", 5)}, "structured_output.choice"),
        ({"choice": ("a",) * (MAX_CHOICES + 1)}, "structured_output.choice"),
        ({"choice": ("a" * 1000,) * 66}, "structured_output.choice"),
        ({"json_object": 1}, "structured_output.json_object"),
    ],
)
def test_a_value_outside_its_limit_is_refused_by_the_fields_name(
    given: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        StructuredOutput(**given)
    assert caught.value.field == field
    assert "\n" not in caught.value.problem


def test_a_schema_is_the_same_as_text_and_as_a_mapping_and_keeps_its_order() -> None:
    schema = {"properties": {"z": {}, "a": {}}, "type": "object"}
    given = StructuredOutput(json_schema=schema)
    assert given == StructuredOutput(json_schema=json.dumps(schema, indent=2))
    assert list(json.loads(given.text)["properties"]) == ["z", "a"]
    assert hash(given) == hash(StructuredOutput(json_schema=schema))


def test_what_a_user_wrote_is_not_in_its_printed_form() -> None:
    given = StructuredOutput(regex="my secret")
    assert repr(SamplingParams(structured_output=given)).count("secret") == 0
    assert repr(given) == "StructuredOutput(regex: 9 characters)"


def test_sampling_params_take_nothing_else() -> None:
    with pytest.raises(InvalidRequestError, match=r"^structured_output: must be a Struct"):
        SamplingParams(structured_output={"regex": "a"})  # type: ignore[arg-type]  # on purpose
    params = SamplingParams(structured_output=StructuredOutput(json_object=True))
    assert not params.changes_logits  # a mask does, in each step that has one


def test_options_are_texts_or_the_names_of_files(tmp_path: Path) -> None:
    path = tmp_path / "schema.json"
    path.write_text('{"type": "object"}', encoding="utf-8")
    as_text = make_structured_output('{"type": "object"}', None, None, None, False)
    assert as_text == make_structured_output(str(path), None, None, None, False)
    assert as_text == StructuredOutput(json_schema={"type": "object"})
    grammar = make_structured_output(None, None, 'start: "' + "a" * 5000 + '"', None, False)
    assert grammar is not None  # longer than any file's name
    assert make_structured_output(None, None, None, ["a", "b"], False) == StructuredOutput(
        choice=("a", "b")
    )
    assert make_structured_output(None, None, None, None, False) is None
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidRequestError, match="is not text"):
        make_structured_output(str(path), None, None, None, False)
