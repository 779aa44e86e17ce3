"""Finding: what `baton doctor` found about one part of a machine."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Grade(enum.Enum):
    """Grades of a part of a machine: how well Baton works with it."""

    OK = "ok"
    SLOW = "slow"  # works, but slower than possible
    BAD = "bad"  # prevents `baton up` from working


@dataclass(frozen=True, slots=True)
class Finding:
    """A line of the report of `baton doctor`.

    Attributes:
        part: name of the part of the machine, in a word or two.
        value: state of that part.
        advice: what the user can do about a problem, in one line; empty: nothing is to be done.
    """

    part: str
    value: str
    grade: Grade = Grade.OK
    advice: str = ""
