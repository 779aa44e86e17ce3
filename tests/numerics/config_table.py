"""Count the outcomes for each field of each family's config.json: ``python -m`` this file.

Prints one line of JSON for each architecture, and every difference or failure; with --table, makes
a table from such lines. Refuses to know: how configs are compared.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from models.registry import MODELS
from tests.numerics.config_check import ConfigCheck, Outcome
from tests.numerics.config_fields import (
    Change,
    base_configs,
    changes,
    known_fields,
    rope_changes,
)

KINDS = ("dropped", "null", "changed")


def all_changes(architecture: str, num_variants: int = 1) -> Iterator[Change]:
    """Yield every change of every field of some of the family's configs, each once."""
    configs = base_configs(architecture, num_variants)
    of_fields = chain.from_iterable(
        # Only the first file tries fields that only other architectures have.
        changes(config, architecture, known_fields(architecture, config) if index else None)
        for index, config in enumerate(configs)
    )
    seen = set[str]()
    for change in chain(of_fields, rope_changes(configs[0], architecture)):
        content = json.dumps(change.config, sort_keys=True)
        if content not in seen:
            seen.add(content)
            yield change


def count(architecture: str, folder: Path, num_variants: int = 1) -> dict[str, Any]:
    """Check all changes, print those that differ or fail, and count the outcomes."""
    check = ConfigCheck(architecture, folder)
    counts: Counter[tuple[str, str]] = Counter()
    fields = set[str]()
    num_failed = 0
    for change in all_changes(architecture, num_variants):
        fields.add(change.field)
        try:
            verdict = check.check(change.config, change.names)
        except Exception as error:  # a traceback is a finding
            num_failed += 1
            _tell(architecture, change.field, change.kind, repr(error)[:300])
            continue
        counts[change.kind, verdict.outcome] += 1
        if verdict.outcome in (Outcome.DIFFERENT, Outcome.CONTRADICTS):
            what = (change.field, change.kind, verdict.outcome, verdict.detail[-150:])
            _tell(architecture, *what)
    outcomes = {kind: {o: counts[kind, o] for o in Outcome if counts[kind, o]} for kind in KINDS}
    return {"architecture": architecture, "fields": len(fields), "failed": num_failed, **outcomes}


def _tell(*words: str) -> None:
    sys.stderr.write(f"{' | '.join(words)}\n")


def table(rows: Iterable[dict[str, Any]]) -> str:
    """Return a table in Markdown."""
    lines = [
        "| architecture | fields | dropped | null | changed | "
        "equal | refused | transformers refuses | different |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: str(row["architecture"])):
        found: Counter[str] = sum((Counter(row[kind]) for kind in KINDS), Counter())
        sizes = [sum(row[kind].values()) for kind in KINDS]
        refused = found[Outcome.REFUSED] + found[Outcome.CONTRADICTS]
        cells = [f"`{row['architecture']}`", row["fields"], *sizes, found[Outcome.EQUAL], refused]
        cells += [found[Outcome.NO_REFERENCE], found[Outcome.DIFFERENT] + row["failed"]]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main() -> None:
    """Check the named architectures, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("architectures", nargs="*", default=MODELS.names())
    parser.add_argument("--variants", type=int, default=1, help="of each family, from the last")
    parser.add_argument("--table", type=Path, help="a file of lines to make a table of")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.table is not None:
        rows = map(json.loads, options.table.read_text().splitlines())
        sys.stdout.write(f"{table(rows)}\n")
        return
    for architecture in options.architectures:
        with tempfile.TemporaryDirectory() as folder:
            row = json.dumps(count(architecture, Path(folder), options.variants))
        sys.stdout.write(f"{row}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
