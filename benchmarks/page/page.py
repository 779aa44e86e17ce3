"""Writes docs/performance.md: rows with figures, missed targets, missing measurements.

The page has no date, so equal files of results give an equal page. Refuses to know: which rows the
page has.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.page.headlines import Headline
from benchmarks.page.measures import at, number
from benchmarks.page.rows import NOT_THERE, Found, Json, Measurement, Row, Source, Subject

RESULTS = "benchmarks/results"  # in the repository
INTRO = """\
# Performance

Ten answers first; all rows, with targets, misses and what was not measured, are behind them. Each
ratio was measured side by side in one run.

{headlines}

**Changed since** counts the commits since the run that changed the measured code. **Others used
it** means that the machine did other work at that time, so times and tails say little.

`make performance` writes this page from [the files](../{results}) of the benchmarks: do not edit
it. `make bench` measures the short suite on two cores in less than ten minutes and writes the page
anew; each table names the command that measures it again. `python -m benchmarks --list` lists all
measurements. What was tried, and failed, is in [the log](log.md).
"""
CHANGES = re.compile(
    r", \*\*its code has changed since\*\* in \d+ commits?|(?<=\|) \d+ commits? \|$", re.M
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A row and its figure; ``found`` is None if the figure was not measured."""

    row: Row
    found: Found | None

    @property
    def verdict(self) -> str:
        """Return the text of the row's last cell: whether the target is met."""
        if self.found is None:
            return "not measured"
        return {True: "yes", False: "**missed**", None: ""}[self.row.is_kept(self.found)]


def read(path: Path) -> Json:
    """Read a file of results; return None if the file is missing or malformed."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) else None


def outcomes(source: Source, document: Json) -> list[Outcome]:
    """Find and judge the figure of every row of one file of results."""
    found: list[Outcome] = []
    for row in source.rows:
        try:
            found.append(Outcome(row, row.measure(document)))
        except NOT_THERE:
            found.append(Outcome(row, None))
    return found


def write(
    subjects: Sequence[Subject],
    root: Path,
    headlines: Sequence[Headline] = (),
    changes: Changes = lambda measurement, environment: 0,
) -> str:
    """Write the whole page.

    Args:
        changes: returns how many commits since a run have changed the measured code.
    """
    told = [
        (
            subject,
            [
                Told(one, source, document, outcomes(source, document))
                for one in subject.measurements
                for source in one.sources
                for document in (read(root / RESULTS / f"{source.name}.json"),)
            ],
        )
        for subject in subjects
    ]
    told = [(subject, parts) for subject, parts in told if parts]
    first = _headlines(headlines, [one for _, parts in told for one in parts], changes)
    pages = [INTRO.format(results=RESULTS, headlines=first), _summary(told)]
    for subject, parts in told:
        pages.append(f"## {subject.title}\n")
        pages += [_section(part, changes) for part in parts]
        pages += [f"{note}\n" for note in subject.notes]
        if subject.log:
            links = "; ".join(f"[{heading}](log.md#{anchor(heading)})" for heading in subject.log)
            pages.append(f"In the log: {links}.\n")
    pages.append(_not_measured(told))
    return "\n".join(pages)


@dataclass(frozen=True, slots=True)
class Told:
    """One file of results, with the outcomes of its rows."""

    measurement: Measurement
    source: Source
    document: Json
    rows: Sequence[Outcome]

    @property
    def command(self) -> str:
        """Return the command that writes this file of results."""
        return self.measurement.command(self.source)


Changes = Callable[[Measurement, Json], int]
Page = Sequence[tuple[Subject, Sequence[Told]]]


def _headlines(headlines: Sequence[Headline], told: Sequence[Told], changes: Changes) -> str:
    """Return the table of the first screen's questions and answers."""
    lines = ["| question | answer | measured | on | changed since |", "|---|---|---|---|---|"]
    of_file = {one.source.name: one for one in told}
    for headline in headlines:
        part = of_file.get(headline.source)
        try:
            document = part.document if part else None
            environment = at(document, "environment")
            cells = (
                headline.question,
                headline.answer(document),
                f"[{str(at(environment, 'date'))[:10]}](../{RESULTS}/{headline.source}.json)",
                _machine(environment),
                _commits(changes(part.measurement, environment)) if part else "",
            )
        except NOT_THERE:
            cells = (headline.question, "not measured", "", "", "")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _commits(count: int) -> str:
    return f"{count} commit{'s' * (count != 1)}"


