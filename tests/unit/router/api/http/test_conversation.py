"""Unit tests of a chat's constraints: a required call matches the function's schema."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from llguidance import LLMatcher

from baton.api.errors import InvalidRequestError
from baton.text.grammars import load_grammar_tokenizer, make_grammar
from baton.text.tokenizer import Tokenizer
from router.api.http.conversation import HeldOutput, held_output
from router.api.http.schema import ChatRequest
from router.intake.parsers.choice import OutputParsers
from tests.fakes.checkpoints.demo_model import DEMO_MODEL

TOKENIZER = Tokenizer(DEMO_MODEL)
GRAMMAR_TOKENIZER = load_grammar_tokenizer(DEMO_MODEL / "tokenizer.json", [4095])


def tool(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def listing(item: dict[str, Any]) -> dict[str, Any]:
    """Parameters as Pydantic writes those of a list of models."""
    return {
        "type": "object",
        "properties": {"items": {"type": "array", "items": {"$ref": "#/$defs/Item"}}},
        "required": ["items"],
        "additionalProperties": False,
        "$defs": {"Item": item},
    }


def fits(tools: list[dict[str, Any]], choice: object, *calls: dict[str, Any], **more: Any) -> bool:
    asked = {"model": "m", "messages": [], "tools": tools, "tool_choice": choice, **more}
    held = held_output(msgspec.convert(asked, ChatRequest), OutputParsers(TOKENIZER))
    assert held is not None
    assert held == HeldOutput(held.output)  # nothing else is said of the output
    matcher = LLMatcher(GRAMMAR_TOKENIZER, make_grammar(held.output))
    assert not matcher.get_error()
    texts = (f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)
    token_ids = TOKENIZER.encode("\n".join(texts))
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


NUMBERS = tool("numbers", listing({"type": "integer"}))
WORDS = tool("words", listing({"enum": ["a", "b"]}))
NODE: dict[str, Any] = {
    "type": "object",
    "properties": {"next": {"$ref": "#"}},
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "words"}}]
)
def test_the_references_of_a_functions_schema_are_its_own(choice: object) -> None:
    tools = [NUMBERS, WORDS]
    assert fits(tools, choice, {"name": "words", "arguments": {"items": ["a", "b"]}})
    assert not fits(tools, choice, {"name": "words", "arguments": {"items": [1]}})
    numbers = {"name": "numbers", "arguments": {"items": [1, 2]}}
    assert fits(tools, choice, numbers) is (choice == "required")


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"properties": {"x": {"type": "integer"}}},
        {"type": ["object", "null"], "properties": {"x": {"type": "integer"}}},
        {"$ref": "#/$defs/P", "$defs": {"P": {"properties": {"x": {"type": "integer"}}}}},
        {"anyOf": [{"properties": {"x": {"type": "integer"}}}, {"type": "null"}]},
        {"allOf": [{"properties": {"x": {"type": "integer"}}}]},
        {"description": "Anything."},
    ],
)
def test_the_arguments_of_a_forced_call_are_an_object(parameters: dict[str, Any]) -> None:
    """Regression: a schema without a type allowed 5, which no parser accepts as arguments."""
    tools = [tool("f", parameters)]
    assert fits(tools, "required", {"name": "f", "arguments": {}})
    for arguments in (5, None, [1], "x"):
        assert not fits(tools, "required", {"name": "f", "arguments": arguments})
    if "x" in json.dumps(parameters):
        assert fits(tools, "required", {"name": "f", "arguments": {"x": 1}})
        assert not fits(tools, "required", {"name": "f", "arguments": {"x": "y"}})


def test_a_function_whose_arguments_are_no_object_cannot_be_forced() -> None:
    message = r"^tools: parameters of 'f' must be of the type object$"
    with pytest.raises(InvalidRequestError, match=message):
        fits([tool("f", {"type": "string"})], "required", {})


def test_a_schema_that_refers_to_itself_is_not_the_call() -> None:
    chain = tool("chain", NODE)
    assert fits([chain], "required", {"name": "chain", "arguments": {"next": {"next": {}}}})
    call = {"name": "chain", "arguments": {}}
    assert not fits([chain], "required", {"name": "chain", "arguments": {"next": call}})


def test_several_calls_may_be_required_but_not_of_a_named_function() -> None:
    """Regression: only one call could be required, in a form unknown to the model."""
    calls = [{"name": "numbers", "arguments": {"items": [n]}} for n in (1, 2)]
    assert fits([NUMBERS], "required", *calls, parallel_tool_calls=True)
    assert not fits([NUMBERS], "required", *calls, parallel_tool_calls=False)
    assert not fits([NUMBERS], "required", *calls)
    named = {"type": "function", "function": {"name": "numbers"}}
    assert fits([NUMBERS], named, calls[0])
    assert not fits([NUMBERS], named, *calls)


LARGE = {"type": "object", "properties": {"x": {"enum": ["x" * 200 + str(i) for i in range(400)]}}}
ANSWER = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}


@pytest.mark.parametrize(
    "fields", [{"response_format": ANSWER}, {}, {"tool_choice": "required"}], ids=json.dumps
)
def test_functions_that_are_too_large_to_be_held_are_refused_by_one_line(
    fields: dict[str, Any],
) -> None:
    """Beside a response format, large functions were called with any arguments."""
    offered = tool("look", LARGE)
    offered["function"]["strict"] = True
    given = {"model": "m", "messages": [], "tools": [offered], **fields}
    problem = r"^tools: need a grammar of at most 65536 bytes, got \d+: offer fewer [^\n]*$"
    with pytest.raises(InvalidRequestError, match=problem):
        held_output(msgspec.convert(given, ChatRequest), OutputParsers(TOKENIZER))
