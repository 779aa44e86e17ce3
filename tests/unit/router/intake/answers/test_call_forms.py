"""Unit tests of call forms: an output is a matching answer, or calls that the parser can read."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher

from baton.api.structured_output import MAX_TEXT_BYTES
from router.intake.answers.call_forms import Function
from router.intake.parsers import TOOL_CALL_PARSERS
from router.intake.parsers.base import ParserContext
from router.intake.parsers.pythonic import PythonForm
from router.intake.parsers.tagged import TaggedForm
from tests.fakes.answers.family_grammars import EOS, FamilyTokens, marks_of
from tests.fakes.answers.parsed_outputs import parse

ANSWER = json.dumps(
    {
        "type": "object",
        "properties": {"done": {"type": "boolean"}},
        "required": ["done"],
        "additionalProperties": False,
    }
)
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Bonn", "Rome"]}, "days": {"$ref": "#/$defs/Days"}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"Days": {"type": "integer", "minimum": 1, "maximum": 9}},
}
FUNCTIONS = [Function("weather", CITY), Function("now")]
ARGUMENTS = '{"city": "Bonn", "days": 3}'
# What each family writes for one call of weather, and one of now.
CALLS = {
    "hermes": f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "llama3_json": f'{{"name": "weather", "parameters": {ARGUMENTS}}}; '
    '{"name": "now", "parameters": {}}',
    "mistral": f'[TOOL_CALLS] [{{"name": "weather", "arguments": {ARGUMENTS}}}, '
    '{"name": "now", "arguments": {}}]',
    "qwen3_coder": "<tool_call>\n<function=weather>\n<parameter=city>\nBonn\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
    f"```json\n{ARGUMENTS}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>now<｜tool▁sep｜>{{}}"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "glm45": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Bonn</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
    f"{ARGUMENTS}<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{{}}"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
    f"<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|><|tool_call_begin|>functions.now:1"
    "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
    "seed_oss": "<seed:tool_call>\n<function=weather>\n<parameter=city>Bonn</parameter>\n"
    "<parameter=days>3</parameter>\n</function>\n</seed:tool_call>\n"
    "<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>",
    "granite": f'<|tool_call|>[{{"name": "weather", "arguments": {ARGUMENTS}}}, '
    '{"name": "now", "arguments": {}}]',
    "phi4_mini_json": f'functools[{{"name": "weather", "arguments": {ARGUMENTS}}}, '
    '{"name": "now", "arguments": {}}]',
    "nemotron_json": f'<TOOLCALL>[{{"name": "weather", "arguments": {ARGUMENTS}}}, '
    '{"name": "now", "arguments": {}}]</TOOLCALL>',
    "lfm2": '<|tool_call_start|>[weather(city="Bonn", days=3), now()]<|tool_call_end|>',
    "olmo3": '<function_calls>\nweather(city="Bonn", days=3)\nnow()\n</function_calls>',
    "pythonic": '[weather(city="Bonn", days=3), now()]',
}
ONE_CALL = {
    "openai": "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>" + ARGUMENTS,
    "mistral": f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
    f"{ARGUMENTS}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
}


class Held:
    """An output that a grammar of a family holds, over the demo model's tokens.

    Args:
        special: special tokens that the vocabulary has beside the model's own.
    """

    def __init__(self, folder: Path, form: str, special: list[str], **options: Any) -> None:
        self._family = FamilyTokens(folder, form, special)
        self.tokenizer, self.parsers = self._family.tokenizer, self._family.parsers
        functions = options.pop("functions", FUNCTIONS)
        options = {"several": True, **options}
        self._is_either = not options.pop("free_text", False)
        if self._is_either:
            text = self.parsers.answer_or_calls(ANSWER, functions, **options)
        else:
            text = self.parsers.text_or_calls(functions, **options)
        assert text is not None
        self.grammar = text

    def matcher(self) -> LLMatcher:
        return self._family.matcher(self.grammar)

    def fits(self, text: str) -> bool:
        return self._family.fits(self.grammar, text)

    def parse(self, text: str) -> list[Any]:
        context = ParserContext({function.name: function.parameters for function in FUNCTIONS})
        make = self.parsers.make
        return parse(make(context, is_constrained=True, is_either=self._is_either), text)


def has_json(form: str) -> bool:
    """Say whether a family writes arguments as JSON, which a grammar holds to a schema."""
    return not isinstance(TOOL_CALL_PARSERS.load(form).form, TaggedForm | PythonForm)


def as_answer(form: str, text: str) -> str:
    """Write an answer's text as a family does: one writes a header first."""
    return f"<|channel|>final<|message|>{text}" if form == "openai" else text