def _machine(environment: Json) -> str:
    machine = str(environment.get("gpu") or at(environment, "cpu"))
    return re.sub(r"\(R\)| Processor", "", machine) + f", {at(environment, 'num_cores')} cores"


def anchor(heading: str) -> str:
    """Make the anchor of a heading, as GitHub does."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _summary(told: Page) -> str:
    lines = ["| subject | holds | missed | not measured |", "|---|---|---|---|"]
    for subject, parts in told:
        rows = [outcome for part in parts for outcome in part.rows if outcome.row.target]
        counts = " | ".join(str(sum(o.verdict == verdict for o in rows)) for verdict in _VERDICTS)
        lines.append(f"| [{subject.title}](#{anchor(subject.title)}) | {counts} |")
    return "\n".join((*lines, "", "Rows without a target are not counted.", ""))


_VERDICTS = ("yes", "**missed**", "not measured")


def _section(part: Told, changes: Changes) -> str:
    rows, lines = part.rows, [_origin(part, changes)]
    if part.source.intro:
        lines += ["", part.source.intro]
    lines += ["", "| what | target | measured | holds? |", "|---|---|---|---|"]
    for outcome in rows:
        text = outcome.found.text if outcome.found else ""
        cells = (outcome.row.what, outcome.row.target, text, outcome.verdict)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    lines += ["", *_missed(rows)]
    return "\n".join(lines)


def _missed(rows: Sequence[Outcome]) -> Iterator[str]:
    """Yield lines with the reasons for missed targets; rows with equal reasons share a line."""
    reasons: dict[str, list[str]] = {}
    for outcome in rows:
        if outcome.verdict == "**missed**":
            reasons.setdefault(outcome.row.holds_back or "not known.", []).append(outcome.row.what)
    for reason, whats in reasons.items():
        yield f"* Missed, {'; '.join(whats)}: {reason}"
    if reasons:
        yield ""


def _origin(part: Told, changes: Changes) -> str:
    """Return the text about where, when and how a file of results was measured.

    It also says whether the measured code has changed since.
    """
    name, command = part.source.name, part.command
    if part.document is None:
        absent = f" ({part.source.absent})" if part.source.absent else ""
        return f"`{command}`: **not measured**{absent}."
    link = f"[{name}.json](../{RESULTS}/{name}.json)"
    try:
        environment = at(part.document, "environment")
        text = _environment(environment) + _older_parts(part.document)
        if count := changes(part.measurement, environment):
            text += f", **its code has changed since** in {_commits(count)}"
    except NOT_THERE:
        text = "where and when is not recorded"
    return f"{link}, `{command}`: {text}."


def _environment(environment: Json) -> str:
    date = str(at(environment, "date"))[:16].replace("T", " ")
    machine = str(environment.get("gpu") or at(environment, "cpu"))
    cores = int(number(environment, "num_cores"))
    before = number(environment, "load_average > 0")
    # Older files do not contain the load average after the run.
    after = environment.get("load_average_after")
    ended = f" before, {number(after, '0'):.1f} after" if after else ""
    busy = ", **other work ran on the machine**" if before > cores else ""
    with_options = environment.get("arguments")
    options = f", options `{' '.join(map(str, with_options))}`" if with_options else ""
    return (
        f"revision {at(environment, 'git_revision')}, {date} UTC, {machine}, {cores} cores,"
        f" load average {before:.1f}{ended}{busy}{options}"
    )


def _older_parts(document: Json) -> str:
    """Return which parts of the results earlier runs have measured; empty: none."""
    date = at(document, "environment > date")
    older = [
        f"{name} ({at(when, 'git_revision')}, {str(at(when, 'date'))[:16].replace('T', ' ')} UTC)"
        for name, when in document.get("of_parts", {}).items()
        if when and at(when, "date") != date
    ]
    return f"; measured by earlier runs: {', '.join(older)}" if older else ""


def _not_measured(told: Page) -> str:
    lines = ["## Not measured", ""]
    for part in (part for _, parts in told for part in parts):
        source, missing = part.source, [one.row for one in part.rows if one.found is None]
        if missing and part.document is None:
            why = source.absent or f"there is no readable {source.name}.json"
            lines.append(f"* All of `{part.command}`, {len(missing)} rows: {why}.")
            continue
        for row in missing:
            why = row.unmeasured or f"{source.name}.json does not have it."
            lines.append(f"* {row.what} (`{part.command}`): {why}")
    if len(lines) == 2:
        lines.append("Nothing that has a row here.")
    return "\n".join((*lines, ""))
