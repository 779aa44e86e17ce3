"""Unit tests of parsers of calls: the result does not depend on where an output is cut."""

from __future__ import annotations

import json
import time

import pytest

from baton.api.errors import ConfigError
from router.intake.parsers import TOOL_CALL_PARSERS
from router.intake.parsers.base import CallArguments, CallBegins, ParserContext, Reasoning
from router.intake.parsers.choice import OutputParsers
from router.intake.parsers.plain import OneCall, PlainText
from tests.fakes.answers.parsed_outputs import Found, make_parser, parse, put_together

HERMES = '<tool_call>\n{"name": "f", "arguments": {"x": "a < b"}}\n</tool_call>'
F = ("f", '{"x": "a < b"}')
DS = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
DS_END = "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
XML = "<tool_call>\n<function=f>\n<parameter=x>\na\n</parameter>\n</function>\n</tool_call>"

NOTHING: list[tuple[str, str, Found]] = [
    ("hermes", f'<tool_call>{{"name": "g", "arguments": {written}}}</tool_call>', [("g", "{}")])
    for written in ("null", '""', '" "', '"null"', '"{}"', "{}")
]
CASES: list[tuple[str, str, Found]] = [
    ("hermes", "no call", ["no call"]),
    ("hermes", "", []),
    ("hermes", HERMES, [F]),
    ("hermes", f"I look. {HERMES}", ["I look. ", F]),
    ("hermes", f"{HERMES}\n{HERMES}\n", [F, F]),
    ("hermes", f"{HERMES} and so", [F, " and so"]),
    ("hermes", f"{HERMES}\n<tool_call>1</tool_call>", [F, "\n<tool_call>1</tool_call>"]),
    ("hermes", "<tool_call>not json</tool_call>", ["<tool_call>not json</tool_call>"]),
    ("hermes", '<tool_call>{"name": 1}</tool_call>', ['<tool_call>{"name": 1}</tool_call>']),
    ("hermes", '<tool_call>{"name": "f", "arguments": []}</tool_call>x',
     ['<tool_call>{"name": "f", "arguments": []}</tool_call>x']),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>b',
     [("f", '{"a": 1}'), "b"]),
    ("hermes", f"{HERMES[:-12]}{HERMES}", [F, F]),
    ("hermes", '<tool_call>{"name": "g"}', [("g", "{}")]),
    ("hermes", '<tool_call>{"name": "g", "argu', ['<tool_call>{"name": "g", "argu']),
    ("hermes", '<tool_call>{"name": "g", "arguments": {"x": [1,', [("g", '{"x": [1,')]),
    ("hermes", '<tool_call>{"arguments": {"x": 1}, "name": "g"}</tool_call>',
     [("g", '{"x": 1}')]),
    ("hermes", '<tool_call>{"name": "g", "arguments": "{\\"x\\": 1}"}</tool_call>',
     [("g", '{"x": 1}')]),
    ("hermes", '<tool_call>{"name": "g", "arguments": {"x": "</tool_call>\\"}"}}</tool_call>',
     [("g", '{"x": "</tool_call>\\"}"}')]),
    ("hermes", "a <tool_ca", ["a <tool_ca"]),
    ("hermes", "a < b <tool", ["a < b <tool"]),
    ("hermes", "</tool_call>", ["</tool_call>"]),
    ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
     ['<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>']),
    ("llama3_json", '{"name": "f", "parameters": {"x": "a"}}', [("f", '{"x": "a"}')]),
    ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": '
     '{"n": 1}}\n', [("f", "{}"), ("g", '{"n": 1}')]),
    ("llama3_json", '{"name": "Bob", "parameters": {}}', ['{"name": "Bob", "parameters": {}}']),
    ("llama3_json", '{"name": "f"}', ['{"name": "f"}']),
    ("llama3_json", ' {"x": [1, "{"]} so', [' {"x": [1, "{"]} so']),
    ("llama3_json", "Hello {", ["Hello {"]),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"x": "]"}}, {"name": "g", "arguments": '
     '{}}]', [("f", '{"x": "]"}'), ("g", "{}")]),
    ("mistral", 'Look: [TOOL_CALLS]f{"x": 1}[TOOL_CALLS]g[CALL_ID]ab1[ARGS]{}',
     ["Look: ", ("f", '{"x": 1}'), ("g", "{}")]),
    ("mistral", "[TOOL_CALLS] so [TOOL", ["[TOOL_CALLS] so [TOOL"]),
    ("mistral", "[TOOL_CALLS][]", ["[TOOL_CALLS][]"]),
    ("mistral", '[TOOL_CALLS][{"name": 1}]', ['[TOOL_CALLS][{"name": 1}]']),
    ("qwen3_coder", XML, [("f", '{"x": "a"}')]),
    ("qwen3_coder", f"So: {XML}\n{XML}", ["So: ", ("f", '{"x": "a"}'), ("f", '{"x": "a"}')]),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=x>\n1\n\"2\"\né</parameter>\n"
     "<parameter=n>\n3\n</parameter><parameter=o>[1, {\"a\": null}]</parameter>"
     "<parameter=p>\nb c\n</parameter></function></tool_call>",
     [("f", '{"x": "1\\n\\"2\\"\\né", "n": 3, "o": [1, {"a": null}], "p": "b c"}')]),
    ("qwen3_coder", "<function=g></function>", [("g", "{}")]),
    ("qwen3_coder", "<tool_call>{}</tool_call>", ["<tool_call>{}</tool_call>"]),
    ("qwen3_coder", "<function=f><parameter=x>ab", [("f", '{"x": "ab"}')]),
    ("deepseek_v3", f'{DS}function<｜tool▁sep｜>f\n```json\n{{"x": "a"}}\n```{DS_END}',
     [("f", '{"x": "a"}')]),
    ("deepseek_v3", f'So{DS}f<｜tool▁sep｜>{{"x": 1}}<｜tool▁call▁end｜><｜tool▁call▁begin｜>g'
     f"<｜tool▁sep｜>{{}}{DS_END}", ["So", ("f", '{"x": 1}'), ("g", "{}")]),
    ("deepseek_v3", "<｜tool▁call▁begin｜>f g", ["<｜tool▁call▁begin｜>f g"]),
    ("deepseek_v3", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>g h",
     ["<｜tool▁call▁begin｜>f<｜tool▁sep｜>g h"]),
    ("pythonic", "[f(x='a, (b)', n=-1), g()]", [("f", '{"x": "a, (b)", "n": -1}'), ("g", "{}")]),
    ("pythonic", ' [f(x={"a": [1, None, True]}, y=false)]',
     [("f", '{"x": {"a": [1, null, true]}, "y": false}')]),
    ("pythonic", '[f(x="\\"]é\\n")]', [("f", '{"x": "\\"]é\\n"}')]),
    ("pythonic", "[1, 2]", ["[1, 2]"]),
    ("pythonic", "[h(x=1)]", ["[h(x=1)]"]),
    ("pythonic", "I say [f()]", ["I say [f()]"]),
    ("pythonic", "[f(x=1, y=open('z'))] so", [("f", '{"x": 1}'), "y=open('z'))] so"]),
    ("openai", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary "
     'to=functions.f <|constrain|>json<|message|>{"x": 1}<|call|>',
     [Reasoning("Hm."), ("f", '{"x": 1}')]),
    ("openai", ' to=functions.f<|channel|>commentary json<|message|>{"x": 1}<|call|>',
     [("f", '{"x": 1}')]),
    ("openai", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final"
     "<|message|>Yes.<|return|>", [Reasoning("Hm."), "Yes."]),
    ("openai", "<|channel|>commentary<|message|>First.<|end|><|start|>assistant<|channel|>final"
     "<|message|>Then", ["First.Then"]),
    ("openai", "<|channel|>commentary to=functions.f<|message|>no json<|call|>", ["no json"]),
    ("openai", "<|channel|>commentary to=functions.g<|message|>null<|call|>", [("g", "{}")]),
    ("openai", "<|channel|>commentary to=functions.g<|message|><|call|>", [("g", "{}")]),
    ("openai", "<|channel|>commentary to=functions.g<|message|>nullable<|call|>", ["nullable"]),
    ("openai", "<|channel|>commentary to=functions.g<|message|>", []),
    *NOTHING,
    ("hermes", '<tool_call>{"arguments": null, "name": "g"}</tool_call>', [("g", "{}")]),
    ("hermes", '<tool_call>{"name": "g", "arguments": nil}</tool_call>',
     ['<tool_call>{"name": "g", "arguments": nil}</tool_call>']),
    ("llama3_json", '{"name": "g", "parameters": null}', [("g", "{}")]),
    ("llama3_json", '{"name": "g", "parameters": ""}', [("g", "{}")]),
    ("llama3_json", '{"name": "Bob", "parameters": null}', ['{"name": "Bob", "parameters": null}']),
    ("mistral", '[TOOL_CALLS][{"name": "g", "arguments": null}]', [("g", "{}")]),
    ("mistral", "[TOOL_CALLS]g[ARGS]null", [("g", "{}")]),
    ("mistral", "[TOOL_CALLS]g[CALL_ID]ab1[ARGS]{}", [("g", "{}")]),
    ("deepseek_v3", f"{DS}function<｜tool▁sep｜>g\n```json\nnull\n```{DS_END}", [("g", "{}")]),
    ("deepseek_v3", f"{DS}function<｜tool▁sep｜>g\n```json\n```{DS_END}", [("g", "{}")]),
    ("deepseek_v3", f"{DS}g<｜tool▁sep｜>{DS_END}", [("g", "{}")]),
    ("deepseek_v3", f"{DS}g<｜tool▁sep｜>null{DS_END}", [("g", "{}")]),
    ("openai", "Hi", ["Hi"]),
    ("openai", "<|channel|>anal", []),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "expected"), CASES)
