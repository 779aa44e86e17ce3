"""Escape untrusted text, so that it stays on one line or cannot control a terminal."""

from __future__ import annotations

import unicodedata

# Characters that Python calls unprintable but that are shown unchanged: line ends, tabs, soft
# hyphens, and characters that join parts of an emoji or a word.
_KEPT = "\n\t\N{ZERO WIDTH JOINER}\N{ZERO WIDTH NON-JOINER}\N{SOFT HYPHEN}"


def printable(text: str) -> str:
    """Return text with line ends and unprintable characters as Python escapes."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii")
        for char in text
    )


def on_terminal(text: str) -> str:
    """Return text that a terminal can show, with control characters as escapes.

    Escapes control characters (C1, DEL, and C0 except line ends and tabs), marks that change the
    text's direction, and unassigned code points.
    """
    if text.isprintable():
        return text
    return "".join(
        char
        if char.isprintable() or char in _KEPT or unicodedata.category(char) == "Zs"
        else char.encode("unicode_escape").decode("ascii")
        for char in text
    )
