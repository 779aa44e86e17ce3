"""DeepSeek: calls between special tokens, in the forms of V3 (a block of JSON) and of V3.1."""

from __future__ import annotations

import re

from router.intake.parsers.base import CallArguments, CallBegins, ParserContext, new_call_id
from router.intake.parsers.json_call import (
    NO_ARGUMENTS,
    SPACE,
    is_nothing,
    value_steps,
)
from router.intake.parsers.source import ScriptedParser, Source, Steps, as_text

ALL_BEGIN, ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
BEGIN, SEPARATOR, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_NAME = re.compile(r"[\w.\-]*")
_FENCE = re.compile(r"[`a-z \t\r\n}\]]*")


class DeepSeek(ScriptedParser):
    """A call begins with its name and the ``{`` of its arguments; what is none stays text."""

    special_tokens = (ALL_BEGIN, ALL_END, BEGIN, SEPARATOR, END)

    def __init__(self, context: ParserContext) -> None:
        super().__init__(_script)


def _script(source: Source) -> Steps[None]:
    while tag := (yield from source.until((ALL_BEGIN, ALL_END, BEGIN), as_text)):
        if tag != BEGIN:
            continue
        kind = yield from source.match(_NAME)
        if not (yield from source.take(SEPARATOR)):
            yield BEGIN + kind
            continue
        read = yield from source.match(SPACE)
        name = kind
        if (yield from source.peek()) != "{":
            name = yield from source.match(_NAME)
            read += name + (yield from source.match(_FENCE))
        if (yield from source.take(END)):
            # Without arguments: in V3.1's form the kind is the name.
            is_v3 = not is_nothing(name)
            if called := (name if is_v3 else kind):
                yield CallBegins(called, new_call_id())
                yield CallArguments(NO_ARGUMENTS)
            else:
                yield f"{BEGIN}{kind}{SEPARATOR}{read}{END}"
            continue
        if not name or (yield from source.peek()) != "{":
            yield f"{BEGIN}{kind}{SEPARATOR}{read}"
            continue
        yield CallBegins(name, new_call_id())
        yield from value_steps(source, CallArguments)
        yield from source.match(_FENCE)
        yield from source.take(END)