def test_calls_and_text_wherever_the_output_is_cut(name: str, text: str, expected: Found) -> None:
    assert parse(make_parser(name), [text]) == expected
    assert parse(make_parser(name), text) == expected
    for cut in range(len(text)):
        assert parse(make_parser(name), [text[:cut], text[cut:]]) == expected


STREAMED = {
    "hermes": ('<tool_call>\n{"name": "f", "arguments": {"x": "', "long text", '"}}\n</tool_call>'),
    "llama3_json": ('{"name": "f", "parameters": {"x": "', "long text", '"}}'),
    "mistral": ('[TOOL_CALLS][{"name": "f", "arguments": {"x": "', "long text", '"}}]'),
    "qwen3_coder": ("<tool_call><function=f><parameter=x>", "long text", "</parameter></function>"),
    "deepseek_v3": ('<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"x": "', "long text", f'"}}{DS_END}'),
    "glm45": (
        "<tool_call>f\n<arg_key>x</arg_key><arg_value>", "long text", "</arg_value></tool_call>"
    ),
    "deepseek_v31": (
        '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"x": "', "long text", f'"}}{DS_END}'
    ),
    "kimi_k2": (
        '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"x": "', "long text",
        '"}<|tool_call_end|><|tool_calls_section_end|>',
    ),
    "seed_oss": (
        "<seed:tool_call>\n<function=f>\n<parameter=x>", "long text",
        "</parameter>\n</function>\n</seed:tool_call>",
    ),
    "granite": (
        '<|tool_call|>[{"name": "f", "arguments": {"x": "', "long text", '"}}]'
    ),
    "phi4_mini_json": (
        'functools[{"name": "f", "arguments": {"x": "', "long text", '"}}]'
    ),
    "nemotron_json": (
        '<TOOLCALL>[{"name": "f", "arguments": {"x": "', "long text", '"}}]</TOOLCALL>'
    ),
    "lfm2": (
        "<|tool_call_start|>[f(", 'x="long text", ', "n=1)]<|tool_call_end|>"
    ),
    "olmo3": (
        "<function_calls>f(", 'x="long text", ', "n=1)</function_calls>"
    ),
    "pythonic": ("[f(", 'x="long text", ', "n=1)]"),
    "openai": (
        '<|channel|>commentary to=functions.f<|message|>{"x": "', "long text", '"}<|call|>'
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TOOL_CALL_PARSERS.names())
def test_arguments_come_as_they_are_written(name: str) -> None:
    before, inside, behind = STREAMED[name]
    parser = make_parser(name)
    parts = list(parser.push(before))
    assert [part.name for part in parts if isinstance(part, CallBegins)] == ["f"]
    shown = "".join(p.text for p in parser.push(inside) if isinstance(p, CallArguments))
    assert "long text" in shown
    (found,) = put_together([*parts, CallArguments(shown), *parser.push(behind), *parser.flush()])
    assert isinstance(found, tuple)
    assert json.loads(found[1])["x"] == "long text"


def test_text_is_shown_as_soon_as_it_can_be_no_tag() -> None:
    parser = make_parser("hermes")
    assert list(parser.push("so <")) == ["so "]
    assert list(parser.push("tool")) == []
    assert list(parser.push("s>")) == ["<tools>"]


@pytest.mark.parametrize("name", ["openai", "llama3_json", "pythonic"])
def test_short_text_is_not_held_back(name: str) -> None:
    assert list(make_parser(name).push("Hi")) == ["Hi"]


def test_each_call_has_an_id_of_its_own_that_its_template_takes() -> None:
    for name, text in (("hermes", HERMES), ("mistral", '[TOOL_CALLS]f{"x": 1}')):
        parser = make_parser(name)
        parts = [*parser.push(text * 2), *parser.flush()]
        ids = [part.call_id for part in parts if isinstance(part, CallBegins)]
        assert len(set(ids)) == 2
        if name == "mistral":
            assert all(len(one) == 9 and one.isalnum() for one in ids)


@pytest.mark.parametrize(("name", "is_short"), [("mistral", True), ("hermes", False)])
def test_the_id_of_a_forced_call_is_one_that_its_template_takes(name: str, is_short: bool) -> None:
    """Mistral's template refused the call in the next turn."""
    parser = OutputParsers(None, name, "none").make(ParserContext({"f": {}}), is_forced=True)
    parts = [*parser.push('{"name": "f", "arguments": {}}'), *parser.flush()]
    (call_id,) = [part.call_id for part in parts if isinstance(part, CallBegins)]
    assert (len(call_id) == 9 and call_id.isalnum()) is is_short


def test_a_forced_call_is_the_whole_output() -> None:
    call = json.dumps({"name": "f", "arguments": {"x": 1}})
    assert parse(OneCall(), call) == [("f", '{"x": 1}')]
    assert parse(OneCall(), call[:20]) == [call[:20]]
    assert parse(OneCall(), call[:-3]) == [("f", '{"x": ')]
    assert parse(OneCall(), []) == []


def test_without_tools_tags_are_text() -> None:
    assert parse(PlainText(), [HERMES, ""]) == [HERMES]


def test_a_name_that_there_is_not_lists_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match="unknown tool-call parser 'x'; known: openai, "):
        TOOL_CALL_PARSERS.load("x")


