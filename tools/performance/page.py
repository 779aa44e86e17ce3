"""The page as Markdown: tables of rows with their figures, what is missed, what is not measured.

The same files give the same page: it has no date of its own. Knows no row.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.performance.rows import NOT_THERE, Area, Found, Json, Row, Source, at, number

RESULTS = "benchmarks/results"  # in the repository
INTRO = """\
# Performance

Written by `make performance` from [the files](../{results}) of the benchmarks: do not edit. What
was missed and what was not measured is in it. `make bench` measures the short suite on two cores
in less than ten minutes and writes the page anew; every other figure has a command of its own,
named above its table. Each ratio was measured side by side in one run. Where the load average is
above the number of cores, **others used the machine**, and times and tails say little. What was
tried, and failed, is in [the log](log.md).
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A row with what its file says. ``found`` is None where it is not measured."""

    row: Row
    found: Found | None

    @property
    def verdict(self) -> str:
        """The last cell."""
        if self.found is None:
            return "not measured"
        return {True: "yes", False: "**missed**", None: ""}[self.found.holds]


def read(path: Path) -> Json:
    """Read a file of results; None if it is not there, or is no such file."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) else None


def outcomes(source: Source, document: Json) -> list[Outcome]:
    """Judge every row of one file."""
    found: list[Outcome] = []
    for row in source.rows:
        try:
            found.append(Outcome(row, row.measure(document)))
        except NOT_THERE:
            found.append(Outcome(row, None))
    return found


def write(areas: Sequence[Area], root: Path) -> str:
    """Write the whole page."""
    measured = [
        (area, [(source, read(root / RESULTS / f"{source.name}.json")) for source in area.sources])
        for area in areas
    ]
    told = [
        (area, [(source, document, outcomes(source, document)) for source, document in sources])
        for area, sources in measured
    ]
    parts = [INTRO.format(results=RESULTS), _summary(told)]
    for area, sources in told:
        parts.append(f"## {area.title}\n")
        for source, document, rows in sources:
            parts.append(_section(source, document, rows))
        parts += [f"{note}\n" for note in area.notes]
        if area.log:
            links = "; ".join(f"[{heading}](log.md#{anchor(heading)})" for heading in area.log)
            parts.append(f"In the log: {links}.\n")
    parts.append(_not_measured(told))
    return "\n".join(parts)


Told = Sequence[tuple[Area, Sequence[tuple[Source, Json, Sequence[Outcome]]]]]


def anchor(heading: str) -> str:
    """Make the anchor of a heading, as GitHub does."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _summary(told: Told) -> str:
    lines = ["| area | holds | missed | not measured |", "|---|---|---|---|"]
    for area, sources in told:
        rows = [outcome for *_, rows in sources for outcome in rows if outcome.row.target]
        counts = [sum(o.verdict == verdict for o in rows) for verdict in _VERDICTS]
        lines.append(f"| [{area.title}](#{anchor(area.title)}) | {' | '.join(map(str, counts))} |")
    return "\n".join((*lines, "", "Rows without a target are not counted.", ""))


_VERDICTS = ("yes", "**missed**", "not measured")


def _section(source: Source, document: Json, rows: Sequence[Outcome]) -> str:
    lines = [_origin(source, document)]
    if source.intro:
        lines += ["", source.intro]
    lines += ["", "| what | target | measured | holds? |", "|---|---|---|---|"]
    for outcome in rows:
        text = outcome.found.text if outcome.found else ""
        cells = (outcome.row.what, outcome.row.target, text, outcome.verdict)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    lines += ["", *_missed(rows)]
    return "\n".join(lines)


def _missed(rows: Sequence[Outcome]) -> Iterator[str]:
    """Say what holds the missed rows back; rows with one reason share a line."""
    reasons: dict[str, list[str]] = {}
    for outcome in rows:
        if outcome.found is not None and outcome.found.holds is False:
            reasons.setdefault(outcome.row.holds_back or "not known.", []).append(outcome.row.what)
    for reason, whats in reasons.items():
        yield f"* Missed, {'; '.join(whats)}: {reason}"
    if reasons:
        yield ""


def _origin(source: Source, document: Json) -> str:
    """Say which file, when, on what."""
    if document is None:
        absent = f" ({source.absent})" if source.absent else ""
        return f"`{source.command}`: **not measured**{absent}."
    link = f"[{source.name}.json](../{RESULTS}/{source.name}.json)"
    try:
        return f"{link}, `{source.command}`: {_environment(at(document, 'environment'))}."
    except NOT_THERE:
        return f"{link}, `{source.command}`: where and when is not recorded."


def _environment(environment: Json) -> str:
    date = str(at(environment, "date"))[:16].replace("T", " ")
    machine = str(environment.get("gpu") or at(environment, "cpu"))
    cores = int(number(environment, "num_cores"))
    before = number(environment, "load_average", 0)
    # Some files have no second one.
    after = environment.get("load_average_after")
    ended = f" before, {number(after, 0):.1f} after" if after else ""
    busy = ", **others used it**" if before > cores else ""
    with_options = environment.get("arguments")
    options = f", options `{' '.join(map(str, with_options))}`" if with_options else ""
    return (
        f"revision {at(environment, 'git_revision')}, {date} UTC, {machine}, {cores} cores,"
        f" load average {before:.1f}{ended}{busy}{options}"
    )


def _not_measured(told: Told) -> str:
    lines = ["## Not measured", ""]
    for _, sources in told:
        for source, document, rows in sources:
            missing = [outcome.row for outcome in rows if outcome.found is None]
            if not missing:
                continue
            if document is None:
                why = source.absent or f"there is no readable {source.name}.json"
                lines.append(f"* All of `{source.command}`, {len(missing)} rows: {why}.")
                continue
            for row in missing:
                why = row.unmeasured or f"{source.name}.json does not have it."
                lines.append(f"* {row.what} (`{source.command}`): {why}")
    if len(lines) == 2:
        lines.append("Nothing that has a row here.")
    return "\n".join((*lines, ""))
