"""gpt-oss: parses outputs of messages in channels, in OpenAI's harmony format.

<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>

The analysis channel is reasoning, messages to ``functions.NAME`` are calls, the rest is text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from baton.text.thoughts.marks import HARMONY, ThoughtMarks
from router.intake.parsers.base import (
    CallArguments,
    CallBegins,
    MakeId,
    OutputParser,
    ParserContext,
    Reasoning,
    new_call_id,
)
from router.intake.parsers.json_call import NO_ARGUMENTS, SPACE
from router.intake.parsers.source import ScriptedParser, Source, Steps, as_text

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
CONSTRAIN = "<|constrain|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", START, CHANNEL)
_TAGS = (START, CHANNEL, MESSAGE, CONSTRAIN, *_ENDS[:3])
_RECIPIENT = re.compile(r"to=functions\.([\w.\-]+)")
_BEGINNINGS = (CHANNEL, START, " to=", "to=")


@dataclass(frozen=True, slots=True)
class HarmonyForm:
    """OpenAI's harmony format, which covers both reasoning and calls."""

    special_tokens: tuple[str, ...] = _TAGS
    begins: tuple[str, ...] = ()
    marks: ThoughtMarks = HARMONY

    def make_parser(self, context: ParserContext, make_id: MakeId = new_call_id) -> OutputParser:
        """Make a parser of one output's reasoning and calls."""
        return ScriptedParser(lambda source: _script(source, context.prompt_end))


def _script(source: Source, prompt_end: str) -> Steps[None]:
    begun, mark, _ = prompt_end.rpartition(MESSAGE)
    # The prompt has begun a message, which the output continues
    if mark and not (yield from _message(source, begun)):
        return
    begins_with_header = bool(mark) or (yield from _begins(source))
    while True:
        header: list[str] = []
        if begins_with_header:
            ending = yield from source.until((MESSAGE,), header.append)
            text = "".join(header)
            if not ending:
                if CHANNEL not in text and START not in text and text.strip():
                    yield text  # the output ended where a header may have begun, so it is text
                return
        begins_with_header = True
        tag = yield from _message(source, "".join(header))
        if not tag:
            return


def _end(source: Source) -> Steps[str]:
    """Consume the mark that ends a message, if it comes next; return the mark or an empty text."""
    for mark in _ENDS:
        if (yield from source.consume(mark)):
            return mark
    return ""


def _begins(source: Source) -> Steps[bool]:
    """Return whether the output begins with a header; if not, the whole output is text."""
    for text in _BEGINNINGS:
        if (yield from source.comes(text)):
            return True
    return False


def _message(source: Source, header: str) -> Steps[str]:
    """Read a message behind its header; return the mark that ends the message."""
    recipient = _RECIPIENT.search(header)
    if recipient:
        blanks = yield from source.match(SPACE)
        if (yield from source.peek()) == "{":
            yield CallBegins(recipient[1], new_call_id())
            return (yield from source.until(_ENDS, CallArguments))
        written = "null" if (yield from source.consume("null")) else ""
        if ended := (yield from _end(source)):
            yield CallBegins(recipient[1], new_call_id())
            yield CallArguments(NO_ARGUMENTS)
            return ended
        if blanks or written:
            yield blanks + written
    if "analysis" in header:
        return (yield from source.until(_ENDS, Reasoning))
    return (yield from source.until(_ENDS, as_text))
