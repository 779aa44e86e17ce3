"""Finds figures in a file of results, by their places in the JSON.

A place is a text of keys and indices, such as "results > 512 > p50_us". In a list, "batch=8,
dtype=int8" stands for the row with these values. If a figure is missing or not a number, one of the
errors `rows.NOT_THERE` is raised.
"""

from __future__ import annotations

import math
import re

from benchmarks.page.rows import Found, Json, Measure

_VALUES = re.compile(r", (?=\w+=)")  # separates the values by which a row of a list is chosen


def at(document: Json, *place: str) -> Json:
    """Return the content of a place in the document; raises LookupError or TypeError."""
    for key in " > ".join(place).split(" > "):
        if not isinstance(document, list):
            document = document[key]
        elif "=" in key:
            document = _one_of(document, dict(part.split("=", 1) for part in _VALUES.split(key)))
        else:
            document = document[int(key)]
    return document


def _one_of(rows: Json, wanted: dict[str, str]) -> Json:
    """Return the row of a list that has these values; raises LookupError."""
    for row in rows:
        if all(str(row[key]) == value for key, value in wanted.items()):
            return row
    raise LookupError(f"no row for {wanted}")


def number(document: Json, *place: str) -> float:
    """Return the finite number at a place in the document; raises one of `NOT_THERE`."""
    found = at(document, *place)
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise TypeError(f"{place}: must be a number, got {found!r}")
    if not math.isfinite(found):
        raise ValueError(f"{place}: must be finite, got {found}")
    return float(found)


def value(place: str, form: str = "{:.3g}", scale: float = 1.0) -> Measure:
    """Return a measure that shows one number of the file, multiplied by ``scale``."""

    def measure(document: Json) -> Found:
        found = number(document, place) * scale
        return Found(form.format(found), found)

    return measure


def ratio(above: str, under: str, form: str = ".3g", unit: str = "") -> Measure:
    """Return a measure that shows one number of the file divided by another.

    Args:
        form: format of the two numbers; "": only their ratio is shown.
        unit: text to show after the two numbers.
    """

    def measure(document: Json) -> Found:
        a, b = number(document, above), number(document, under)
        both = f" ({a:{form}} / {b:{form}}{unit})" if form else ""
        return Found(f"{a / b:.2f}{both}", a / b)

    return measure


def told(place: str, form: str, judged: str = "") -> Measure:
    """Return a measure that shows several numbers.

    ``form`` is a format such as "{p50:g} ms ({loop[p99]:.1f} ms)".

    Args:
        judged: place, relative to ``place``, of the number to compare with the target.
    """

    def measure(document: Json) -> Found:
        there = at(document, place)
        return Found(form.format(**there), number(there, judged) if judged else None)

    return measure


def count(place: str) -> Measure:
    """Return a measure that shows the length of a list."""

    def measure(document: Json) -> Found:
        found = len(at(document, place))
        return Found(f"{found}", found)

    return measure
