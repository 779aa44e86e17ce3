"""Unit tests of model families: their outputs are parsed, and their templates are known.

The outputs are of the kinds that other servers test their parsers with.
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from baton.text.tokenizer import Tokenizer
from router.api.http.conversation import parser_context
from router.api.http.schema import ChatRequest
from router.intake.parsers import TOOL_CALL_PARSERS
from router.intake.parsers.base import CallBegins, ParserContext
from router.intake.parsers.choice import OutputParsers
from tests.fakes.answers.parsed_outputs import Found, make_parser, parse
from tests.fakes.checkpoints.demo_model import DEMO_MODEL

WEATHER = ("weather", '{"city": "Bonn"}')
NEWS = ("news", '{"topic": "ice"}')
CASES: list[tuple[str, str, Found]] = [
    (
        "glm45",
        "I look. <tool_call>weather\n    <arg_key>city</arg_key>\n"
        "    <arg_value>Bonn</arg_value>\n    </tool_call>\n    <tool_call>weather\n"
        "<arg_key>city</arg_key>\n<arg_value>Bonn</arg_value>\n</tool_call>",
        ["I look. ", WEATHER, WEATHER],
    ),
    (
        "glm45",
        "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>7</arg_value>\n"
        "<arg_key>n</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
        [("f", '{"x": "7", "n": 3}')],
    ),
    (
        "glm45",
        '<tool_call>f<arg_key>x</arg_key><arg_value>两\n"行"</arg_value></tool_call>',
        [("f", '{"x": "两\\n\\"行\\""}')],
    ),
    ("glm45", "<tool_call>g\n</tool_call>", [("g", "{}")]),
    ("glm45", "<tool_call>g</tool_call> so", [("g", "{}"), " so"]),
    (
        "glm45",
        "<tool_call>f\n<arg_key>n</arg_key>\n<arg_value>1</arg_value>\n<arg_key>x\n"
        "<arg_value>a</arg_value>\n</tool_call>",
        [("f", '{"n": 1}')],
    ),
    (
        "glm45",
        "<tool_call>g\n<arg_key>a</arg_key>\n<arg_value>[1, {}]</arg_value>\n"
        "<tool_call>g\n</tool_call>",
        [("g", '{"a": [1, {}]}'), ("g", "{}")],
    ),
    ("glm45", "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>ab", [("f", '{"x": "ab"}')]),
    ("glm45", "<tool_call>two words</tool_call>", ["<tool_call>two words</tool_call>"]),
    ("glm45", '<tool_call>{"name": "f"}</tool_call>', ['<tool_call>{"name": "f"}</tool_call>']),
    ("glm45", "<tool_call>f\n", ["<tool_call>f\n"]),
    (
        "deepseek_v31",
        "So <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
        '{"city": "Bonn"}<｜tool▁call▁end｜><｜tool▁call▁begin｜>news<｜tool▁sep｜>{"topic": "ice"}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ["So ", WEATHER, NEWS],
    ),
    ("deepseek_v31", "<｜tool▁call▁begin｜>g<｜tool▁sep｜><｜tool▁call▁end｜>", [("g", "{}")]),
    ("deepseek_v31", "<｜tool▁call▁begin｜>g<｜tool▁sep｜>null<｜tool▁call▁end｜>", [("g", "{}")]),
    (
        "deepseek_v31",
        "<｜tool▁call▁begin｜>g<｜tool▁sep｜>no JSON<｜tool▁call▁end｜>",
        ["<｜tool▁call▁begin｜>g<｜tool▁sep｜>no JSON<｜tool▁call▁end｜>"],
    ),
    (
        "kimi_k2",
        "I look. <|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0 "
        '<|tool_call_argument_begin|>{"city": "Bonn"}<|tool_call_end|><|tool_call_begin|>news:1'
        '<|tool_call_argument_begin|> {"topic": "ice"} <|tool_call_end|><|tool_calls_section_end|>',
        ["I look. ", WEATHER, NEWS],
    ),
    (
        "kimi_k2",
        "<|tool_call_begin|>functions.g:0<|tool_call_argument_begin|><|tool_call_end|>",
        [("g", "{}")],
    ),
    (
        "kimi_k2",
        '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"x": "<b>"}',
        [("f", '{"x": "<b>"}')],
    ),
    ("kimi_k2", "<|tool_call_begin|>functions.f:0 so", ["<|tool_call_begin|>functions.f:0 so"]),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_calls_section_end|>Yes.", ["Yes."]),
    (
        "seed_oss",
        "So.\n<seed:tool_call>\n<function=weather>\n<parameter=city>Bonn</parameter>\n"
        "</function>\n</seed:tool_call>",
        ["So.\n", WEATHER],
    ),
    (
        "seed_oss",
        "<seed:tool_call>\n<function=f>\n<parameter=x>one\n two\n</parameter>\n"
        "<parameter=n>3</parameter>\n</function>\n</seed:tool_call>",
        [("f", '{"x": "one\\n two\\n", "n": 3}')],
    ),
    ("seed_oss", "<seed:tool_call>\n<function=g>\n</function>\n</seed:tool_call>", [("g", "{}")]),
    ("seed_oss", "<seed:tool_call>\n</seed:tool_call>", ["<seed:tool_call>\n</seed:tool_call>"]),
    (
        "granite",
        'I look.\n<|tool_call|>[{"name": "weather", "arguments": {"city": "Bonn"}},\n'
        '{"name": "news", "arguments": {"topic": "ice"}}\n]',
        ["I look.\n", WEATHER, NEWS],
    ),
    ("granite", '<|tool_call|>[{"arguments": {"city": "Bonn"}, "name": "weather"}]', [WEATHER]),
    ("granite", '<|tool_call|> [{"name": "g", "arguments": "{}"}]\nSo.', [("g", "{}"), "\nSo."]),
    ("granite", '<|tool_call|>[{"name": "f", "arguments": {"x": ', [("f", '{"x": ')]),
    ("granite", "<|tool_call|>[]", ["<|tool_call|>[]"]),
    ("granite", "<|tool_call|>[ so ]", ["<|tool_call|>[ so ]"]),
    ("granite", '<tool_call> [{"name": "weather", "arguments": {"city": "Bonn"}}]', [WEATHER]),
    ("granite", '<|tool_call|>{"name": "weather", "arguments": {"city": "Bonn"}}', [WEATHER]),
    (
        "hermes",
        '<tool_call> {"name": "weather", "arguments": "{\\"city\\": \\"Bonn\\"}"}\n</tool_call>',
        [("weather", '{"city": "Bonn"}')],
    ),
    (
        "phi4_mini_json",
        'I look.\n<|tool_call|>[{"name": "weather", "arguments": {"city": "Bonn"}},\n'
        '{"name": "news", "arguments": {"topic": "ice"}}\n]<|/tool_call|>',
        ["I look.\n", WEATHER, NEWS],
    ),
    (
        "phi4_mini_json",
        '<|tool_call|>[{"arguments": {"city": "Bonn"}, "name": "weather"}]<|/tool_call|>',
        [WEATHER],
    ),
    (
        "phi4_mini_json",
        '<|tool_call|> [{"name": "g", "arguments": "{}"}]<|/tool_call|>\nSo.',
        [("g", "{}"), "\nSo."],
    ),
    ("phi4_mini_json", '<|tool_call|>[{"name": "f", "arguments": {"x": ', [("f", '{"x": ')]),
    ("phi4_mini_json", "<|tool_call|>[]<|/tool_call|>", ["<|tool_call|>[]<|/tool_call|>"]),
    ("phi4_mini_json", "<|tool_call|>[ so ]<|/tool_call|>", ["<|tool_call|>[ so ]<|/tool_call|>"]),
    (
        "phi4_mini_json",
        'functools[{"name": "weather", "arguments": {"city": "Bonn"}},\n'
        '{"name": "news", "arguments": {"topic": "ice"}}]',
        [WEATHER, NEWS],
    ),
    (
        "phi4_mini_json",
        "Import functools, and use functools.partial.",
        ["Import functools, and use functools.partial."],
    ),
    (
        "nemotron_json",
        'I look.\n<TOOLCALL>[{"name": "weather", "arguments": {"city": "Bonn"}},\n'
        '{"name": "news", "arguments": {"topic": "ice"}}\n]</TOOLCALL>',
        ["I look.\n", WEATHER, NEWS],
    ),
    (
        "nemotron_json",
        '<TOOLCALL>[{"arguments": {"city": "Bonn"}, "name": "weather"}]</TOOLCALL>',
        [WEATHER],
    ),
    (
        "nemotron_json",
        '<TOOLCALL> [{"name": "g", "arguments": "{}"}]</TOOLCALL>\nSo.',
        [("g", "{}"), "\nSo."],
    ),
    ("nemotron_json", '<TOOLCALL>[{"name": "f", "arguments": {"x": ', [("f", '{"x": ')]),
    ("nemotron_json", "<TOOLCALL>[]</TOOLCALL>", ["<TOOLCALL>[]</TOOLCALL>"]),
    ("nemotron_json", "<TOOLCALL>[ so ]</TOOLCALL>", ["<TOOLCALL>[ so ]</TOOLCALL>"]),
    (
        "lfm2",
        "I look. <|tool_call_start|>[weather(city='Bonn'), news(topic='ice')]<|tool_call_end|> So.",
        ["I look. ", WEATHER, NEWS, " So."],
    ),
    (
        "lfm2",
        "<|tool_call_start|>[f(x='a]', n=37, o={'a': [1, 'b']}, p=None, q=True)]<|tool_call_end|>",
        [("f", '{"x": "a]", "n": 37, "o": {"a": [1, "b"]}, "p": null, "q": true}')],
    ),
    (
        "lfm2",
        "<|tool_call_start|>[f(p=null, q=[true, false], r=[])]<|tool_call_end|>",
        [("f", '{"p": null, "q": [true, false], "r": []}')],
    ),
    (
        "lfm2",
        "<|tool_call_start|>[f(x='one\ntwo')]<|tool_call_end|>",
        [("f", '{"x": "one\\ntwo"}')],
    ),
    ("lfm2", "<|tool_call_start|>[f(x='it\\'s')]<|tool_call_end|>", [("f", '{"x": "it\'s"}')]),
    ("lfm2", "<|tool_call_start|>[a.g()]<|tool_call_end|>", [("a.g", "{}")]),
    (
        "lfm2",
        "<|tool_call_start|>[no call]<|tool_call_end|>",
        ["<|tool_call_start|>[no call]<|tool_call_end|>"],
    ),
    (
        "lfm2",
        '<|tool_call_start|>[{"name": "weather", "arguments": {"city": "Bonn"}}]<|tool_call_end|>',
        [WEATHER],
    ),
    ("lfm2", "<|tool_call_start|>[]<|tool_call_end|>", ["<|tool_call_start|>[]<|tool_call_end|>"]),
    (
        "olmo3",
        "I look. <function_calls>weather(city='Bonn')\nnews(topic='ice')</function_calls> So.",
        ["I look. ", WEATHER, NEWS, " So."],
    ),
    (
        "olmo3",
        "<function_calls>f(x='a]', n=37, o={'a': [1, 'b']}, p=None, q=True)</function_calls>",
        [("f", '{"x": "a]", "n": 37, "o": {"a": [1, "b"]}, "p": null, "q": true}')],
    ),
    (
        "olmo3",
        "<function_calls>f(p=null, q=[true, false], r=[])</function_calls>",
        [("f", '{"p": null, "q": [true, false], "r": []}')],
    ),
    ("olmo3", "<function_calls>f(x='one\ntwo')</function_calls>", [("f", '{"x": "one\\ntwo"}')]),
    ("olmo3", "<function_calls>f(x='it\\'s')</function_calls>", [("f", '{"x": "it\'s"}')]),
    ("olmo3", "<function_calls>a.g()</function_calls>", [("a.g", "{}")]),
    (
        "olmo3",
        "<function_calls>no call</function_calls>",
        ["<function_calls>no call</function_calls>"],
    ),
]
# Signs of templates, and the parsers of calls and of reasoning that they ask for.
TEMPLATES: list[tuple[str, str, str]] = [
    (
        "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}"
        "</arg_value>\n</tool_call>",
        "glm45",
        "none",
    ),
    (
        "<tool_call>{function-name}\n<arg_key>k</arg_key><|assistant|>\n<think></think>",
        "glm45",
        "qwen3",
    ),
    (
        "<｜tool▁call▁begin｜>tool_call_name<｜tool▁sep｜>tool_call_arguments<｜tool▁call▁end｜></think>",
        "deepseek_v31",
        "qwen3",
    ),
    (
        "<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + tool['name'] + '```json",
        "deepseek_v3",
        "none",
    ),
    ("<|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>", "kimi_k2", "none"),
    ("<|im_system|>tool_declare<|im_middle|><think></think>", "kimi_k2", "qwen3"),
    (
        "<seed:tool_call>\n<function=name>\n<parameter=x>1</parameter>\n<seed:think>",
        "seed_oss",
        "seed_oss",
    ),
    (
        "<tool_call>\n<function=name>\n<parameter=x>\n1\n</parameter>\n<think>",
        "qwen3_coder",
        "qwen3",
    ),
    ("respond only with <|tool_call|> followed by a JSON list of tools used", "granite", "none"),
    ('<tool_call>\n{"name": <function-name>}\n</tool_call>', "hermes", "none"),  # Granite 4
    (
        "a json object within <tool_call></tool_call> XML tags <think>\n\n</think>\n",
        "hermes",
        "qwen3",
    ),  # SmolLM3
    ("formatted as functools[{name: ..., arguments: ...}, ...]", "phi4_mini_json", "none"),
    ("<|tool_call|>{}<|/tool_call|>", "phi4_mini_json", "none"),
    ("<TOOLCALL>[{}]</TOOLCALL><think></think>", "nemotron_json", "qwen3"),
    ("<|tool_call_start|>[<|tool_call_end|>", "lfm2", "none"),
    ("List of tools: <|tool_list_start|>", "lfm2", "none"),
    ("<function_calls>\nf(x=1)\n</function_calls>", "olmo3", "none"),
    ("<function_calls></function_calls><|im_start|>assistant\n<think>", "olmo3", "qwen3"),
]


@pytest.mark.parametrize(("name", "text", "expected"), CASES)
def test_an_output_is_read_wherever_it_is_cut(name: str, text: str, expected: Found) -> None:
    assert parse(make_parser(name), [text]) == expected
    assert parse(make_parser(name), text) == expected
    for cut in range(len(text)):
        assert parse(make_parser(name), [text[:cut], text[cut:]]) == expected


@pytest.mark.parametrize(("shown", "calls", "reasoning"), TEMPLATES)
def test_a_template_tells_the_family(
    tmp_path: Path, shown: str, calls: str, reasoning: str
) -> None:
    template = tmp_path / "chat_template.jinja"
    template.write_text(
        "{%- if tools -%}{{ tools | tojson }}{%- endif -%}{% raw %}" + shown + "{% endraw %}"
        "{%- for message in messages -%}{{ message['content'] }}{%- endfor -%}",
        encoding="utf-8",
    )
    parsers = OutputParsers(Tokenizer(DEMO_MODEL, chat_template=template))
    assert (parsers.tool_call_parser, parsers.reasoning_parser) == (calls, reasoning)


def ids_of(name: str, text: str, *, is_forced: bool = False, num_calls: int = 0) -> list[str]:
    """Return the ids of the calls in an output."""
    context = ParserContext({"weather": {}}, num_calls=num_calls)
    parser = OutputParsers(None, name, "none").make(context, is_forced=is_forced)
    parts = [*parser.push(text), *parser.flush()]
    return [part.call_id for part in parts if isinstance(part, CallBegins)]


FORCED = '{"name": "weather", "arguments": {"city": "Bonn"}}'
# What an id looks like where a conversation has two calls already.
IDS = {"mistral": r"[0-9a-f]{9}", "kimi_k2": r"functions\.weather:2"}


@pytest.mark.parametrize("name", TOOL_CALL_PARSERS.names())
def test_a_forced_call_is_read_and_has_an_id_as_the_family_writes_it(name: str) -> None:
    (call_id,) = ids_of(name, FORCED, is_forced=True, num_calls=2)
    assert re.fullmatch(IDS.get(name, r"call_[0-9a-f]{32}"), call_id)


def test_an_id_that_a_model_wrote_stays() -> None:
    """Kimi's templates show a result by its id, and the model counts on from it."""
    mark = "<|tool_call_begin|>"
    text = "".join(
        f"{mark}{written}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
        for written in ("functions.weather:7", "weather:8", "weather")
    )
    assert ids_of("kimi_k2", text, num_calls=2) == [
        "functions.weather:7", "weather:8", "functions.weather:4"
    ]  # fmt: skip


def test_calls_of_a_conversation_are_counted() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
    ]
    request = msgspec.convert({"model": "m", "messages": messages}, ChatRequest)
    assert parser_context(request, "").num_calls == 2
