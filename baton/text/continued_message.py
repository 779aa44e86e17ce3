"""Continued messages: a prompt that ends with the last message's text, for an answer that goes on.

Templates close a message with tokens of their own: the text is marked at its end before, and cut
there after, the template wrote it. A message that has a thought and no text goes on thinking.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from baton.api.errors import InvalidRequestError
from baton.text.chat_template import REASONING_FIELDS

_MARK = "<<baton: it goes on here>>"
# Tells whether the template takes blanks from a message's end: then it does so of ours, too.
_BLANK = " "


def with_last_marked(
    messages: Sequence[Mapping[str, Any]], *, thought_tag: str = ""
) -> Iterator[list[Mapping[str, Any]]]:
    """Yield ways to mark the last message's end, best first; a template may leave one out.

    Args:
        thought_tag: begins a thought in the texts of this model; empty: nothing does.
    """
    *before, last = messages
    thought = next((last[name] for name in REASONING_FIELDS if last.get(name)), "")
    if last.get("content") or not thought:
        yield [*before, {**last, "content": f"{last.get('content') or ''}{_MARK}{_BLANK}"}]
        return
    marked = f"{thought}{_MARK}{_BLANK}"
    yield [*before, {**last, **{name: marked for name in REASONING_FIELDS if name in last}}]
    if thought_tag:  # for templates that show no thoughts
        kept = {name: value for name, value in last.items() if name not in REASONING_FIELDS}
        yield [*before, {**kept, "content": f"{thought_tag}\n{marked}"}]


def up_to_mark(text: str) -> str | None:
    """Cut a rendered text at the mark; None when the template left the mark out."""
    end = text.rfind(_MARK)
    if end < 0:
        return None
    before, behind = text[:end], text[end + len(_MARK) :]
    return before if behind.startswith(_BLANK) else before.rstrip()


def left_out() -> InvalidRequestError:
    """Make the error of a message that the template does not show."""
    return InvalidRequestError(
        "continue_final_message", "the chat template does not show the last message's text"
    )