SIGN = "<｜tool▁call▁begin｜>"
LONG = {
    "a call": "<tool_call>" + "x" * 300_000,
    "an argument": '<tool_call>{"name": "f", "arguments": {"x": "' + "y" * 300_000,
    "quotes": '<tool_call>{"name": "f", "arguments": {"x": "' + '\\"' * 150_000,
    "brackets": '<tool_call>{"name": "f", "arguments": {"x": ' + "[" * 300_000,
    "no name": '<tool_call>{"x": "' + "y" * 300_000,
    "blanks": HERMES + " " * 300_000,
    "tags": "<tool_call></tool_call>" * 15_000,
    "beginnings": "<tool_cal" * 35_000,
    "ends": "<tool_call>" + "</tool_cal" * 30_000,
    "python": "[f(x=" + "[" * 150_000 + "]" * 150_000,
    "strings": '[f(x="' + "a" * 300_000,
    "parameters": "<function=f>" + "<parameter=x>a</parameter>" * 12_000,
    "pairs": "<tool_call>f\n" + "<arg_key>x</arg_key><arg_value>a</arg_value>" * 9_000,
    "kimi": "<|tool_call_begin|>functions.f:0" * 12_000,
    "lists": "<|tool_call|>[" * 10_000 + "functools[" * 10_000 + "<TOOLCALL>[" * 10_000,
    "headers": "<|channel|>" * 28_000,
    "mistral": "[TOOL_CALLS]" * 25_000,
    "deepseek": SIGN * 20_000,
    "objects": '{"x": {"y": 1}, ' * 20_000,
}


