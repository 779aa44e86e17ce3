"""Call arguments: turn a tool call's arguments, which a model wrote as text, into an object.

Chat templates need the object. Clients send calls back unchanged, so a conversation may contain
arguments that ``max_tokens`` cut, or that a model wrote wrongly; this is no error.
"""

from __future__ import annotations

import json
import re
from typing import Any

# Key of the object that wraps arguments that are no object themselves.
WHOLE = "arguments"
_SIGN = re.compile(r'["\\{}\[\],]')
_SURROGATE = re.compile("[\ud800-\udfff]")
_CLOSING = {"{": "}", "[": "]"}
_ESCAPE_CHARS = {"u": 5}  # escape letter -> characters after the backslash; 1 for other letters


def read_arguments(text: str) -> dict[str, Any]:
    """Return a call's arguments as an object.

    If the text is the beginning of a JSON object, the object is completed; any other text is
    wrapped in an object. Half a surrogate pair becomes a replacement character, because prompts
    cannot contain halves.
    """
    if not text.strip():
        return {}
    value = _load(text)
    if isinstance(value, str):  # some clients send a JSON text within JSON
        inner = _load(value) if value.strip() else {}
        value = inner if isinstance(inner, dict) else value
    if value is _NO_JSON:
        completed = complete_object(text)
        value = text if completed is None else completed
    if value is None:
        return {}
    return _without_surrogates(value if isinstance(value, dict) else {WHOLE: value})


def complete_object(text: str) -> dict[str, Any] | None:
    """Complete a text that is the beginning of a JSON object; return None for other texts.

    Closes strings, lists and objects that are open at the end. Leaves out a member whose value is
    missing, or is cut within a number or a word.
    """
    opened: list[str] = []
    certain = 0  # up to here, only closing brackets are missing
    end = len(text)
    in_string, position = False, 0
    while (found := _SIGN.search(text, position)) is not None:
        sign, position = found[0], found.end()
        if sign == "\\" and in_string:
            position += _ESCAPE_CHARS.get(text[position : position + 1], 1)
            end = found.start() if position > len(text) else end
        elif sign == '"':
            in_string = not in_string
        elif in_string or sign == "\\":
            continue
        elif sign == ",":
            certain = found.start()
        elif sign in _CLOSING:
            opened.append(sign)
            certain = position
        elif opened and _CLOSING[opened[-1]] == sign:
            opened.pop()
            certain = position
        else:
            break
    closing = "".join(_CLOSING[sign] for sign in reversed(opened))
    begun = f'{text[:end]}"' if in_string else text
    for candidate in (begun + closing, text[:certain] + closing):
        if isinstance(value := _load(candidate), dict):
            return value
    return None


_NO_JSON = object()


def _load(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return _NO_JSON


def _without_surrogates(value: dict[str, Any]) -> dict[str, Any]:
    written = json.dumps(value, ensure_ascii=False)
    plain = _SURROGATE.sub("\N{REPLACEMENT CHARACTER}", written)
    found: dict[str, Any] = value if plain == written else json.loads(plain)
    return found
