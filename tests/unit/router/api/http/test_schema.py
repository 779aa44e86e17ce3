"""Unit tests of decoding: what is wrong with a request is one line that names the field."""

from __future__ import annotations

import json
import time
from typing import Any

import msgspec
import pytest

from baton.api.errors import InvalidRequestError
from router.api.anthropic_messages.request import MessagesRequest
from router.api.http.decoding import decode
from router.api.http.schema import REFUSED, ChatRequest, CompletionRequest, NamedToolChoice
from router.api.openai_responses.request import ResponsesRequest


def body_of(**fields: Any) -> bytes:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}
    return json.dumps(body).encode()


def chat(**fields: Any) -> ChatRequest:
    return decode(body_of(**fields), ChatRequest)[0]


@pytest.mark.parametrize(
    ("fields", "field", "problem"),
    [
        ({"temperature": "hot"}, "temperature", "must be a number or null, got a string"),
        ({"n": 1.5}, "n", "must be an integer or null, got a number that is not an integer"),
        ({"n": True}, "n", "must be an integer or null, got true or false"),
        (
            {"logit_bias": {"five": 1}},
            "logit_bias",
            "must have keys that are an integer, got a string",
        ),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "is needed"),
        (
            {"messages": [{"role": "boss"}]},
            "messages[0].role",
            "must be assistant, developer, system, tool or user, got 'boss'",
        ),
        ({"messages": "hello"}, "messages", "must be a list, got a string"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "is needed"),
        ({"tool_choice": "maybe"}, "tool_choice", "must be auto, none or required, got 'maybe'"),
        (
            {"response_format": {"type": "yaml"}},
            "response_format.type",
            "must be grammar, json, json_object, json_schema, regex or text, got 'yaml'",
        ),
        ({"model": None}, "model", "must be a string, got null"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], field: str, problem: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        chat(**fields)
    assert caught.value.field == field
    assert caught.value.problem.startswith(problem)
    assert "\n" not in str(caught.value)


@pytest.mark.medium
@pytest.mark.parametrize(
    "body",
    [b"", b"{", b'{"model": "m"', b"\xff\xfe", b'"\\ud800"', b"[" * 100_000, b"[]", b"null", b"1"],
)
def test_what_is_no_json_object_is_said_of_the_body(body: bytes) -> None:
    with pytest.raises(InvalidRequestError, match=r"^body: "):
        decode(body, CompletionRequest)


def test_a_missing_field_is_named() -> None:
    with pytest.raises(InvalidRequestError, match=r"^prompt: is needed$"):
        decode(b'{"model": "m"}', CompletionRequest)


def test_null_is_as_if_a_field_was_not_there() -> None:
    given = chat(temperature=None, stop=None, stream=None, tools=None, user=None)
    assert given == chat()


def test_what_clients_send_back_of_earlier_answers_is_passed_over() -> None:
    answer = {
        "role": "assistant", "content": None, "refusal": None, "annotations": [], "audio": None,
        "tool_calls": [{"id": "c", "type": "function", "index": 0,
                        "function": {"name": "f", "arguments": "{}"}}],
    }  # fmt: skip
    (message,) = chat(messages=[answer]).messages
    assert message.tool_calls is not None
    assert message.tool_calls[0].function.name == "f"


def test_a_tool_choice_is_a_word_or_names_a_function() -> None:
    assert chat(tool_choice="auto").tool_choice == "auto"
    named = chat(tool_choice={"type": "function", "function": {"name": "f"}}).tool_choice
    assert isinstance(named, NamedToolChoice)
    assert named.function.name == "f"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b'{"model": "m", "prompt": "abc\xff"}', "prompt"),
        (b'{"model": "m", "prompt": "a", "stop": ["x", "y\xc3"]}', "stop"),
        (b'{"model": "m", "prompt": "a", "metadata": {"who": "\xed\xa0\x80"}}', "who"),
        (b'{"model": "m", "prompt": "\\ud800 is half of it"}', "prompt"),
        (b'{"model": "m", "prompt": "a", "user": "and \\udfff, too"}', "user"),
    ],
)
def test_text_that_is_no_unicode_is_named(body: bytes, field: str) -> None:
    """Text that is no Unicode once caused an internal error, with a traceback."""
    with pytest.raises(InvalidRequestError) as caught:
        decode(body, CompletionRequest)
    assert caught.value.field == field
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("item", ["[]", "{}", "1", '"1":1', '{"role":"user"}', '[{"a":[1]}]'])
def test_a_body_of_too_many_values_is_refused_before_it_is_read(item: str) -> None:
    items = ",".join([item] * (8_000_000 // (len(item) + 1)))
    body = b'{"model": "m", "messages": [' + items.encode() + b"]}"
    began_at = time.process_time()
    with pytest.raises(InvalidRequestError, match=r"^(body: has too many values|messages)"):
        decode(body, ChatRequest)
    assert time.process_time() - began_at < 2


def test_a_long_text_and_a_million_token_ids_are_read() -> None:
    text = "def f(a, b):\n    return {'a': [a, b]}\n" * 30_000
    body = json.dumps({"model": "m", "prompt": text}).encode()
    assert decode(body, CompletionRequest)[0].prompt == text
    body = json.dumps({"model": "m", "prompt": list(range(1_000_000))}).encode()
    assert len(decode(body, CompletionRequest)[0].prompt) == 1_000_000


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"temperatur": 1, "temperature": 1}, ["temperatur"]),
        ({"verbosity": "low", "prediction": {"type": "content"}}, ["verbosity", "prediction"]),
        ({"stream_options": {"usage": True}}, ["stream_options.usage"]),
        ({"structured_outputs": {"regex": "a", "b": None}}, ["structured_outputs.b"]),
        ({"response_format": {"type": "text", "a": {}}}, ["response_format.a"]),
        ({"user": "me", "metadata": {"a": 1}, "store": True}, []),
    ],
)
def test_fields_that_nobody_knows_are_found_and_refused_only_if_that_is_asked_for(
    fields: dict[str, Any], names: list[str]
) -> None:
    """Regression: requests with other servers' fields were errors, but clients send them."""
    body = body_of(**fields)
    assert decode(body, ChatRequest)[1] == names
    if names:
        with pytest.raises(InvalidRequestError) as caught:
            decode(body, ChatRequest, strict=True)
        assert caught.value.field == names[0]
        assert caught.value.problem == "is no field that Baton knows"
    else:
        assert decode(body, ChatRequest, strict=True)[1] == []


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_would_be_missed_is_refused_unless_it_asks_for_nothing(name: str) -> None:
    is_known = name in {field.name for field in msgspec.structs.fields(ChatRequest)}
    kind: Any = MessagesRequest if is_known else ChatRequest
    with pytest.raises(InvalidRequestError) as caught:
        decode(body_of(max_tokens=1, **{name: [1]}), kind)
    assert caught.value.field == name
    nothings: list[Any] = [None, False, []]
    for nothing in nothings:
        assert decode(body_of(max_tokens=1, **{name: nothing}), kind)[1] == []


@pytest.mark.parametrize(
    ("kind", "fields", "field"),
    [
        (ChatRequest, {"structured_outputs": {"whitespace": "x"}}, "structured_outputs.whitespace"),
        (ChatRequest, {"response_format": {"type": "text", "a": 1}}, "response_format.a"),
        (
            ChatRequest,
            {"response_format": {"type": "json_schema", "json_schema": {"properties": {"a": {}}}}},
            "response_format.json_schema.properties",
        ),
        (ChatRequest, {"grammar": {"type": "regex", "value": "a", "b": 1}}, "grammar.b"),
        (
            ResponsesRequest,
            {"input": "x", "text": {"format": {"type": "json_object", "regex": "a"}}},
            "text.format.regex",
        ),
        (
            MessagesRequest,
            {"max_tokens": 1, "output_config": {"format": {"type": "json_schema", "b": 1}}},
            "output_config.format.b",
        ),
    ],
)
def test_nothing_that_may_constrain_an_output_is_passed_over(
    kind: type[Any], fields: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        decode(body_of(**fields), kind)
    assert caught.value.field == field
