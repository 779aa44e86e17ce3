"""Make text from others harmless: within one line, or as lines on a terminal."""

from __future__ import annotations

import unicodedata

# Harmless characters that Python counts as not printable: line ends, tabs, and characters that join
# parts of an emoji or of a word.
_KEPT = "\n\t\N{ZERO WIDTH JOINER}\N{ZERO WIDTH NON-JOINER}\N{SOFT HYPHEN}"


def printable(text: str) -> str:
    """Return a text with what cannot be printed, line ends too, as Python's escapes."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii")
        for char in text
    )


def on_terminal(text: str) -> str:
    """Return the text as a terminal may show it, with control characters as escapes.

    Escapes stand for control characters (C1, DEL, and C0 except line ends and tabs), for marks
    that change the direction of text, and for code points that have no meaning in Unicode.
    """
    if text.isprintable():
        return text
    return "".join(
        char
        if char.isprintable() or char in _KEPT or unicodedata.category(char) == "Zs"
        else char.encode("unicode_escape").decode("ascii")
        for char in text
    )
