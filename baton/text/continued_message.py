"""Continued messages: a prompt that ends with the last message's text, for an answer that goes on.

Templates close a message with tokens of their own: the text is marked at its end before, and cut
there after, the template wrote it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from baton.api.errors import InvalidRequestError

_MARK = "<<baton: it goes on here>>"
# Tells whether the template takes blanks from a message's end: then it does so of ours, too.
_BLANK = " "


def with_last_marked(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the messages, the last one with a mark behind its text."""
    *before, last = messages
    return [*before, {**last, "content": f"{last.get('content') or ''}{_MARK}{_BLANK}"}]


def up_to_mark(text: str) -> str:
    """Cut a rendered text at the mark; raises InvalidRequestError when the template left it out."""
    end = text.rfind(_MARK)
    if end < 0:
        raise InvalidRequestError(
            "continue_final_message", "the chat template does not show the last message's text"
        )
    before, behind = text[:end], text[end + len(_MARK) :]
    return before if behind.startswith(_BLANK) else before.rstrip()
