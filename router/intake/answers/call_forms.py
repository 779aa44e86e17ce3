"""Call forms: grammars of outputs that are tool calls, in the model family's form, or an answer.

A response format constrains only the answer: the model may still call tools.

start -> answer (fits the format's schema)
      -> calls (begin with the family's mark, or are JSON or Python without a mark)
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.api.errors import InvalidRequestError
from baton.api.structured_output import MAX_TEXT_BYTES
from baton.text.quoted_lark import quoted_lark
from baton.text.schemas.repairs import enforceable_schema
from router.intake.answers.argument_forms import (
    Argument,
    ArgumentRules,
    InexpressibleError,
    ValueForm,
)
from router.intake.parsers import harmony, mistral
from router.intake.parsers.families import CallForm
from router.intake.parsers.harmony import HarmonyForm
from router.intake.parsers.json_calls import BareJsonForm, JsonForm
from router.intake.parsers.mistral import MistralForm
from router.intake.parsers.named import NamedForm
from router.intake.parsers.pythonic import PythonForm
from router.intake.parsers.tagged import TaggedForm

# JSON in calls and answers is spaced as in all other outputs.
_GUIDANCE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_NEWLINE, _COMMA, _QUOTE = '"\\n"', '", "', '"\\""'


@dataclass(frozen=True, slots=True)
class Function:
    """A function that the model may call.

    Attributes:
        parameters: JSON Schema of the arguments.
        held_text: name of the only argument, and a Lark grammar of its text, which all families
            write as a JSON string. None: ``parameters`` constrains the arguments.
    """

    name: str
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object"})
    held_text: tuple[str, str] | None = None


Mark = Callable[[str], str]
"""Function that writes a mark of the family in a grammar, as a special token or as text."""


def answer_or_calls(
    form: CallForm, answer: str, functions: Sequence[Function], mark: Mark, *, several: bool
) -> str:
    """Make a Lark grammar that allows either an answer or calls.

    Args:
        form: the family's marks, and the form of its calls.
        answer: JSON Schema of the answer.
        functions: the functions that may be called.
        mark: writes a mark in the grammar.
        several: whether one output may contain several calls.

    Raises InvalidRequestError if the schemas cannot be enforced.
    """
    if isinstance(form, BareJsonForm) and any(function.held_text for function in functions):
        # An answer and a call both begin with a brace, at which the grammar library's lexer would
        # already choose one of the two.
        raise InvalidRequestError(
            "response_format", "cannot be together with a grammar of a tool's input for this model"
        )
    try:
        head = _final(mark) if isinstance(form, HarmonyForm) else ""
        schema = _json(json.loads(enforceable_schema(answer)))
        start = f"start: {head} answer | calls\nanswer: {schema}\n"
        return start + call_rules(form, functions, mark, several)
    except RecursionError:
        raise InvalidRequestError("tools", "are nested too deeply") from None
    except InexpressibleError as error:
        raise InvalidRequestError("tools", str(error)) from None


def forced_calls(
    form: CallForm, functions: Sequence[Function], mark: Mark, *, several: bool
) -> tuple[str, bool]:
    """Make a Lark grammar that allows only calls; return also whether it has the family's form.

    If the family's form cannot enforce the schemas, the output is one JSON object with ``name`` and
    ``arguments``, which `OneCall` parses.
    """
    try:
        try:
            return f"start: calls\n{call_rules(form, functions, mark, several)}", True
        except InexpressibleError:
            return common_call(functions), False
    except RecursionError:
        raise InvalidRequestError("tools", "are nested too deeply") from None


def common_call(functions: Sequence[Function]) -> str:
    """Make a Lark grammar of one call as a JSON object with ``name`` and ``arguments``."""
    return f"start: {_named_object(functions, 'arguments')}\n{_held_rules(functions)}"


def _final(mark: Mark) -> str:
    """Write the marks that precede the text of an answer in the harmony format."""
    return f'{mark(harmony.CHANNEL)} "final" {mark(harmony.MESSAGE)}'


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
    """Return the JSON Schema of a function's arguments.

    The schema gets an id, so that its references resolve within the schema itself.
    """
    parameters = {**function.parameters, "type": "object"}
    schema = json.loads(enforceable_schema(json.dumps(parameters)))
    return {**schema, "$id": f"urn:baton:tool:{index}"}


def _arguments_rule(function: Function, index: int) -> str:
    """Write the grammar of a function's arguments as one JSON object."""
    if function.held_text is None:
        return _json(_arguments(function, 0))
    name, _ = function.held_text
    return f"{_text(f'{{{json.dumps(name)}: ')} {_held_text(index)} {_text('}')}"


def _held_text(index: int) -> str:
    return f"{_QUOTE} input{index} {_QUOTE}"


