"""Llama 3: an output that is nothing but calls, ``{"name": ..., "parameters": {...}}``.

Several are divided by semicolons. A tag may come before them.
"""

from __future__ import annotations

import re

from router.intake.parsers.base import ParserContext
from router.intake.parsers.json_call import SPACE, call_steps
from router.intake.parsers.source import ScriptedParser, Source, Steps, rest_as_text

TAG = "<|python_tag|>"
_BETWEEN = re.compile(r"[ \t\r\n;,]*")


class Llama3Json(ScriptedParser):
    """As there are no tags, only functions that are offered are called: other JSON is text."""

    special_tokens = (TAG,)

    def __init__(self, context: ParserContext) -> None:
        names = frozenset(context.tools)

        def script(source: Source) -> Steps[None]:
            blanks = yield from source.match(SPACE)
            if (yield from source.take(TAG)):
                blanks = yield from source.match(SPACE)
            before = blanks
            while (yield from source.peek()) == "{":
                no_call = yield from call_steps(source, names=names)
                if no_call is not None:
                    yield before + no_call
                    before = ""
                    break
                before = yield from source.match(_BETWEEN)
            if before:
                yield before
            yield from rest_as_text(source)

        super().__init__(script)
