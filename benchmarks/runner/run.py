"""Run: prints, saves and judges the results of one run of a measurement."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from benchmarks.page.page import outcomes
from benchmarks.page.rows import Measurement
from benchmarks.runner.environment import RESULTS, record_environment, write_results

if TYPE_CHECKING:
    from rich.console import Console  # rich may be missing on a GPU machine

Document = Mapping[str, Any]  # results that can be converted to JSON
_MOST_COLUMNS, _MOST_CHARS = 10, 500


class Run:
    """Prints, records and judges the results of one measurement.

    Attributes:
        environment: description of machine and software, recorded before the measurement.
        problems: a line per broken promise; with any problem, the exit code is 1.
        saves: whether results are written to files (`--save`).
    """

    def __init__(self, measurement: Measurement, words: Sequence[str], *, saves: bool) -> None:
        self.environment = record_environment(words)
        self.problems: list[str] = []
        self._num_missed = 0
        self._measurement = measurement
        self.saves = saves

    @cached_property
    def console(self) -> Console:
        """Return the console to print on."""
        from rich.console import Console

        return Console(highlight=False, width=140)

    def save(self, document: Document, name: str = "") -> None:
        """Write results/NAME.json if `--save` was given; NAME defaults to the measurement's."""
        if self.saves:
            write_results(name or self._measurement.name, self.environment, document)

    def saved(self) -> dict[str, Any]:
        """Return the measurement's saved results; empty if there are none.

        Leaves the environment out: `save` writes this run's, also if a part of the results is
        older.
        """
        document = self._read_saved()
        document.pop("environment", None)
        return document

    def saved_parts(self, parts: Sequence[str]) -> dict[str, Any]:
        """Return the saved results of which this run measures some parts anew.

        ``of_parts`` says for each part when and on which code it was measured.
        """
        saved = self._read_saved()
        environment = saved.pop("environment", {})
        moments = {
            name: _moment(environment)
            for name in saved
            if name != "of_parts" and isinstance(saved[name], dict)
        }
        moments |= saved.get("of_parts", {}) | dict.fromkeys(parts, _moment(self.environment))
        return {**saved, "of_parts": moments}

    def _read_saved(self) -> dict[str, Any]:
        path = RESULTS / f"{self._measurement.name}.json"
        document: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {}
        return document

    def show(self, title: str, rows: object) -> None:
        """Print a mapping or a list of rows as a table, and any other value as it is."""
        if (
            isinstance(rows, Mapping)
            and rows
            and all(isinstance(r, Mapping) for r in rows.values())
        ):
            rows = [{title: name, **_flat(row)} for name, row in rows.items()]
        elif isinstance(rows, Sequence) and rows and _are_rows(rows):
            rows = [_flat(row) for row in rows]
        else:
            print(f"{title}: {str(rows)[:_MOST_CHARS]}")
            return
        from rich.table import Table

        columns = list(dict.fromkeys(name for row in rows for name in row))[:_MOST_COLUMNS]
        table = Table(*columns, title=title)
        for row in rows:
            table.add_row(*(_cell(row.get(name, "")) for name in columns))
        self.console.print(table)

    def judge(self, document: Document, name: str = "") -> None:
        """Print the page's rows with their verdicts for these results; then all other results."""
        rows = [
            {
                "what": one.row.what,
                "target": one.row.target,
                "measured": one.found.text if one.found else "",
                "holds": one.verdict.strip("*"),
            }
            for source in self._measurement.sources
            if source.name == (name or self._measurement.name)
            for one in outcomes(source, document)
        ]
        self._num_missed += sum(row["holds"] == "missed" for row in rows)
        if rows:
            self.show(name or self._measurement.name, rows)
        else:
            for key, part in document.items():
                self.show(key, part)

    def finish(self, document: Document | None) -> int:
        """Judge and save a document; return the exit code, which ignores missed targets."""
        if document is not None:
            self.judge(document)
            self.save(document)
        missed = f"targets missed: {self._num_missed}" if self._num_missed else "all promises kept"
        print("; ".join(self.problems) or missed)
        return 1 if self.problems else 0


def _moment(environment: Mapping[str, Any]) -> dict[str, Any]:
    keys = ("date", "git_revision", "load_average")
    return {key: environment[key] for key in keys if key in environment}


def _are_rows(values: Iterable[object]) -> bool:
    return all(isinstance(value, Mapping) for value in values)


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of plain values: the medians of summaries, without other mappings or lists."""
    values = {
        name: value.get("median") if isinstance(value, Mapping) else value
        for name, value in row.items()
        if not isinstance(value, list)
    }
    return {name: value for name, value in values.items() if value is not None}


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
