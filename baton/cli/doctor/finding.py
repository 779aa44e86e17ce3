"""Finding: the state of one part of a machine, with advice."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Grade(enum.Enum):
    """How well a part of a machine serves Baton."""

    OK = "ok"
    SLOW = "slow"  # works, but slower than possible
    BAD = "bad"  # prevents `baton up` from working


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        part: name of the part of the machine, in a word or two.
        value: state of that part.
        advice: remedy, in one line; empty: none.
    """

    part: str
    value: str
    grade: Grade = Grade.OK
    advice: str = ""
