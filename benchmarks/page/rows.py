"""Defines a row of docs/performance.md: a target, a way to find its figure, a verdict.

Knows no file's structure, unlike the `rows.py` of each subject's folder. A figure that is missing
or is no number raises one of `NOT_THERE`.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Json = Any  # a result of json.loads, checked where it is read
NOT_THERE = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError)
_LIMIT = re.compile(r"([<>]=?)? ?(\d[\d,.]*)")
_KEEPS: dict[str | None, Callable[[float, float], bool]] = {
    "<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt, None: operator.eq,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Found:
    """A measured figure.

    Attributes:
        text: the figure as shown on the page.
        value: number that the target limits, or whether the target is kept.
    """

    text: str
    value: float | bool | None = None


Measure = Callable[[Json], Found]


@dataclass(frozen=True, slots=True)
class Row:
    """Row of the page: a figure, how to find it, and its limit.

    Attributes:
        what: name of the measured quantity.
        measure: finds the figure in the file; raises one of `NOT_THERE`.
        target: text whose first number is the limit, as in "<= 1.1"; a number alone must be met
            exactly; empty: the row has no verdict.
        holds_back: one sentence about the reason for a miss, shown only with a miss.
        unmeasured: note for files without the figure.
    """

    what: str
    measure: Measure
    target: str = ""
    holds_back: str = ""
    unmeasured: str = ""

    def is_kept(self, found: Found) -> bool | None:
        """Compare a figure with the target; return None without a target."""
        if not self.target or found.value is None:
            return None
        if isinstance(found.value, bool):
            return found.value
        limit = _LIMIT.search(self.target)
        assert limit is not None, f"{self.target!r} has no number"
        return _KEEPS[limit[1]](found.value, float(limit[2].replace(",", "")))


@dataclass(frozen=True, slots=True)
class Source:
    """Rows of one file of results.

    Attributes:
        name: `benchmarks/results/<name>.json`.
        rows: rows in the page's order.
        intro: meaning of the figures; one paragraph.
        options: options of the command that writes the file.
        absent: why the file may be missing.
    """

    name: str
    rows: tuple[Row, ...]
    intro: str = ""
    options: str = ""
    absent: str = ""


@dataclass(frozen=True, slots=True)
class Measurement:
    """Measurement started by `python -m benchmarks NAME`: `run` of benchmarks/SUBJECT/NAME.py.

    Attributes:
        place: `SUBJECT.NAME`, or `tools.NAME` for a tool outside of benchmarks.
        code: files and folders, separated by spaces, whose changes make results old.
        sources: files of results that have rows on the page.
    """

    place: str
    code: str
    sources: tuple[Source, ...] = ()

    @property
    def module(self) -> str:
        """Return the module's full name."""
        return self.place if self.place.startswith("tools.") else f"benchmarks.{self.place}"

    @property
    def name(self) -> str:
        """Return the name to type after `python -m benchmarks`."""
        return self.place.rpartition(".")[2]

    def command(self, source: Source) -> str:
        """Return the command that writes a file of results."""
        if not self.module.startswith("benchmarks."):
            return f"python -m {self.module}"
        return " ".join(f"python -m benchmarks {self.name} --save {source.options}".split())


@dataclass(frozen=True, slots=True)
class Subject:
    """Heading of the page: the measurements of one folder.

    Attributes:
        log: headings of docs/log.md about these measurements, also about failed attempts.
        notes: further notes; Markdown, one paragraph each.
    """

    title: str
    measurements: tuple[Measurement, ...]
    log: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
