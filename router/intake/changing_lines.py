"""Changing lines: what some clients write anew into each prompt, and no model needs.

Such a line leads the prompt, so that nothing behind it is ever found in a prefix cache.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# To add a rule: a pattern of the beginning of a system message.
_RULES = (
    re.compile(r"x-anthropic-billing-header:[^\n]*\n*"),  # Claude Code's, with a hash
)


def without_changing_lines(messages: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return a conversation whose system messages begin with what stays the same."""
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