@pytest.mark.parametrize("form", TOOL_CALL_PARSERS.names())
@pytest.mark.parametrize("are_special", [False, True])
def test_an_output_is_an_answer_or_calls(tmp_path: Path, form: str, are_special: bool) -> None:
    held = Held(tmp_path, form, marks_of(form) if are_special else [])
    answer = as_answer(form, '{"done": true}')
    assert held.fits(answer)
    assert held.parse(answer) == ['{"done": true}']
    for text in ("Hello", "{}", '{"done": 1}', '{"done": true} {"done": true}', ""):
        assert not held.fits(text)
    for text in filter(None, (CALLS.get(form), ONE_CALL.get(form))):
        assert held.fits(text)
        found = held.parse(text)
        assert [name for name, _ in found] == ["weather", "now"][: len(found)]
        assert len(found) == (2 if text == CALLS.get(form) else 1)
        assert json.loads(found[0][1])["city"] == "Bonn"
        if has_json(form):
            assert not held.fits(text.replace("Bonn", "Paris"))
        assert not held.fits(text.replace("weather", "other"))


@pytest.mark.parametrize("form", sorted(CALLS))
def test_parallel_calls_may_be_switched_off(tmp_path: Path, form: str) -> None:
    held = Held(tmp_path, form, [], several=False)
    assert held.fits('{"done": true}')
    assert not held.fits(CALLS[form])


def test_an_answer_that_quotes_a_call_is_no_call(tmp_path: Path) -> None:
    held = Held(tmp_path, "hermes", [])
    text = json.dumps({"done": CALLS["hermes"]})
    assert held.parse(text) == [text]


def test_arguments_are_open_where_the_function_is_not_strict(tmp_path: Path) -> None:
    held = Held(tmp_path, "hermes", [])
    assert held.fits('<tool_call>\n{"name": "now", "arguments": {"x": [1, "a"]}}\n</tool_call>')
    assert not held.fits('<tool_call>\n{"name": "now", "arguments": 5}\n</tool_call>')


def test_functions_with_long_descriptions_are_held_to_their_schemas(tmp_path: Path) -> None:
    """Functions of more than 64 KiB, most of it descriptions, were left open."""
    described = {**CITY, "description": "x" * MAX_TEXT_BYTES}
    held = Held(tmp_path, "hermes", [], functions=[Function("weather", described)])
    call = '<tool_call>\n{{"name": "weather", "arguments": {}}}\n</tool_call>'
    assert held.fits(call.format('{"city": "Bonn", "days": 1}'))
    assert not held.fits(call.format('{"city": 1}'))


