"""Call forms: grammars of an output that is calls, in the form of the model's family, or an answer.

A response format is of the answer's text: a model that may call tools calls them all the same.

start -> answer (fits the format's schema)
      -> calls (begin with the family's mark, or are JSON or Python of their own kind)

Where strict functions are offered and no format is asked for, the answer is any text, and calls may
stand behind a text:

start -> text
      -> text calls
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.api.errors import InvalidRequestError
from baton.api.structured_output import MAX_TEXT_BYTES
from baton.text.schema_repairs import enforceable_schema
from router.intake.answers.strict_arguments import Argument, in_order, strict_arguments
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
        is_strict: the arguments must fit; else they fit where a family's form allows that.
    """

    name: str
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object"})
    is_strict: bool = False


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
        schema = _json(json.loads(enforceable_schema(answer)))
    except RecursionError:
        raise InvalidRequestError("tools", "are nested too deeply") from None
    start = f"start: answer | calls\nanswer: {schema}\n"
    if isinstance(form, HarmonyForm):
        start = f"start: final answer | calls\nanswer: {schema}\nfinal: {_final(mark)}\n"
    return start + _fitting_calls(form, functions, mark, several, len(start.encode()))


def text_or_calls(
    form: CallForm, functions: Sequence[Function], mark: Mark, *, several: bool
) -> str:
    """Make a Lark grammar of a text, of calls, or of calls behind a text.

    Takes what `answer_or_calls` does. Raises InvalidRequestError of tools that cannot be strict.
    """
    start = _free_text(form, mark)
    return start + _fitting_calls(form, functions, mark, several, len(start.encode()))


def _fitting_calls(
    form: CallForm, functions: Sequence[Function], mark: Mark, several: bool, num_bytes: int
) -> str:
    """Write the rules of calls; where the grammar is too large, arguments are left open."""
    try:
        num_chars = sum(len(json.dumps(function.parameters)) for function in functions)
        if num_chars < MAX_TEXT_BYTES:
            rules = _rules(form, functions, mark, several)
            if num_bytes + len(rules.encode(errors="surrogatepass")) <= MAX_TEXT_BYTES:
                return rules
        if any(function.is_strict for function in functions):
            raise InvalidRequestError(
                "tools",
                f"of strict functions must have at most {MAX_TEXT_BYTES} bytes of schemas in all",
            )
        return _rules(form, [Function(function.name) for function in functions], mark, several)
    except RecursionError:
        raise InvalidRequestError("tools", "are nested too deeply") from None


def _free_text(form: CallForm, mark: Mark) -> str:
    """Write the rules of a text without calls, and of a text that calls follow."""
    if isinstance(form, HarmonyForm):
        marks = "|".join(map(_escaped, form.special_tokens))
        text = f"TEXT: /(?s:.+)/ & ~/(?s:.*)({marks})(?s:.*)/\n"
        return f"start: final TEXT? | calls\nfinal: {_final(mark)}\n{text}"
    if not form.begins:  # calls are all of an output, and their first sign tells them from a text
        tag = _escaped(form.special_tokens[0])
        sign = "\\[" if isinstance(form, PythonForm) else "\\{"
        blanks = r"[ \t\r\n]*"
        text = f"TEXT: /(?s:.+)/ & ~/{blanks}({tag})?{blanks}{sign}(?s:.*)/\n"
        return f"start: TEXT? | calls\n{text}"
    texts = [one for one in form.begins if mark(one) == json.dumps(one)]
    special = [mark(one) for one in form.begins if one not in texts]
    written = "|".join(map(_escaped, form.begins))
    ways = ["TEXT?"]
    rules = f"TEXT: /(?s:.+)/ & ~/(?s:.*)({written})(?s:.*)/\n"
    if special:
        ways.append(f"TEXT? ({' | '.join(special)}) rest")
    if texts:
        ways.append("before rest")
        suffix = "|".join(map(_escaped, texts))
        rules += f"before[suffix=/{suffix}/]: /(?s:.*)/\n"
    return f"start: {' | '.join(ways)}\n{rules}"


def _escaped(text: str) -> str:
    """Write a text as a regex of a grammar has it."""
    return re.escape(text).replace("/", "\\/")


def _final(mark: Mark) -> str:
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
    """Write the rules of a family's calls, as Lark does.

    One of them is ``calls``. Where calls begin with a mark, ``rest`` comes behind the first mark.
    """
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
    opened = " | ".join(mark(one) for one in form.opens)
    if form.is_list:
        listed = f'"[" {_repeated("call", _COMMA, several)} "]"{close}'
        return f'calls: ({opened}) rest\nrest: " "? {listed}\ncall: {call}\n'
    return (
        f"calls: {mark(form.opens[0])} rest\n"
        f"rest: {_chained('call', mark(form.opens[0]), several)}\n"
        f"call: {_NEWLINE} {call} {_NEWLINE}{close}\n"
    )


def _chained(call: str, opened: str, several: bool) -> str:
    """Write calls of a line each, behind the mark of the first of them."""
    return f"{call} ({_NEWLINE} {opened} {call})*" if several else call