READ_BY = {
    "hermes": ("an argument", "quotes", "brackets", "no name", "blanks", "tags", "ends"),
    "llama3_json": ("objects",),
    "mistral": ("mistral",),
    "qwen3_coder": ("parameters", "beginnings"),
    "deepseek_v3": ("deepseek",),
    "glm45": ("pairs", "beginnings"),
    "deepseek_v31": ("deepseek",),
    "kimi_k2": ("kimi",),
    "seed_oss": ("parameters", "beginnings"),
    "granite": ("lists",),
    "phi4_mini_json": ("lists",),
    "nemotron_json": ("lists",),
    "lfm2": ("python", "strings"),
    "olmo3": ("python", "strings"),
    "pythonic": ("python", "strings"),
    "openai": ("headers",),
}


@pytest.mark.medium
@pytest.mark.parametrize("name", TOOL_CALL_PARSERS.names())
@pytest.mark.parametrize(("size", "num_chars"), [(400_000, 400_000), (7, 30_000)])
def test_a_long_output_is_parsed_in_time_that_grows_with_it_only(
    name: str, size: int, num_chars: int
) -> None:
    began_at = time.process_time()
    for kind in READ_BY[name]:
        text = LONG[kind][:num_chars]
        parse(make_parser(name), (text[i : i + size] for i in range(0, len(text), size)))
    assert time.process_time() - began_at < 8  # what is quadratic takes minutes
