"""Changing lines: lines that some clients change in every prompt although no model needs them.

Such a line stands at the prompt's start, so a prefix cache would find none of the blocks after it.
This module removes the line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# Patterns that are removed from the beginning of a system message.
_RULES = (
    # A line with a hash that Claude Code sends
    re.compile(r"x-anthropic-billing-header:[^\n]*\n*"),
)


def without_changing_lines(messages: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return a conversation without changing lines at the start of its system messages."""
    kept = []
    for message in messages:
        content = message.get("content")
        if message.get("role") != "system" or not isinstance(content, str):
            kept.append(message)
            continue
        cut = _cut(content)
        if cut or not content:
            kept.append(message if cut == content else {**message, "content": cut})
    return kept or messages


def _cut(text: str) -> str:
    for rule in _RULES:
        if found := rule.match(text):
            text = text[found.end() :]
    return text