def _tagged(form: TaggedForm, functions: Sequence[Function], mark: Mark, several: bool) -> str:
    line = ' "\\n"' if form.has_lines else ""
    opened, closed = mark(form.open), mark(form.close)
    function = f"{json.dumps(chr(10) + form.function)} " if form.function else ""
    if form.end:
        closed = f"{mark(form.end)} {_NEWLINE} {closed}"
    key_end = mark(form.key_end)
    if form.value:
        key_end += f" {_NEWLINE} {mark(form.value)}"
    open_ones = [one for one in functions if not one.is_strict]
    ways, rules = list[str](), list[str]()
    name_end = json.dumps(form.name_end + chr(10))
    if open_ones:
        ways.append(f"{_names(open_ones)} {name_end} argument*")
        rules += [
            f"argument: {mark(form.key)} /[^<>\\r\\n]+/ {key_end}{line} value",
            _value(form, mark, "value"),
        ]
    for index, one in enumerate(functions):
        if not one.is_strict:
            continue
        items = []
        for place, argument in enumerate(strict_arguments(one.name, one.parameters)):
            rule = f"a{index}_{place}"
            items.append(rule if argument.is_required else f"{rule}?")
            key = f"{mark(form.key)} {json.dumps(argument.name)} {key_end}"
            rules.append(f"{rule}: {key}{line} v{index}_{place}")
            rules.append(_strict_value(form, mark, f"v{index}_{place}", argument))
        ways.append(" ".join([json.dumps(one.name), name_end, *items]))
    return "\n".join(
        [
            f"calls: {opened} rest",
            f"rest: {_chained('call', opened, several)}",
            f"call: {function}({' | '.join(ways)}) {closed}",
            *rules,
            "",
        ]
    )


def _strict_value(form: TaggedForm, mark: Mark, rule: str, argument: Argument) -> str:
    """Write the rule of an argument that fits its schema."""
    if argument.is_text and argument.texts is None:
        return _value(form, mark, rule, argument.lengths)
    line = f"{_NEWLINE} " if form.has_lines else ""
    ways = _json(dict(argument.schema))
    if argument.texts is not None:
        ways = " | ".join(json.dumps(text, ensure_ascii=False) for text in argument.texts)
    return f"{rule}: ({ways}) {line}{mark(form.value_end)} {_NEWLINE}"


def _value(
    form: TaggedForm,
    mark: Mark,
    rule: str,
    lengths: tuple[int, int | None] = (0, None),
) -> str:
    """Write the rule of an argument's text, up to the mark behind it and the end of the line.

    The text has none of the form's marks, as a parser would end it there.
    """
    least, most = lengths
    limits = "*" if lengths == (0, None) else f"{{{least},{'' if most is None else most}}}"
    marks = (form.key, form.value_end, form.end, form.close, form.open, form.function)
    escaped = map(_escaped, filter(None, dict.fromkeys(marks)))
    term = f"T_{rule.upper()}"
    text = f"{term}: /(?s:.{limits})/ & ~/(?s:.*)({'|'.join(escaped)})(?s:.*)/"
    if mark(form.value_end) != json.dumps(form.value_end):  # a token that no text has
        line = f"{_NEWLINE}? " if form.has_lines else ""
        return f"{rule}: {term} {line}{mark(form.value_end)} {_NEWLINE}\n{text}"
    end = ("\n" if form.has_lines else "") + form.value_end + "\n"
    return f"{rule}[suffix={json.dumps(end)}]: {term}\n{text}"


def _named(form: NamedForm, functions: Sequence[Function], mark: Mark, several: bool) -> str:
    separator = mark(form.separator)
    calls = (
        f"calls: {mark(form.all_open)} rest\n"
        f"rest: {_repeated('call', f'{_NEWLINE}?', several)} {mark(form.all_close)}\n"
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
    rules = [f"calls: {calls}"]
    if form.is_marked:
        rules = [f"calls: {mark(form.open)} rest", f"rest: {calls} {mark(form.close)}"]
    open_ones = [one for one in functions if not one.is_strict]
    ways = []
    if open_ones:
        ways.append(f'{_names(open_ones)} "(" (argument ({_COMMA} argument)*)? ")"')
        rules += [
            'argument: /[a-zA-Z_][a-zA-Z0-9_]*/ "=" value',
            f"value: {_json({})}",
        ]
    for index, one in enumerate(functions):
        if not one.is_strict:
            continue
        items = []
        for place, argument in enumerate(strict_arguments(one.name, one.parameters)):
            rule = f"a{index}_{place}"
            items.append((rule, argument.is_required))
            schema = _json(dict(argument.schema))
            rules.append(f"{rule}: {json.dumps(argument.name + '=')} {schema}")
        rules += in_order(items, _COMMA, f"all{index}")
        ways.append(f'{json.dumps(one.name)} "(" all{index} ")"')
    return "\n".join([*rules, f"call: {' | '.join(ways)}", ""])


def _mistral(functions: Sequence[Function], mark: Mark, several: bool) -> str:
    tag, arguments = mark(mistral.TAG), mark(mistral.ARGS)
    listed = _repeated("call", '", "', several)
    named = _each(functions, f"{arguments}?")
    more = f" ({tag} {named})*" if several else ""
    return (
        f'calls: {tag} rest\nrest: " "? "[" {listed} "]" | {named}{more}\n'
        f"call: {_named_object(functions, 'arguments')}\n"
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
