"""Reads a call of the form ``{"name": ..., "arguments": {...}}`` while the model writes it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection

from router.intake.parsers.base import CallArguments, CallBegins, MakeId, Part, new_call_id
from router.intake.parsers.source import Source, Steps

ARGUMENT_KEYS = ("arguments", "parameters")
NO_ARGUMENTS = "{}"
SPACE = re.compile(r"[ \t\r\n]*")
# Text between a call's arguments and the closing mark: closing brackets, perhaps too many.
BEHIND = re.compile(r"[ \t\r\n}\]]*")
_COMMA = re.compile(r"[ \t\r\n,]*")
# Characters outside strings that do not change the state of `_ValueState`.
_PLAIN = re.compile(r"[^\"{}\[\]<>();`|#$&=\\'@!?^%~]*")
_IN_STRING = re.compile(r'[^"\\]*')
_SCALAR = re.compile(r"[^\"{}\[\],<>\s]*")
_CLOSES = {"}": "{", "]": "["}


def is_nothing(text: str) -> bool:
    """Return whether a text stands for empty arguments."""
    return text.strip() in ("", "null")


def call_steps(
    source: Source,
    *,
    names: Collection[str] | None = None,
    make_id: MakeId = new_call_id,
) -> Steps[str | None]:
    """Read a call and return None; if the text is no call, return the text that was consumed.

    The text is a call once its name and the ``{`` of its arguments were read, even if the rest is
    invalid.

    Args:
        names: functions that may be called; None: any.
    """
    return (yield from _CallReader(source, names, make_id).steps())


def list_steps(source: Source, read: str, *, make_id: MakeId = new_call_id) -> Steps[str | None]:
    """Read a list of calls after its ``[``; return None, or the consumed text if it is no call.

    The list counts as calls if its first element is a call.

    Args:
        read: text that was consumed before the list; the returned text begins with it.
    """
    is_first = True
    while True:
        read += yield from source.match(_COMMA)
        if (yield from source.consume("]")):
            return f"{read}]" if is_first else None
        if (yield from source.peek()) != "{":
            return read if is_first else None
        no_call = yield from call_steps(source, make_id=make_id)
        if no_call is not None:
            if is_first:
                return read + no_call
            yield no_call
            return None
        is_first, read = False, ""


class _CallReader:
    def __init__(self, source: Source, names: Collection[str] | None, make_id: MakeId) -> None:
        self._source = source
        self._names = names
        self._make_id = make_id
        self._read: list[str] = []
        self._name = ""
        self._arguments: list[str] | None = None  # arguments that the model wrote before the name
        self._has_begun = False

    def steps(self) -> Steps[str | None]:
        has_ended = yield from self._members()
        if self._has_begun:
            return None
        # Some models leave out the arguments of functions without parameters.
        is_call = has_ended and self._name and (self._arguments or self._names is None)
        if not is_call:
            return "".join(self._read)
        yield CallBegins(self._name, self._make_id(self._name))
        yield CallArguments("".join(self._arguments or [NO_ARGUMENTS]))
        return None

    def _members(self) -> Steps[bool]:
        """Read the members of a call's object.

        Returns whether the object was read to its end, or far enough to be a call.
        """
        if not (yield from self._expect("{")):
            return False
        while True:
            if (yield from self._expect("}")):
                return True
            key = yield from self._string()
            if key is None or not (yield from self._expect(":")):
                return False
            if not (yield from self._member(key)):
                return False
            if not (yield from self._expect(",")):
                return (yield from self._expect("}"))

    def _member(self, key: str) -> Steps[bool]:
        """Read the value of a member; return whether a call may have this member."""
        if key == "name" and not self._name:
            name = yield from self._string()
            if not name or (self._names is not None and name not in self._names):
                return False
            self._name = name
            return True
        if key not in ARGUMENT_KEYS or self._has_begun or self._arguments:
            return (yield from self._skip_value())
        yield from self._space()
        first = yield from self._source.peek()
        if first == '"':
            return (yield from self._arguments_in_a_string())
        if first == "n":
            return (yield from self._null())
        if first != "{":
            return False
        if not self._name:
            self._arguments = []
            return (yield from value_steps(self._source, self._keep_arguments))
        yield CallBegins(self._name, self._make_id(self._name))
        self._has_begun = True
        return (yield from value_steps(self._source, CallArguments))

    def _null(self) -> Steps[bool]:
        """Read null, which some models write for the arguments of a function without parameters."""
        scalar = yield from self._source.match(_SCALAR)
        self._keep(scalar)
        if scalar != "null":
            return False
        self._arguments = [NO_ARGUMENTS]
        return True

    def _arguments_in_a_string(self) -> Steps[bool]:
        """Read arguments as a string that contains JSON, the form that OpenAI's API has."""
        text = yield from self._string()
        if text is None:
            return False
        if is_nothing(text):
            self._arguments = [NO_ARGUMENTS]
            return True
        try:
            is_object = isinstance(json.loads(text), dict)
        except (ValueError, RecursionError):
            is_object = False
        if is_object:
            self._arguments = [text]
        return is_object

    def _keep_arguments(self, text: str) -> Part | None:
        assert self._arguments is not None
        self._arguments.append(text)
        return self._keep(text)

    def _keep(self, text: str) -> Part | None:
        if not self._has_begun:
            self._read.append(text)
        return None

    def _space(self) -> Steps[None]:
        self._keep((yield from self._source.match(SPACE)))

    def _expect(self, sign: str) -> Steps[bool]:
        yield from self._space()
        if not (yield from self._source.consume(sign)):
            return False
        self._keep(sign)
        return True

    def _string(self) -> Steps[str | None]:
        """Read the next value; return None if it is not a string."""
        yield from self._space()
        if (yield from self._source.peek()) != '"':
            return None
        parts: list[str] = []

        def keep(text: str) -> Part | None:
            parts.append(text)
            return self._keep(text)

        if not (yield from value_steps(self._source, keep)):
            return None
        try:
            value = json.loads("".join(parts), strict=False)
            value.encode()  # raises for half a surrogate pair, which cannot be sent to a client
        except (ValueError, RecursionError):
            return None
        return str(value)

    def _skip_value(self) -> Steps[bool]:
        yield from self._space()
        return (yield from value_steps(self._source, self._keep))


def value_steps(source: Source, take: Callable[[str], Part | None]) -> Steps[bool]:
    """Consume a JSON value while it arrives; return whether it was complete.

    Stops at text that cannot be part of the value.

    Args:
        take: called with each piece of text; returns a part of the output to yield, or None.
    """
    first = yield from source.peek()
    if first not in ('"', "{", "["):
        scalar = yield from source.match(_SCALAR)
        if scalar and (part := take(scalar)) is not None:
            yield part
        return bool(scalar)
    state = _ValueState()
    while text := (yield from source.chunk()):
        length = state.read(text)
        source.skip(length)
        if length and (part := take(text[:length])) is not None:
            yield part
        if state.has_ended:
            return True
        if length < len(text):
            return False
    return False


class _ValueState:
    """Tracks how far a JSON value has been read."""

    def __init__(self) -> None:
        self._open: list[str] = []
        self._in_string = False
        self._escaped = False
        self.has_ended = False

    def read(self, text: str) -> int:
        """Read text; return how many of its leading characters belong to the value."""
        position = 0
        while position < len(text) and not self.has_ended:
            if self._escaped:
                self._escaped = False
                position += 1
                continue
            pattern = _IN_STRING if self._in_string else _PLAIN
            run = pattern.match(text, position)
            assert run is not None  # the pattern matches even an empty text
            position = run.end()
            if position == len(text):
                break
            if not self._sign(text[position]):
                break
            position += 1
        return position

    def _sign(self, sign: str) -> bool:
        """Handle a character such as a bracket or quote; return False if it is not allowed here."""
        if self._in_string:
            self._escaped = sign == "\\"
            self._in_string = self._escaped
        elif sign == '"':
            self._in_string = True
        elif sign in "{[":
            self._open.append(sign)
        elif not self._open or _CLOSES.get(sign) != self._open.pop():
            return False
        self.has_ended = not self._open and not self._in_string
        return True