def _held_rules(functions: Sequence[Function]) -> str:
    """Write the grammar rules for the texts of custom tools that have a grammar."""
    num_chars = sum(len(one.held_text[1]) for one in functions if one.held_text is not None)
    if num_chars > MAX_TEXT_BYTES:
        problem = f"must have grammars of at most {MAX_TEXT_BYTES} characters, got {num_chars}"
        raise InvalidRequestError("tools", problem)
    rules = []
    for index, function in enumerate(functions):
        if function.held_text is None:
            continue
        try:
            rules.append(f"input{index}: %lark {{\n{quoted_lark(function.held_text[1])}\n}}\n")
        except InvalidRequestError as error:
            problem = f"the grammar of {function.name[:80]!r}: {error.problem}"
            raise InvalidRequestError("tools", problem) from None
    return "".join(rules)


def _text(text: str) -> str:
    """Quote a text for use in a grammar."""
    return json.dumps(text)


def _named_object(functions: Sequence[Function], key: str) -> str:
    """Write the grammar of a call as a JSON object with name and arguments.

    Args:
        key: key of the arguments in the object.
    """
    if any(function.held_text for function in functions):
        ways = []
        for index, function in enumerate(functions):
            head = f'{{"name": {json.dumps(function.name)}, "{key}": '
            ways.append(f"{_text(head)} {_arguments_rule(function, index)} {_text('}')}")
        return "(" + " | ".join(ways) + ")"
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
    """Write one alternative per function: its name, ``before``, JSON arguments, ``behind``."""
    ways = (
        f"{json.dumps(function.name)} {before} {_arguments_rule(function, index)} {behind}"
        for index, function in enumerate(functions)
    )
    return "(" + " | ".join(ways) + ")"


def call_rules(form: CallForm, functions: Sequence[Function], mark: Mark, several: bool) -> str:
    """Write the Lark rules of calls in the family's form; the rule ``calls`` is the first.

    Raises:
        InexpressibleError: this form cannot enforce a function's schema.
        InvalidRequestError: the grammar of a custom tool's text cannot be enforced.
    """
    return _calls(form, functions, mark, several) + _held_rules(functions)


def _calls(form: CallForm, functions: Sequence[Function], mark: Mark, several: bool) -> str:
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
        close += "?"  # models sometimes leave the closing mark out
    if form.is_list:
        opened = " | ".join(f"{mark(one)}" for one in form.opens)
        listed = f'"[" {_repeated("call", _COMMA, several)} "]"{close}'
        return f'calls: ({opened}) " "? {listed}\ncall: {call}\n'
    return (
        f"calls: {_repeated('call', _NEWLINE, several)}\n"
        f"call: {mark(form.opens[0])} {_NEWLINE} {call} {_NEWLINE}{close}\n"
    )


def _tagged(form: TaggedForm, functions: Sequence[Function], mark: Mark, several: bool) -> str:
    opened, closed = mark(form.open), mark(form.close)
    if form.function:
        opened += f" {json.dumps(chr(10) + form.function)}"
    if form.end:
        closed = f"{mark(form.end)} {_NEWLINE} {closed}"
    values, rules, ways = _TaggedValues(form, mark), [], []
    for index, function in enumerate(functions):
        head = json.dumps(f"{function.name}{form.name_end}\n")
        if function.held_text is not None:
            name = json.dumps(function.held_text[0])
            written = f"{values.key(name)} {values.json(_held_text(index))}"
        else:
            found, more = _rules_of(function, index, values, _other_names)
            each = [_tagged_argument(one, values, index) for one in found]
            rules += more
            written = " ".join(each)
        ways.append(f"{head} {written}")
    return (
        f"calls: {_repeated('call', _NEWLINE, several)}\n"
        f"call: {opened} ({' | '.join(ways)}) {closed}\n" + "".join(f"{rule}\n" for rule in rules)
    )


def _rules_of(
    function: Function,
    index: int,
    values: ValueForm,
    other_names: Callable[[Sequence[str], int], list[str]],
) -> tuple[list[Argument], list[str]]:
    """Return a function's arguments and the rules of their values.

    Raises InexpressibleError, which names the function.
    """
    arguments = ArgumentRules(function.parameters, f"f{index}", values, _value_json)
    try:
        found = arguments.arguments()
        return found, [*arguments.rules, *other_names(arguments.names, index)]
    except InexpressibleError as error:
        shown = function.name[:80]
        raise InexpressibleError(f"{shown!r} cannot be strict for this model: {error}") from None


def _tagged_argument(argument: Argument, values: _TaggedValues, index: int) -> str:
    name = json.dumps(argument.name) if argument.name else f"NAME{index}"
    often = "" if argument.is_required else "?" if argument.name else "*"
    return f"({values.key(name)} {argument.value}){often}"


