"""Finding: what is known of one part of a machine, and what to do about it."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Grade(enum.Enum):
    """How well a part of a machine serves."""

    OK = "ok"
    SLOW = "slow"  # works, at less speed than the machine could have
    BAD = "bad"  # keeps `baton up` from working


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        part: name of a part of the machine, in a word or two.
        value: state of that part.
        advice: line that says what to do; empty: nothing.
    """

    part: str
    value: str
    grade: Grade = Grade.OK
    advice: str = ""
