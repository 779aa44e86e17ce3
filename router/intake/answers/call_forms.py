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
from router.intake.parsers import harmony, mistral
from router.intake.parsers.families import CallForm
from router.intake.parsers.harmony import HarmonyForm
from router.intake.parsers.json_calls import JsonForm
from router.intake.parsers.mistral import MistralForm
from router.intake.parsers.named import NamedForm
from router.intake.parsers.pythonic import PythonForm
from router.intake.parsers.tagged import TaggedForm

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


def answer_or_calls(
    form: CallForm, answer: str, functions: Sequence[Function], mark: Mark, *, several: bool
) -> str:
    """Make a Lark grammar of an answer, or calls; raises InvalidRequestError of the answer.

    Args:
        form: the marks and the shape of the family's calls.
        answer: a JSON schema.
        several: whether one output may have more than one call.

    Arguments of many large functions are left open, as a grammar's text has a limit.
    """
    try:
        start = f"start: answer | calls\nanswer: {_json(json.loads(enforceable_schema(answer)))}\n"
        num_chars = sum(len(json.dumps(function.parameters)) for function in functions)
        open_ones = [Function(function.name) for function in functions]
        for chosen in (functions if num_chars < MAX_TEXT_BYTES else open_ones, open_ones):
            grammar = start + _rules(form, chosen, mark, several)
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


def _rules(form: CallForm, functions: Sequence[Function], mark: Mark, several: bool) -> str:
    """Write the rules of a family's calls, as Lark does; one of them is ``calls``."""
    match form:
        case JsonForm():
            return _json_calls(form, functions, mark, several)
        case TaggedForm():
            return _tagged(form, functions, mark, several)
        case NamedForm():
            return _named(form, functions, mark, several)
        case PythonForm():
            return _python(form, functions, mark, several)
        case MistralForm():
            return _mistral(functions, mark, several)
        case HarmonyForm():
            return _harmony(functions, mark)
        case _:
            calls = _repeated("call", '"; "', several)
            return f"calls: {calls}\ncall: {_named_object(functions, 'parameters')}\n"


def _json_calls(form: JsonForm, functions: Sequence[Function], mark: Mark, several: bool) -> str:
    call = _named_object(functions, "arguments")
    close = f" {mark(form.close)}" if form.close else ""
    if close and len(form.opens) > 1:
        close += "?"  # not every mark is closed
    if form.is_list:
        opened = " | ".join(f"{mark(one)}" for one in form.opens)
        listed = f'"[" {_repeated("call", _COMMA, several)} "]"{close}'
        return f'calls: ({opened}) " "? {listed}\ncall: {call}\n'
    return (
        f"calls: {_repeated('call', _NEWLINE, several)}\n"
        f"call: {mark(form.opens[0])} {_NEWLINE} {call} {_NEWLINE}{close}\n"
    )


def _tagged(form: TaggedForm, functions: Sequence[Function], mark: Mark, several: bool) -> str:
    line = ' "\\n"' if form.has_lines else ""
    opened, closed = mark(form.open), mark(form.close)
    if form.function:
        opened += f" {json.dumps(chr(10) + form.function)}"
    if form.end:
        closed = f"{mark(form.end)} {_NEWLINE} {closed}"
    key = f"{mark(form.key)} /[^<>\\r\\n]+/ {mark(form.key_end)}"
    if form.value:
        key += f" {_NEWLINE} {mark(form.value)}"
    return (
        f"calls: {_repeated('call', _NEWLINE, several)}\n"
        f"call: {opened} {_names(functions)} {json.dumps(form.name_end + chr(10))} "
        f"argument* {closed}\n"
        f"argument: {key}{line} value\n" + _value(form, mark)
    )


def _value(form: TaggedForm, mark: Mark) -> str:
    """Write the rule of an argument's text, up to the mark behind it and the end of the line."""
    if mark(form.value_end) != json.dumps(form.value_end):  # a token that no text has
        return f"value: TEXT? {mark(form.value_end)} {_NEWLINE}\nTEXT: /(?s:.+)/\n"
    end = ("\n" if form.has_lines else "") + form.value_end + "\n"
    return f"value[suffix={json.dumps(end)}]: /(?s:.*)/\n"


def _named(form: NamedForm, functions: Sequence[Function], mark: Mark, several: bool) -> str:
    separator = mark(form.separator)
    calls = (
        f"calls: {mark(form.all_open)} {_repeated('call', f'{_NEWLINE}?', several)} "
        f"{mark(form.all_close)}\n"
    )
    if form.prefix:
        numbered = _each(functions, f"/:[0-9]{{1,4}}/ {separator}")
        prefix = json.dumps(form.prefix)
        return f"{calls}call: {mark(form.open)} {prefix} {numbered} {mark(form.close)}\n"
    plain = _each(functions, separator)
    if not form.is_fenced:
        return f"{calls}call: {mark(form.open)} {plain} {mark(form.close)}\n"
    fenced = _each(functions, '"\\n```json\\n"', '"\\n```"')
    return (
        f"{calls}call: {mark(form.open)} (fenced | plain) {mark(form.close)}\n"
        f'fenced: "function" {separator} {fenced}\nplain: {plain}\n'
    )


def _python(form: PythonForm, functions: Sequence[Function], mark: Mark, several: bool) -> str:
    calls = f'"[" {_repeated("call", _COMMA, several)} "]"'
    if not form.is_list:
        calls = f"{_NEWLINE}? {_repeated('call', _NEWLINE, several)} {_NEWLINE}?"
    if form.is_marked:
        calls = f"{mark(form.open)} {calls} {mark(form.close)}"
    return (
        f"calls: {calls}\n"
        f'call: {_names(functions)} "(" (argument ({_COMMA} argument)*)? ")"\n'
        'argument: /[a-zA-Z_][a-zA-Z0-9_]*/ "=" value\n'
        f"value: {_json({})}\n"
    )


def _mistral(functions: Sequence[Function], mark: Mark, several: bool) -> str:
    tag, arguments = mark(mistral.TAG), mark(mistral.ARGS)
    listed = _repeated("call", '", "', several)
    named = f"{tag} {_each(functions, f'{arguments}?')}"
    return (
        f'calls: {tag} " "? "[" {listed} "]" | named{"+" if several else ""}\n'
        f"call: {_named_object(functions, 'arguments')}\nnamed: {named}\n"
    )


def _harmony(functions: Sequence[Function], mark: Mark) -> str:
    channel, message = mark(harmony.CHANNEL), mark(harmony.MESSAGE)
    json_mark = f'(" "? {mark(harmony.CONSTRAIN)} "json" | " json")? {message}'
    behind = f'{channel} "commentary" {json_mark}'
    return (
        "calls: first | second\n"  # where the prompt ends: behind a role, or before a recipient
        f'first: {channel} "commentary to=functions." {_each(functions, json_mark)}\n'
        f'second: " to=functions." {_each(functions, behind)}\n'
    )