def _other_names(names: Sequence[str], index: int) -> list[str]:
    """Write the terminal of names of arguments that the schema does not list, between tags."""
    listed = "|".join(re.escape(name).replace("/", "\\/") for name in names)
    return [f"NAME{index}: /[^<>\\r\\n]+/" + (f" & ~/({listed})/" if listed else "")]


def _value_json(schema: Any) -> str:
    return _json(json.loads(enforceable_schema(json.dumps(schema))))


class _TaggedValues:
    """Writes the grammar of argument values between tags."""

    def __init__(self, form: TaggedForm, mark: Mark) -> None:
        self._form = form
        self._mark = mark
        is_token = mark(form.value_end) != json.dumps(form.value_end)
        line = "\n" if form.has_lines else ""
        # A closing mark in plain text must be part of the text's terminal; a special token need
        # not.
        self._end = json.dumps(line if is_token else f"{line}{form.value_end}\n")
        self._behind = f"{mark(form.value_end)} {_NEWLINE}" if is_token else ""

    def key(self, name: str) -> str:
        """Write the grammar of an argument's name, with all marks that precede the value."""
        form = self._form
        key = f"{self._mark(form.key)} {name} {self._mark(form.key_end)}"
        if form.value:
            key += f" {_NEWLINE} {self._mark(form.value)}"
        return key + (f" {_NEWLINE}" if form.has_lines else "")

    def json(self, rule: str) -> str:
        return f"{rule} {self._end} {self._behind}"

    def text(self, conditions: Sequence[str]) -> str:
        end = re.escape(self._form.value_end).replace("/", "\\/")
        text = " & ".join(["/(?s:.*)/", *conditions, f"~/(?s:.*){end}(?s:.*)/"])
        return f"({text}) {self._end}"

    def behind_text(self) -> str:
        return self._behind


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
    rules, ways = [], []
    for index, function in enumerate(functions):
        if function.held_text is not None:
            written = f"{json.dumps(f'{function.held_text[0]}=')} {_held_text(index)}"
        else:
            found, more = _rules_of(function, index, _PythonValues(), _other_keys)
            rules += more
            written = _python_arguments(found, index)
        ways.append(f'{json.dumps(f"{function.name}(")} {written} ")"')
    return f"calls: {calls}\ncall: {' | '.join(ways)}\n" + "".join(f"{rule}\n" for rule in rules)


class _PythonValues:
    """Writes the grammar of argument values in Python calls: the values are JSON."""

    def json(self, rule: str) -> str:
        return rule

    def text(self, conditions: Sequence[str]) -> None:
        return None

    def behind_text(self) -> str:
        return ""


def _other_keys(names: Sequence[str], index: int) -> list[str]:
    """Write the terminal of arguments' names that the schema does not list, in Python calls."""
    for name in names:
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            raise InexpressibleError(f"parameter {name[:80]!r} is no name that Python has")
    listed = f" & ~/({'|'.join(names)})/" if names else ""
    return [f"NAME{index}: /[a-zA-Z_][a-zA-Z0-9_]*/{listed}"]


def _python_arguments(arguments: Sequence[Argument], index: int) -> str:
    """Write the grammar of arguments in order, with commas between those that are present."""
    keys = [json.dumps(f"{one.name}=") if one.name else f'NAME{index} "="' for one in arguments]
    each = [f"{key} {one.value}" for key, one in zip(keys, arguments, strict=True)]
    behind = [
        f"({_COMMA} {written})" + ("" if one.is_required else "?" if one.name else "*")
        for one, written in zip(arguments, each, strict=True)
    ]
    ways = []
    for first, one in enumerate(arguments):
        ways.append(" ".join([each[first], *behind[first if not one.name else first + 1 :]]))
        if one.is_required:
            return f"({' | '.join(ways)})"
    return f"({' | '.join(ways)})?" if ways else ""


def _mistral(functions: Sequence[Function], mark: Mark, several: bool) -> str:
    tag, arguments = mark(mistral.TAG), mark(mistral.ARGS)
    listed = _repeated("call", '", "', several)
    named = f"{tag} {_each(functions, f'{arguments}?')}"
    often = "+" if several and tag != '""' else ""  # in this form, each call has a mark of its own
    return (
        f'calls: {tag} " "? "[" {listed} "]" | named{often}\n'
        f"call: {_named_object(functions, 'arguments')}\nnamed: {named}\n"
    )


def _harmony(functions: Sequence[Function], mark: Mark) -> str:
    channel, message = mark(harmony.CHANNEL), mark(harmony.MESSAGE)
    json_mark = f'(" "? {mark(harmony.CONSTRAIN)} "json" | " json")? {message}'
    behind = f'{channel} "commentary" {json_mark}'
    return (
        # After the role, the model may write the channel first or the recipient first
        "calls: first | second\n"
        f'first: {channel} "commentary to=functions." {_each(functions, json_mark)}\n'
        f'second: " to=functions." {_each(functions, behind)}\n'
    )
