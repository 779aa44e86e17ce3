"""What a row of docs/performance.md is: a target, a way to find the figure in a file, a verdict.

Knows the shape of no file: `rows.py` of each subject's folder does. A figure that is not in its
file, or is no number, raises one of `NOT_THERE`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Json = Any  # what json.loads gives; its shape is checked where it is read
Path = tuple[str | int, ...]  # keys and indices down to one value of a file
NOT_THERE = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError)


@dataclass(frozen=True, slots=True)
class Found:
    """A measured figure and whether it holds.

    Attributes:
        text: the figure as it is shown.
        holds: whether the target is kept; None where there is no target.
    """

    text: str
    holds: bool | None = None


Measure = Callable[[Json], Found]


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the page: a figure, where it is and its limits.

    Attributes:
        what: name of the measured quantity.
        measure: finds the figure in the file; raises one of `NOT_THERE`.
        target: text of the target; empty: the row is for orientation only.
        holds_back: one sentence of why it is missed, shown if it is.
        unmeasured: note for files without the figure.
    """

    what: str
    measure: Measure
    target: str = ""
    holds_back: str = ""
    unmeasured: str = ""


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
        module: `benchmarks.SUBJECT.NAME`; a tool of `tools/` for one that is no benchmark.
        code: files and folders, separated by spaces. A change of these makes results old.
        sources: files of results that have rows on the page.
    """

    module: str
    code: str
    sources: tuple[Source, ...] = ()

    @property
    def name(self) -> str:
        """Return the word behind `python -m benchmarks`."""
        return self.module.rpartition(".")[2]

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


def at(document: Json, *path: str | int) -> Json:
    """Look up what is at this place; raises LookupError or TypeError."""
    for key in path:
        document = document[key]
    return document


def number(document: Json, *path: str | int) -> float:
    """Look up the finite number at this place; raises one of `NOT_THERE`."""
    value = at(document, *path)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{path}: must be a number, got {value!r}")
    if not math.isfinite(value):
        raise ValueError(f"{path}: must be finite, got {value}")
    return float(value)


def judge(
    value: float, least: float | None, most: float | None, below: float | None
) -> bool | None:
    """Judge whether it is within the limits; None without any."""
    if least is None and most is None and below is None:
        return None
    return (
        (least is None or value >= least)
        and (most is None or value <= most)
        and (below is None or value < below)
    )


def value(
    *path: str | int,
    form: str = "{:.3g}",
    scale: float = 1.0,
    least: float | None = None,
    most: float | None = None,
    below: float | None = None,
) -> Measure:
    """Make a row of one number of the file, times ``scale``; limits count after that."""

    def measure(document: Json) -> Found:
        found = number(document, *path) * scale
        return Found(form.format(found), judge(found, least, most, below))

    return measure


def ratio(
    above: Path,
    under: Path,
    *,
    form: str = "{ratio:.2f} ({above:.3g} / {under:.3g})",
    least: float | None = None,
    most: float | None = None,
    below: float | None = None,
) -> Measure:
    """Make a row of one number over another of the same run."""

    def measure(document: Json) -> Found:
        a, b = number(document, *above), number(document, *under)
        found = a / b
        return Found(form.format(ratio=found, above=a, under=b), judge(found, least, most, below))

    return measure


def count(*path: str | int) -> Measure:
    """Make a row of the length of a list, which is to be 0."""

    def measure(document: Json) -> Found:
        found = len(at(document, *path))
        return Found(f"{found}", found == 0)

    return measure
