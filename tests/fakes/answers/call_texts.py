"""Texts of calls, read by definition: each family's form as its documentation shows it.

Knows nothing of the parsers and of the grammars. A text that is not exactly of the form is no call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

_DECODER = json.JSONDecoder()
_NAME = r"[\w.\-]+"


@dataclass(frozen=True, slots=True)
class CallText:
    """A call as its text says.

    Attributes:
        arguments: values by name. Where the form has no types, values are texts.
        is_typed: whether the form has types.
    """

    name: str
    arguments: dict[str, Any]
    is_typed: bool = True

    def agrees(self, name: str, arguments: Any) -> bool:
        """Return whether a parser's reading of the call is possible."""
        if name != self.name or not isinstance(arguments, dict):
            return False
        if self.is_typed:
            return _same(arguments, self.arguments)
        return list(arguments) == list(self.arguments) and all(
            _may_be(value, self.arguments[key]) for key, value in arguments.items()
        )


def read_calls(family: str, answer: str) -> list[CallText]:
    """Read the calls at the end of an answer, in order."""
    return list(_READERS[family](answer))


def read_common_call(answer: str) -> list[CallText]:
    """Read an answer that is one call, as one JSON object."""
    found = json.loads(answer)
    assert set(found) == {"name", "arguments"}, answer
    return [CallText(found["name"], found["arguments"])]


def _same(one: Any, other: Any) -> bool:
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def _may_be(value: Any, text: str) -> bool:
    if isinstance(value, str) and value == text:
        return True
    try:
        return _same(value, json.loads(text))
    except ValueError:
        words = {"true": True, "false": False, "none": None, "null": None}
        word = text.strip().lower()
        return word in words and value is words[word]


def _json_between(before: str, behind: str) -> Callable[[str], Iterator[CallText]]:
    """Make a reader of calls that have a head, JSON of the arguments and an end."""
    head = re.compile(before)

    def read(answer: str) -> Iterator[CallText]:
        position = 0
        while found := head.search(answer, position):
            arguments, end = _DECODER.raw_decode(answer, found.end())
            assert answer.startswith(behind, end), answer[end : end + 40]
            yield CallText(found["name"], arguments)
            position = end + len(behind)

    return read


def _hermes(answer: str) -> Iterator[CallText]:
    for found in re.finditer(r"<tool_call>\n([^\n]*)\n</tool_call>", answer):
        call = json.loads(found[1])
        assert list(call) == ["name", "arguments"], found[1]
        yield CallText(call["name"], call["arguments"])


def _tagged(call: str, argument: str) -> Callable[[str], Iterator[CallText]]:
    def read(answer: str) -> Iterator[CallText]:
        for found in re.finditer(call, answer, re.DOTALL):
            values, end = dict[str, Any](), 0
            for one in re.finditer(argument, found["arguments"], re.DOTALL):
                assert one.start() == end, found["arguments"]
                assert one["key"] not in values, "a name comes twice"
                values[one["key"]], end = one["value"], one.end()
            assert end == len(found["arguments"]), found["arguments"]
            yield CallText(found["name"], values, is_typed=False)

    return read


def _python(answer: str) -> Iterator[CallText]:
    for block in re.finditer(r"<function_calls>\n?(.*?)\n?</function_calls>", answer, re.DOTALL):
        position, text = 0, block[1]
        while position < len(text):
            head = re.compile(rf"\n?({_NAME})\(").match(text, position)
            assert head, text[position:]
            values, position = dict[str, Any](), head.end()
            while key := re.compile(r"(?:, )?([A-Za-z_]\w*)=").match(text, position):
                assert key[1] not in values, "a name comes twice"
                values[key[1]], position = _DECODER.raw_decode(text, key.end())
            assert text[position] == ")", text[position:]
            position += 1
            yield CallText(head[1], values)


_SEPARATOR, _CALL_END = "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_FENCED = _json_between(
    rf"<｜tool▁call▁begin｜>function{_SEPARATOR}(?P<name>{_NAME})\n```json\n", f"\n```{_CALL_END}"
)
_PLAIN = _json_between(rf"<｜tool▁call▁begin｜>(?P<name>{_NAME}){_SEPARATOR}(?=\{{)", _CALL_END)
_PARAMETER = r"<parameter=(?P<key>[^>\n]*)>{line}(?P<value>.*?){line}</parameter>\n"
_FUNCTION = rf"<function=(?P<name>{_NAME})>\n(?P<arguments>.*?)</function>\n"


def _deepseek(answer: str) -> Iterator[CallText]:
    """Read calls; each call may be in a code block."""
    for call in answer.split("<｜tool▁call▁begin｜>")[1:]:
        is_fenced = call.startswith(f"function{_SEPARATOR}")
        yield from (_FENCED if is_fenced else _PLAIN)(f"<｜tool▁call▁begin｜>{call}")


_READERS: dict[str, Callable[[str], Iterator[CallText]]] = {
    "qwen3": _hermes,
    "smollm3": _hermes,
    "deepseek_r1": _deepseek,
    "deepseek_v31": _PLAIN,
    "glm45": _tagged(
        rf"<tool_call>(?P<name>{_NAME})\n(?P<arguments>.*?)</tool_call>",
        r"<arg_key>(?P<key>[^<]*)</arg_key>\n<arg_value>(?P<value>.*?)</arg_value>\n",
    ),
    "qwen3_coder": _tagged(
        rf"<tool_call>\n{_FUNCTION}</tool_call>", _PARAMETER.replace("{line}", r"\n")
    ),
    "seed_oss": _tagged(
        rf"<seed:tool_call>\n{_FUNCTION}</seed:tool_call>", _PARAMETER.replace("{line}", "")
    ),
    "kimi_k2": _json_between(
        rf"<\|tool_call_begin\|>functions\.(?P<name>{_NAME}):\d+<\|tool_call_argument_begin\|>",
        "<|tool_call_end|>",
    ),
    "olmo3": _python,
    "gpt_oss": _json_between(
        rf"to=functions\.(?P<name>{_NAME})(?:<\|channel\|>commentary)?"
        r"(?: ?(?:<\|constrain\|>)?json)?<\|message\|>(?=\{)",
        "",
    ),
}
