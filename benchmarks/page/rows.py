"""Defines a row of docs/performance.md: a target, a way to find its figure, a verdict.

Refuses to know: the structure of files, which the `rows.py` in each subject's folder knows. If a
figure is missing or not a number, one of the errors `NOT_THERE` is raised.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Json = Any  # a result of json.loads, whose types are checked where it is read
NOT_THERE = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError)
_LIMIT = re.compile(r"([<>]=?)? ?(\d[\d,.]*)")
_KEEPS: dict[str | None, Callable[[float, float], bool]] = {
    "<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt, None: operator.eq,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Found:
    """A measured figure of a row.

    Attributes:
        text: the figure as shown on the page.
        value: the number to compare with the target; a bool: whether the target is met; None: not
            judged.
    """

    text: str
    value: float | bool | None = None


Measure = Callable[[Json], Found]


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the page: what is measured, how to find the figure, and its target.

    Attributes:
        what: text that names the measured quantity.
        measure: finds the figure in the file; raises one of `NOT_THERE`.
        target: text whose first number is the limit, such as "<= 1.1"; a number without a
            comparison must be met exactly; empty: the row has no verdict.
        holds_back: a sentence that says why the target is missed, shown only if the target is
            missed.
        unmeasured: note to show if the file does not contain the figure.
    """

    what: str
    measure: Measure
    target: str = ""
    holds_back: str = ""
    unmeasured: str = ""

    def is_kept(self, found: Found) -> bool | None:
        """Return whether a figure meets the target; None: the row has no target."""
        if not self.target or found.value is None:
            return None
        if isinstance(found.value, bool):
            return found.value
        limit = _LIMIT.search(self.target)
        assert limit is not None, f"{self.target!r} has no number"
        return _KEEPS[limit[1]](found.value, float(limit[2].replace(",", "")))


@dataclass(frozen=True, slots=True)
class Source:
    """The rows of the page that come from one file of results.

    Attributes:
        name: name of the file: `benchmarks/results/<name>.json`.
        rows: rows in the page's order.
        intro: a paragraph that explains the figures.
        options: command-line options with which the measurement writes the file.
        absent: why the file may be missing.
    """

    name: str
    rows: tuple[Row, ...]
    intro: str = ""
    options: str = ""
    absent: str = ""


@dataclass(frozen=True, slots=True)
class Measurement:
    """A measurement, which is the function `run` of benchmarks/SUBJECT/NAME.py.

    Attributes:
        place: `SUBJECT.NAME`; `tools.NAME` for a tool outside of benchmarks.
        code: the measured files and folders, separated by spaces; results are old after they
            change.
        sources: the files of results of this measurement, with their rows on the page.
    """

    place: str
    code: str
    sources: tuple[Source, ...] = ()

    @property
    def module(self) -> str:
        """Return the full name of the measurement's module."""
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
    """A heading of the page, with the measurements of one folder.

    Attributes:
        log: headings of docs/log.md about these measurements, including failed attempts.
        notes: further paragraphs in Markdown.
    """

    title: str
    measurements: tuple[Measurement, ...]
    log: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
