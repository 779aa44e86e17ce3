"""What a row of docs/performance.md is: a target, a way to find the figure in a file, a verdict.

Knows the shape of no file: `rows.py` of each subject's folder does. A figure that is not in its
file, or is no number, raises one of `NOT_THERE`.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Json = Any  # what json.loads gives; its shape is checked where it is read
NOT_THERE = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError)
_LIMIT = re.compile(r"([<>]=?)? ?(\d[\d,.]*)")
_KEEPS: dict[str | None, Callable[[float, float], bool]] = {
    "<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt, None: operator.eq,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Found:
    """A measured figure.

    Attributes:
        text: the figure as it is shown.
        value: the number that the target limits, or whether the target is kept.
    """

    text: str
    value: float | bool | None = None


Measure = Callable[[Json], Found]


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the page: a figure, where it is and its limit.

    Attributes:
        what: name of the measured quantity.
        measure: finds the figure in the file; raises one of `NOT_THERE`.
        target: text of the target, whose first number is the limit, as in "<= 1.1"; a number
            alone must be met exactly; empty: the row is for orientation only.
        holds_back: one sentence of why it is missed, shown if it is.
        unmeasured: note for files without the figure.
    """

    what: str
    measure: Measure
    target: str = ""
    holds_back: str = ""
    unmeasured: str = ""

    def is_kept(self, found: Found) -> bool | None:
        """Judge a figure by the target; None without a target."""
        if not self.target or found.value is None:
            return None
        if isinstance(found.value, bool):
            return found.value
        limit = _LIMIT.search(self.target)
        assert limit is not None, f"{self.target!r} has no number"
        return _KEEPS[limit[1]](found.value, float(limit[2].replace(",", "")))


@dataclass(frozen=True, slots=True)
class Source:
    """Rows of one file.

    Attributes:
        name: `benchmarks/results/<name>.json`.
        rows: rows of the page.
        intro: meaning of the figures; one paragraph.
        options: options of the command that writes the file.
        absent: why there may be no such file.
    """

    name: str
    rows: tuple[Row, ...]
    intro: str = ""
    options: str = ""
    absent: str = ""


@dataclass(frozen=True, slots=True)
class Measurement:
    """The measurement of `python -m benchmarks NAME`: `run` of benchmarks/SUBJECT/NAME.py.

    Attributes:
        place: `SUBJECT.NAME`, or `tools.NAME` for a tool that is no benchmark.
        code: files and folders, separated by spaces. A change of these makes results old.
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
        """Return the word behind `python -m benchmarks`."""
        return self.place.rpartition(".")[2]

    def command(self, source: Source) -> str:
        """Return the command that writes a file of results."""
        if not self.module.startswith("benchmarks."):
            return f"python -m {self.module}"
        return " ".join(f"python -m benchmarks {self.name} --save {source.options}".split())


@dataclass(frozen=True, slots=True)
class Subject:
    """One heading of the page: the measurements of one folder.

    Attributes:
        log: headings of docs/log.md with what was tried, negative results too.
        notes: further notes; Markdown, one paragraph each.
    """

    title: str
    measurements: tuple[Measurement, ...]
    log: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
