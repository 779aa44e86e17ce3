"""What others said, made harmless: as a part of a line, or as lines on a terminal."""

from __future__ import annotations

import unicodedata

# What is not printable to Python, and harmless: line ends, tabs, and what joins parts of an emoji
# or of a word.
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
    """Return a text whose lines a terminal shows, with all that would control it as escapes.

    Escaped are control characters (C0 but for line ends and tabs, C1, DEL), marks that change the
    direction of what follows, and what has no meaning in Unicode.
    """
    if text.isprintable():
        return text
    return "".join(
        char
        if char.isprintable() or char in _KEPT or unicodedata.category(char) == "Zs"
        else char.encode("unicode_escape").decode("ascii")
        for char in text
    )
