"""Free text: grammars of outputs that are text and may end in calls that fit schemas.

The text must not contain a mark of calls, because the parser would read a call there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from baton.api.errors import InvalidRequestError
from router.intake.answers.argument_forms import InexpressibleError
from router.intake.answers.call_forms import Function, Mark, call_rules
from router.intake.parsers import harmony
from router.intake.parsers.families import CallForm
from router.intake.parsers.harmony import HarmonyForm
from router.intake.parsers.json_calls import BareJsonForm, JsonForm
from router.intake.parsers.mistral import MistralForm
from router.intake.parsers.named import NamedForm
from router.intake.parsers.pythonic import PythonForm
from router.intake.parsers.tagged import TaggedForm


def text_or_calls(
    form: CallForm, functions: Sequence[Function], mark: Mark, *, several: bool
) -> str | None:
    """Make a Lark grammar of a text that may end in calls.

    Returns None if a parser could not tell calls from text.

    Reasoning may precede the text; the grammar does not include it.

    Args:
        form: the family's marks, and the form of its calls.
        functions: the functions that may be called.
        mark: writes a mark in the grammar.
        several: whether one output may contain more than one call.

    Raises:
        InvalidRequestError: a function's schema cannot be enforced.
    """
    try:
        if isinstance(form, HarmonyForm):
            start = _messages(form, mark)
        elif isinstance(form, BareJsonForm):
            start = _unless_begun("{", mark(form.tag))
        elif isinstance(form, PythonForm) and not form.is_marked:
            start = _unless_begun("[", mark(form.open))
        elif any(_is_token(one, mark) for one in form.begins):
            start = f"start: TEXT? calls?\nTEXT: {_without(_marks(form))}\n"
        else:
            return _before_a_mark(form, functions, mark, several)
        return start and start + call_rules(form, functions, mark, several)
    except RecursionError:
        raise InvalidRequestError("tools", "are nested too deeply") from None
    except InexpressibleError as error:
        raise InvalidRequestError("tools", str(error)) from None


def _is_token(text: str, mark: Mark) -> bool:
    return mark(text) != json.dumps(text)


def _any_of(texts: Sequence[str]) -> str:
    return "|".join(re.escape(text).replace("/", "\\/") for text in texts)


def _without(marks: Sequence[str]) -> str:
    """Write the terminal of texts that contain none of these marks."""
    return f"/(?s:.+)/ & ~/(?s:.*)({_any_of(marks)})(?s:.*)/"


def _marks(form: CallForm) -> list[str]:
    """Return all marks that a parser may take for a part of a call."""
    functions = [form.function] if isinstance(form, TaggedForm) and form.function else []
    return list(dict.fromkeys([*form.begins, *form.special_tokens, *functions]))


def _before_a_mark(form: CallForm, functions: Sequence[Function], mark: Mark, several: bool) -> str:
    """Write the rules of a text up to a mark of calls, and of the calls behind the mark.

    In these families, a mark is plain text and no special token, so a lazy lexeme matches the text
    up to the mark.
    """

    def unmarked(text: str) -> str:
        return '""' if text in form.begins else mark(text)

    start = "(TEXT | begun calls)*" if several else "TEXT? (begun calls TEXT?)?"
    return (
        f"start: {start}\nTEXT: {_without(_marks(form))}\n"
        f"begun[lazy]: /(?s:.*)({_any_of(form.begins)})/\n"
        + call_rules(form, functions, unmarked, several and _has_one_mark(form))
    )


def _has_one_mark(form: CallForm) -> bool:
    """Return whether the family writes several calls after a single mark."""
    is_list = isinstance(form, JsonForm) and form.is_list
    return is_list or isinstance(form, NamedForm | PythonForm | MistralForm)


def _unless_begun(first: str, tag: str) -> str:
    """Write the rules of an output whose first non-blank character tells calls from text.

    Args:
        first: the first character of calls.
        tag: a mark that may precede calls.
    """
    text = rf"/[ \t\r\n]*([^ \t\r\n\{first}](?s:.*))?/"
    if tag.startswith('"'):
        text += rf" & ~/[ \t\r\n]*{_any_of([json.loads(tag)])}(?s:.*)/"
    return f"start: TEXT | BLANKS? {tag}? BLANKS? calls\nTEXT: {text}\nBLANKS: /[ \\t\\r\\n]+/\n"


def _messages(form: HarmonyForm, mark: Mark) -> str | None:
    """Write the rules of an output in the harmony format: messages, and calls at the end.

    Returns None if the format's marks are not special tokens.
    """
    if not all(_is_token(one, mark) for one in form.special_tokens):
        return None
    channel, message = mark(harmony.CHANNEL), mark(harmony.MESSAGE)
    head = f"{channel} /commentary|final/ {message} TEXT?"
    again = f'{mark("<|end|>")} {mark(harmony.START)} "assistant"'
    return f"start: ({head} {again})* ({head} | calls)\nTEXT: /(?s:.+)/\n"
