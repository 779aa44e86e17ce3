"""Call forms: grammars of an output that is calls, in the form of the model's family, or an answer.

A response format is of the answer's text: a model that may call tools calls them all the same.

start -> answer (fits the format's schema)
      -> calls (begin with the family's mark, or are JSON or Python of their own kind)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.api.errors import InvalidRequestError
from baton.api.structured_output import MAX_TEXT_BYTES
from baton.text.schema_repairs import enforceable_schema
from router.intake.parsers import deepseek, harmony, mistral

# How JSON is written within calls and answers, as everywhere else.
_GUIDANCE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_NEWLINE, _COMMA = '"\\n"', '", "'


@dataclass(frozen=True, slots=True)
class Function:
    """A function that may be called.

    Attributes:
        parameters: a JSON schema that the arguments fit.
    """

    name: str
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object"})


Mark = Callable[[str], str]
"""Writes a mark as a grammar has it: a special token, or a text."""


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a family's calls look.

    Attributes:
        begins: the text that all calls begin with; empty: nothing tells them from an answer.
        rules: makes rules of a Lark grammar; one of them is ``calls``.
    """

    begins: str
    rules: Callable[[Sequence[Function], Mark, bool], str]


def answer_or_calls(
    form: str, answer: str, functions: Sequence[Function], mark: Mark, *, several: bool
) -> str:
    """Make a Lark grammar of an answer, or calls; raises InvalidRequestError of the answer.

    Args:
        form: name of the family's parser of calls.
        answer: a JSON schema.
        several: whether one output may have more than one call.

    Arguments of many large functions are left open, as a grammar's text has a limit.
    """
    try:
        start = f"start: answer | calls\nanswer: {_json(json.loads(enforceable_schema(answer)))}\n"
        num_chars = sum(len(json.dumps(function.parameters)) for function in functions)
        open_ones = [Function(function.name) for function in functions]
        for chosen in (functions if num_chars < MAX_TEXT_BYTES else open_ones, open_ones):
            grammar = start + FORMS[form].rules(chosen, mark, several)
            if len(grammar.encode(errors="surrogatepass")) <= MAX_TEXT_BYTES:
                break
    except RecursionError:
        raise InvalidRequestError("tools", "are nested too deeply") from None
    return grammar


def _json(schema: Any) -> str:
    if not isinstance(schema, dict):
        return f"%json {json.dumps(schema)}"
    guidance = {**_GUIDANCE, **schema.get("x-guidance", {}), "lenient": False}
    return f"%json {json.dumps({**schema, 'x-guidance': guidance})}"


def _repeated(call: str, between: str, several: bool) -> str:
    return f"{call} ({between} {call})*" if several else call


def _names(functions: Sequence[Function]) -> str:
    return "(" + " | ".join(json.dumps(function.name) for function in functions) + ")"


def _arguments(function: Function, index: int) -> dict[str, Any]:
    """Return a schema of arguments that can be part of another one, with references of its own."""
    schema = json.loads(enforceable_schema(json.dumps(dict(function.parameters))))
    return {**schema, "type": "object", "$id": f"urn:baton:tool:{index}"}


def _named_object(functions: Sequence[Function], key: str) -> str:
    """Write the JSON of one call: its name and its arguments."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": function.name},
                key: _arguments(function, index),
            },
            "required": ["name", key],
            "additionalProperties": False,
        }
        for index, function in enumerate(functions)
    ]
    return _json(calls[0] if len(calls) == 1 else {"anyOf": calls})


def _each(functions: Sequence[Function], before: str, behind: str = "") -> str:
    """Write alternatives of a name, what comes between, and JSON of arguments."""
    ways = (
        f"{json.dumps(function.name)} {before} {_json(_arguments(function, 0))} {behind}"
        for function in functions
    )
    return "(" + " | ".join(ways) + ")"


def _hermes(functions: Sequence[Function], mark: Mark, several: bool) -> str:
    call = _named_object(functions, "arguments")
    return (
        f"calls: {_repeated('call', _NEWLINE, several)}\n"
        f"call: {mark('<tool_call>')} {_NEWLINE} {call} {_NEWLINE} {mark('</tool_call>')}\n"
    )


def _llama3_json(functions: Sequence[Function], mark: Mark, several: bool) -> str:
    calls = _repeated("call", '"; "', several)
    return f"calls: {calls}\ncall: {_named_object(functions, 'parameters')}\n"


def _mistral(functions: Sequence[Function], mark: Mark, several: bool) -> str:
    tag, arguments = mark(mistral.TAG), mark(mistral.ARGS)
    listed = _repeated("call", '", "', several)
    named = f"{tag} {_each(functions, f'{arguments}?')}"
    return (
        f'calls: {tag} " "? "[" {listed} "]" | named{"+" if several else ""}\n'
        f"call: {_named_object(functions, 'arguments')}\nnamed: {named}\n"
    )


def _qwen3_coder(functions: Sequence[Function], mark: Mark, several: bool) -> str:
    opened = f'{mark("<tool_call>")} "\\n<function=" {_names(functions)} ">\\n"'
    closed = f'"</function>" {_NEWLINE} {mark("</tool_call>")}'
    return (
        f"calls: {_repeated('call', _NEWLINE, several)}\n"
        f"call: {opened} argument* {closed}\n"
        'argument: "<parameter=" /[^<>\\r\\n]+/ ">\\n" value\n'
        'value[suffix="\\n</parameter>\\n"]: /(?s:.*)/\n'
    )


def _deepseek(functions: Sequence[Function], mark: Mark, several: bool) -> str:
    separator = mark(deepseek.SEPARATOR)
    fenced = _each(functions, '"\\n```json\\n"', '"\\n```"')
    return (
        f"calls: {mark(deepseek.ALL_BEGIN)} {_repeated('call', f'{_NEWLINE}?', several)} "
        f"{mark(deepseek.ALL_END)}\n"
        f"call: {mark(deepseek.BEGIN)} (fenced | plain) {mark(deepseek.END)}\n"
        f'fenced: "function" {separator} {fenced}\nplain: {_each(functions, separator)}\n'
    )


def _pythonic(functions: Sequence[Function], mark: Mark, several: bool) -> str:
    return (
        f'calls: "[" {_repeated("call", _COMMA, several)} "]"\n'
        f'call: {_names(functions)} "(" (argument ({_COMMA} argument)*)? ")"\n'
        'argument: /[a-zA-Z_][a-zA-Z0-9_]*/ "=" value\n'
        f"value: {_json({})}\n"
    )


def _harmony(functions: Sequence[Function], mark: Mark, several: bool) -> str:
    channel, message = mark(harmony.CHANNEL), mark(harmony.MESSAGE)
    json_mark = f'(" "? {mark(harmony.CONSTRAIN)} "json" | " json")? {message}'
    behind = f'{channel} "commentary" {json_mark}'
    return (
        "calls: first | second\n"  # where the prompt ends: behind a role, or before a recipient
        f'first: {channel} "commentary to=functions." {_each(functions, json_mark)}\n'
        f'second: " to=functions." {_each(functions, behind)}\n'
    )


FORMS: dict[str, CallForm] = {
    "hermes": CallForm("<tool_call>", _hermes),
    "llama3_json": CallForm("", _llama3_json),
    "mistral": CallForm(mistral.TAG, _mistral),
    "qwen3_coder": CallForm("<tool_call>", _qwen3_coder),
    "deepseek_v3": CallForm(deepseek.ALL_BEGIN, _deepseek),
    "pythonic": CallForm("", _pythonic),
    "openai": CallForm("", _harmony),
}
