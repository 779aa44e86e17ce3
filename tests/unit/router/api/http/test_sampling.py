"""Unit tests of a request's fields as sampling parameters."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from baton.api.errors import InvalidRequestError
from baton.api.sampling_params import SamplingParams
from baton.api.structured_output import StructuredOutput
from router.api.http.sampling import sampling_params
from router.api.http.schema import ChatRequest, SamplingRequest

SCHEMA = {"type": "object"}


def request(**fields: Any) -> SamplingRequest:
    return msgspec.convert({"model": "m", **fields}, SamplingRequest)


def params(**fields: Any) -> SamplingParams:
    return sampling_params(request(**fields), max_tokens=5)


def test_what_is_not_given_is_as_openai_has_it() -> None:
    assert params() == SamplingParams(max_tokens=5, temperature=1.0, top_p=1.0)


def test_every_field_arrives() -> None:
    given: dict[str, Any] = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "presence_penalty": 0.1,
        "frequency_penalty": 0.2, "repetition_penalty": 1.1, "seed": 3, "min_tokens": 2,
        "ignore_eos": True, "stop_token_ids": [4], "allowed_token_ids": [4, 5],
        "banned_token_ids": [6], "stop": ["a", "b"],
    }  # fmt: skip
    expected = SamplingParams(max_tokens=5, logit_bias=((9, -1.5),), **given)
    assert params(**given, logit_bias={9: -1.5}) == expected


def test_a_stop_string_may_be_a_string_and_top_k_may_be_off_in_two_ways() -> None:
    assert params(stop="end").stop == ("end",)
    assert params(top_k=-1).top_k == params(top_k=0).top_k == 0


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, StructuredOutput(json_object=True)),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            StructuredOutput(json_schema=SCHEMA),
        ),
        ({"structured_outputs": {"json": SCHEMA}}, StructuredOutput(json_schema=SCHEMA)),
        ({"structured_outputs": {"regex": "a+"}}, StructuredOutput(regex="a+")),
        ({"structured_outputs": {"choice": ["a"]}}, StructuredOutput(choice=("a",))),
        ({"structured_outputs": {"grammar": "start: A"}}, StructuredOutput(grammar="start: A")),
        ({"structured_outputs": {"json_object": True}}, StructuredOutput(json_object=True)),
        # As other servers have it; it was passed over, and the answer was free text.
        *(
            ({"response_format": form}, StructuredOutput(json_schema=SCHEMA))
            for form in (
                {"type": "json_object", "schema": SCHEMA},
                {"type": "json_object", "json_schema": {"schema": SCHEMA}},
                {"type": "json_object", "value": SCHEMA},
                {"type": "json_schema", "schema": SCHEMA, "name": "n", "strict": True},
                {"type": "json", "value": SCHEMA},
                {"type": "json", "value": {"name": "n", "schema": SCHEMA}},
            )
        ),
        ({"response_format": {"type": "regex", "pattern": "a+"}}, StructuredOutput(regex="a+")),
        ({"response_format": {"type": "regex", "value": "a+"}}, StructuredOutput(regex="a+")),
        (
            {"response_format": {"type": "grammar", "grammar": "root ::= a"}},
            StructuredOutput(grammar="root ::= a"),
        ),
        ({"json_schema": SCHEMA}, StructuredOutput(json_schema=SCHEMA)),
        ({"json_schema": json.dumps(SCHEMA)}, StructuredOutput(json_schema=SCHEMA)),
        ({"json_schema": {"name": "n", "schema": SCHEMA}}, StructuredOutput(json_schema=SCHEMA)),
        ({"regex": "a+"}, StructuredOutput(regex="a+")),
        ({"ebnf": "root ::= a"}, StructuredOutput(grammar="root ::= a")),
        ({"grammar": "root ::= a"}, StructuredOutput(grammar="root ::= a")),
        ({"grammar": {"type": "regex", "value": "a+"}}, StructuredOutput(regex="a+")),
        ({"grammar": {"type": "json", "value": SCHEMA}}, StructuredOutput(json_schema=SCHEMA)),
        ({"format": "json"}, StructuredOutput(json_object=True)),
        ({"format": SCHEMA}, StructuredOutput(json_schema=SCHEMA)),
    ],
)
def test_structured_output_is_asked_for_in_each_servers_way(
    fields: dict[str, Any], expected: StructuredOutput | None
) -> None:
    assert params(**fields).structured_output == expected


def test_a_forced_call_has_no_text_that_response_format_could_hold() -> None:
    call = StructuredOutput(json_schema={"type": "object"})
    chat = {"model": "m", "messages": [], "tool_choice": "required"}
    both = msgspec.convert({**chat, "response_format": {"type": "json_object"}}, ChatRequest)
    assert sampling_params(both, max_tokens=5, structured_output=call).structured_output == call
    wrong = msgspec.convert({**chat, "structured_outputs": {"regex": "a"}}, ChatRequest)
    with pytest.raises(InvalidRequestError, match="tool_choice: cannot be together with"):
        sampling_params(wrong, max_tokens=5, structured_output=call)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema: is"),
        ({"structured_outputs": {}}, "structured_outputs: must have exactly one of"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex: must not be empty"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json: is not JSON"),
        (
            {
                "response_format": {"type": "json_object"},
                "structured_outputs": {"regex": "a"},
            },
            "structured_outputs: cannot be together with response_format",
        ),
        (
            {"json_schema": {"type": "object"}, "regex": "a"},
            "json_schema: cannot be together with regex",
        ),
        (
            {"response_format": {"type": "json_object", "schema": {}, "value": {}}},
            "response_format.schema: is one too many for the type 'json_object'",
        ),
        (
            {"response_format": {"type": "text", "schema": {}}},
            "response_format.schema: is one too many for the type 'text'",
        ),
        ({"response_format": {"type": "regex"}}, "response_format.pattern: is needed"),
        ({"response_format": {"type": "regex", "value": {}}}, "response_format.value: must be a"),
        ({"json_schema": "{"}, "json_schema: is not JSON"),
        ({"format": "yaml"}, "format: is not JSON"),
        ({"top_p": 2.0}, "top_p: must be in [0, 1], got 2.0"),
    ],
)
def test_errors_name_the_field_that_the_client_wrote(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        params(**fields)
    assert str(caught.value).startswith(message)


def test_n_has_limits() -> None:
    assert (params().n, params(n=128).n) == (1, 128)
    for n, limit in ((0, "1 or more"), (129, "128 or less")):
        with pytest.raises(InvalidRequestError, match=rf"^n: must be {limit}, got {n}$"):
            params(n=n)
