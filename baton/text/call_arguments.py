"""Call arguments: turn the argument text that a model wrote into an object for templates.

Clients send back calls unchanged, so a conversation may contain calls that ``max_tokens`` cut or a
model wrote wrongly. Cut or wrong calls are not errors here.
"""

from __future__ import annotations

import json
import re
from typing import Any

# Name under which the model sees arguments that form no object.
WHOLE = "arguments"
_SIGN = re.compile(r'["\\{}\[\],]')
_SURROGATE = re.compile("[\ud800-\udfff]")
_CLOSING = {"{": "}", "[": "]"}
_ESCAPE_CHARS = {"u": 5}  # escape letter -> characters after the backslash, if not 1


def read_arguments(text: str) -> dict[str, Any]:
    """Return a call's arguments as an object; complete cut JSON, and wrap any other text.

    Half a surrogate pair becomes a replacement character, because no prompt can hold it.
    """
    if not text.strip():
        return {}
    value = _load(text)
    if isinstance(value, str):  # JSON within JSON, which some clients send
        inner = _load(value) if value.strip() else {}
        value = inner if isinstance(inner, dict) else value
    if value is _NO_JSON:
        completed = complete_object(text)
        value = text if completed is None else completed
    if value is None:
        return {}
    return _without_surrogates(value if isinstance(value, dict) else {WHOLE: value})


def complete_object(text: str) -> dict[str, Any] | None:
    """Complete the beginning of a JSON object; return None if the text is not one.

    Closes strings, lists and objects that are open at the end. Leaves out a member whose value is
    missing, or is cut within a number or a word.
    """
    opened: list[str] = []
    certain = 0  # end of the text that closing brackets would complete
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