@pytest.mark.parametrize("form", TOOL_CALL_PARSERS.names())
def test_whatever_is_drawn_is_an_answer_or_calls(tmp_path: Path, form: str) -> None:
    held = Held(tmp_path, form, marks_of(form))
    rng, kinds = random.Random(form), set()
    for _ in range(12):
        matcher = held.matcher()
        token_ids: list[int] = []
        while not matcher.is_stopped() and len(token_ids) < 300:
            mask = matcher.compute_bitmask()
            allowed = [i for i in range(len(mask) * 8) if mask[i // 8] >> (i % 8) & 1]
            token_id = EOS if EOS in allowed and rng.random() < 0.7 else rng.choice(allowed)
            matcher.consume_token(token_id)
            token_ids.append(token_id)
        if not matcher.is_stopped():
            continue  # a long text within an argument
        shown = held.parsers.shown_token_ids(with_tools=True) | held.tokenizer.special_token_ids
        kept = [one for one in token_ids if one != EOS or one not in shown]
        text = held.tokenizer.decode(kept, skip_special_tokens=False)
        found = held.parse(text)
        kinds.add(type(found[0]))
        if isinstance(found[0], str):
            assert as_answer(form, *found) == text
            text = found[0]
            assert isinstance(json.loads(text)["done"], bool)
            continue
        for name, arguments in found:
            value = json.loads(arguments)
            assert isinstance(value, dict)
            if name == "weather" and has_json(form):
                assert value["city"] in ("Bonn", "Rome")
                assert 1 <= value["days"] <= 9
    assert kinds


STRICT = [Function("weather", CITY), Function("now")]


@pytest.mark.parametrize("form", TOOL_CALL_PARSERS.names())
@pytest.mark.parametrize("are_special", [False, True])
def test_calls_of_strict_functions_fit_from_their_first_mark_on(
    tmp_path: Path, form: str, are_special: bool
) -> None:
    if form == "openai" and not are_special:
        pytest.skip("any text may be a header")
    held = Held(
        tmp_path, form, marks_of(form) if are_special else [], functions=STRICT, free_text=True
    )
    begins = TOOL_CALL_PARSERS.load(form).form.begins
    for text in ("Hello.", "", "1 < 2, <b>", '[1] is no "call"'[form == "pythonic" :]):
        answer = as_answer(form, text)
        assert held.fits(answer), text
        assert "".join(held.parse(answer)) == text
    for call in filter(None, (CALLS.get(form), ONE_CALL.get(form))):
        assert held.fits(call)
        assert not held.fits(call.replace("Bonn", "Bern"))
        assert not held.fits(call.replace("weather", "other"))
        assert not held.fits(call.replace("3", "33"))
        if begins:
            assert held.fits(f"I look.\n{call}")
            assert not held.fits(f"I look.\n{call.replace('Bonn', 'Bern')}")
            before, *found = held.parse(f"I look.\n{call}")
            assert before.strip() == "I look."
            assert json.loads(found[0][1]) == {"city": "Bonn", "days": 3}
    for mark in begins:
        assert not held.fits(f"So {mark} is free text.")


@pytest.mark.parametrize("form", TOOL_CALL_PARSERS.names())
def test_whatever_is_drawn_for_strict_functions_fits(tmp_path: Path, form: str) -> None:
    """Models that begin calls often write arguments in order, and leave out what is optional."""
    parameters: dict[str, Any] = {
        **CITY,
        "properties": {
            **CITY["properties"],
            "note": {"type": "string", "maxLength": 3},
            "unit": {"type": ["string", "null"], "enum": ["C", "F", None]},
            "kind": {"anyOf": [{"type": "string", "enum": ["a", "b"]}, {"type": "null"}]},
            "word": {"anyOf": [{"type": "string"}, {"type": "integer"}], "default": 1},
            "tags": {"type": "array", "items": {"type": "integer", "maximum": 9}, "maxItems": 2},
        },
    }
    held = Held(
        tmp_path, form, marks_of(form),
        functions=[Function("weather", parameters)], free_text=True,
    )  # fmt: skip
    rng, num_calls = random.Random(form), 0
    validator = jsonschema.Draft202012Validator(parameters)
    marks = {held.tokenizer.special_token_id(mark) for mark in marks_of(form)}
    for _ in range(12):
        matcher = held.matcher()
        token_ids: list[int] = []
        while not matcher.is_stopped() and len(token_ids) < 400:
            mask = matcher.compute_bitmask()
            allowed = [i for i in range(len(mask) * 8) if mask[i // 8] >> (i % 8) & 1]
            likely = [one for one in allowed if one in marks]
            token_id = EOS if EOS in allowed and rng.random() < 0.2 else rng.choice(allowed)
            if likely and rng.random() < 0.7:
                token_id = rng.choice(likely)
            matcher.consume_token(token_id)
            token_ids.append(token_id)
        if not matcher.is_stopped():
            continue
        text = held.tokenizer.decode(
            [one for one in token_ids if one != EOS], skip_special_tokens=False
        )
        context = ParserContext({"weather": parameters})
        for part in parse(held.parsers.make(context, is_constrained=True), text):
            if isinstance(part, tuple):
                num_calls += 1
                name, arguments = part
                assert name == "weather", text
                assert validator.is_valid(json.loads(arguments)), text
    if TOOL_CALL_PARSERS.load(form).form.begins:
        assert num_calls
