"""What others said, as part of a line: it begins no other one and moves no terminal's cursor."""

from __future__ import annotations


def printable(text: str) -> str:
    """Return a text with what cannot be printed, line ends too, as Python's escapes."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii")
        for char in text
    )
