"""Changing lines: lines that some clients change in every prompt although no model needs them.

Such a line leads the prompt, so a prefix cache would never find anything after it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# Patterns at the beginning of a system message.
_RULES = (
    re.compile(r"x-anthropic-billing-header:[^\n]*\n*"),  # sent by Claude Code, with a hash
)


def without_changing_lines(messages: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return a conversation without changing lines at the start of system messages."""
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
