"""Continued messages: make prompts that end within the last message, which the model continues.

A template adds tokens after each message. So a mark is put at the end of the last message's text
before rendering, and the rendered text is cut at the mark. If the message has only a thought, the
mark is put at the end of the thought.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from baton.api.errors import InvalidRequestError
from baton.text.chat_template import REASONING_FIELDS

_MARK = "<<baton: it goes on here>>"
# The mark begins with a blank: if the blank is missing in the rendered text, the template strips
# trailing blanks, so they are stripped from the prompt, too.
_BLANK = " "


def with_last_marked(
    messages: Sequence[Mapping[str, Any]], *, thought_tag: str = ""
) -> Iterator[list[Mapping[str, Any]]]:
    """Yield copies of the messages, with the last one's end marked in different ways, best first.

    A template may drop a mark, so the caller tries one copy after the other.

    Args:
        thought_tag: tag that begins a thought within a text; empty: the model has no such tag.
    """
    *before, last = messages
    thought = next((last[name] for name in REASONING_FIELDS if last.get(name)), "")
    if last.get("content") or not thought:
        yield [*before, {**last, "content": _with_mark(last.get("content") or "")}]
        return
    marked = f"{thought}{_MARK}{_BLANK}"
    yield [*before, {**last, **{name: marked for name in REASONING_FIELDS if name in last}}]
    # A second way, for templates that do not render the fields of a thought.
    if thought_tag:
        kept = {name: value for name, value in last.items() if name not in REASONING_FIELDS}
        yield [*before, {**kept, "content": f"{thought_tag}\n{marked}"}]


def _with_mark(content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Append the mark to a message's content, which is a text or a list of parts."""
    if isinstance(content, str):
        return f"{content}{_MARK}{_BLANK}"
    return [*content, {"type": "text", "text": f"{_MARK}{_BLANK}"}]


def up_to_mark(text: str) -> str | None:
    """Return the rendered text up to the mark, or None if the template dropped the mark."""
    end = text.rfind(_MARK)
    if end < 0:
        return None
    before, behind = text[:end], text[end + len(_MARK) :]
    return before if behind.startswith(_BLANK) else before.rstrip()


def left_out() -> InvalidRequestError:
    """Return the error for a last message whose text the template does not render."""
    return InvalidRequestError(
        "continue_final_message", "the chat template does not show the last message's text"
    )
