"""Tests that every output of a grammar of calls parses as valid calls."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from baton.api.errors import InvalidRequestError
from router.intake.answers.call_forms import Function
from router.intake.parsers import TOOL_CALL_PARSERS
from tests.fakes.answers.family_grammars import FamilyTokens, marks_of
from tests.fakes.answers.structured_cases import make_schema

LARK = """\
start: edit+
edit: ("+" | "-") /[a-c"\\\\]{0,3}/ NL
NL: /\\n/
"""
PATCH = Function("patch", held_text=("input", LARK))
# The parser reads the text of a grammar as JSON in every form.
PATCH_TOOL: dict[str, Any] = {"type": "object", "properties": {"input": {}}}
ODD: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["1", "true", "a/b", "</x>", 'say "a"']},
        "when": {"type": "string", "format": "date"},
        "code": {"type": "string", "pattern": "^[A-F]{2}\\d{1,2}(/x)?$"},
        "short": {"type": "string", "minLength": 2, "maxLength": 4},
        "maybe": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]},
        "number": {"type": ["integer", "string"], "minimum": 3, "maximum": 5, "maxLength": 4},
        "listed": {"type": "array", "items": {"$ref": "#/$defs/Item"}, "maxItems": 2},
        "flag": {"type": "boolean"},
        "one": {"const": "é\nb"},
    },
    "required": ["kind", "short", "maybe", "listed"],
    "additionalProperties": False,
    "$defs": {"Item": {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}},
                       "required": ["n"], "additionalProperties": False}},
}  # fmt: skip
# What was refused, read as another type, or made the library panic.
RARE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "empty": {"enum": ["", "a", None]},
        "large": {"type": "number"},
        "numbers": {"type": "array", "items": {"type": "number"}, "maxItems": 2},
        "base": {"$ref": "#/components/schemas/Base"},
        "both": {"allOf": [{"$ref": "#/components/schemas/Base"}, {"required": ["n"]}]},
        "other": {"type": "string", "maxLength": 3, "not": {"enum": ["", "no"]}},
        "step": {"type": "number", "multipleOf": 5, "minimum": 0, "maximum": 100},
    },
    "required": ["empty", "large", "numbers", "both", "other", "step"],
    "additionalProperties": False,
    "components": {"schemas": {"Base": {
        "type": "object", "properties": {"n": {"type": "boolean"}}, "additionalProperties": False,
        "example": {"n": True},
    }}},
}  # fmt: skip
UNION = {"anyOf": [{"type": "object", "properties": {"x": {"const": 1}}, "required": ["x"],
                    "additionalProperties": False}]}  # fmt: skip


def forms(*marked: bool) -> pytest.MarkDecorator:
    cases = [(form, special) for form in TOOL_CALL_PARSERS.names() for special in marked]
    return pytest.mark.parametrize(("form", "are_special"), cases)


def make_tokens(folder: Path, form: str, are_special: bool) -> FamilyTokens:
    return FamilyTokens(folder, form, marks_of(form) if are_special else [])


def check(found: list[Any], schemas: dict[str, Any], tokens: FamilyTokens) -> None:
    """Check that all parts of an output are calls of functions, with arguments that fit."""
    assert found
    for part in found:
        assert isinstance(part, tuple), found
        name, written = part
        arguments = json.loads(written)
        if name == "patch":
            assert tokens.fits(LARK, arguments["input"]), found
        else:
            jsonschema.validate(arguments, schemas[name])


@forms(False, True)
def test_a_forced_call_fits_its_schema_or_its_grammar(
    tmp_path: Path, form: str, are_special: bool
) -> None:
    tokens, rng = make_tokens(tmp_path, form, are_special), random.Random(form)
    num_calls = 0
    for round_number in range(4):
        schemas = {"odd": ODD, "some": make_schema(rng, depth=3)}
        if isinstance(schemas["some"].get("properties"), dict) and form in PYTHONIC:
            schemas["some"] = {"type": "object", "properties": {"x": schemas["some"]}}
        functions = [Function(name, schema) for name, schema in schemas.items()]
        chosen = [[PATCH], functions, [functions[1]], [*functions, PATCH]][round_number % 4]
        grammar, is_common = tokens.parsers.forced_calls(chosen, several=True)
        assert not is_common or form == "none"
        text = tokens.draw(grammar, rng)
        if text is None:
            continue
        tools = {**schemas, "patch": PATCH_TOOL}
        found = tokens.parse(text, tools, is_constrained=True)
        num_calls += len(found)
        check(found, schemas, tokens)
    assert num_calls


@forms(True)
def test_what_is_rare_in_schemas_is_held_in_the_forms_of_families(
    tmp_path: Path, form: str, are_special: bool
) -> None:
    tokens, rng = make_tokens(tmp_path, form, are_special), random.Random(form)
    grammar, is_common = tokens.parsers.forced_calls([Function("rare", RARE)], several=False)
    assert not is_common
    num_calls = 0
    for _ in range(3):
        text = tokens.draw(grammar, rng, likely='"]}')
        if text is not None:
            found = tokens.parse(text, {"rare": RARE}, is_constrained=True)
            num_calls += len(found)
            check(found, {"rare": RARE}, tokens)
    assert num_calls


PYTHONIC = ("pythonic", "olmo3", "lfm2")  # names of arguments are names that Python has


@pytest.mark.parametrize("form", ["qwen3_coder", "pythonic"])
def test_what_a_form_cannot_hold_is_forced_in_the_common_form(tmp_path: Path, form: str) -> None:
    tokens = make_tokens(tmp_path, form, are_special=False)
    functions = [Function("either", UNION), PATCH]
    grammar, is_common = tokens.parsers.forced_calls(functions, several=True)
    assert is_common
    for call in (
        {"name": "either", "arguments": {"x": 1}},
        {"name": "patch", "arguments": {"input": '+a"\n'}},
    ):
        assert tokens.fits(grammar, json.dumps(call))
        (found,) = tokens.parse(json.dumps(call), {}, is_forced=True)
        assert found == (call["name"], json.dumps(call["arguments"]))
    assert not tokens.fits(grammar, '{"name": "patch", "arguments": {"input": "x"}}')
    with pytest.raises(InvalidRequestError, match=r"^tools: 'either' cannot be .*: anyOf is not"):
        tokens.parsers.text_or_calls(functions, several=True)


@forms(False, True)
def test_a_text_may_end_in_calls_that_fit(tmp_path: Path, form: str, are_special: bool) -> None:
    tokens, rng = make_tokens(tmp_path, form, are_special), random.Random(form)
    functions = [Function("odd", ODD), PATCH]
    grammar = tokens.parsers.text_or_calls(functions, several=True)
    if form == "openai" and not are_special:
        assert grammar is None  # any text may be a header
        return
    assert grammar is not None
    tools = {"odd": ODD, "patch": PATCH_TOOL}
    text = "I look.\n" if form != "openai" else "<|channel|>final<|message|>I look."
    assert tokens.fits(grammar, text)
    forced, _ = tokens.parsers.forced_calls([PATCH], several=False)
    num_calls = 0
    for _ in range(6):
        call = tokens.draw(forced, rng)
        if call is None:
            continue
        num_calls += 1
        assert tokens.fits(grammar, call), call
        check(tokens.parse(call, tools), {}, tokens)
        if form == "openai":
            before = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
            assert tokens.fits(grammar, before + call)
            assert tokens.parse(before + call, tools)[0] == "I look."
        if not call.lstrip().startswith(("{", "[{", "[patch", "<|channel|>", "to=")):
            assert tokens.fits(grammar, text + call), call
            said, *found = tokens.parse(text + call, tools)
            assert said == text or said == text.rstrip()
            check(found, {}, tokens)
        assert not tokens.fits(grammar, call.replace("+", "*").replace("-", "*"))
    assert num_calls


@pytest.mark.parametrize("are_special", [False, True])
def test_a_text_and_its_calls_have_no_thought_within(tmp_path: Path, are_special: bool) -> None:
    """The thought precedes the grammar."""
    special = ["<think>", "</think>", *(marks_of("hermes") if are_special else [])]
    tokens = FamilyTokens(tmp_path, "hermes", special, thoughts="qwen3")
    grammar = tokens.parsers.text_or_calls([PATCH], several=True)
    assert grammar is not None
    call = '<tool_call>\n{"name": "patch", "arguments": {"input": "+a\\n"}}\n</tool_call>'
    for text in (call, f"Well.\n{call}\n{call}", "Well."):
        assert tokens.fits(grammar, text)
    for text in (
        f"<think>\nHm.\n</think>\n\n{call}",
        f"Hm.</think>{call}",
        call.replace("+a", "a"),
    ):
        assert not tokens.fits(grammar, text)
