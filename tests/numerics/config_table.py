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
from tests.numerics.config_check import ConfigCheck, Outcome, Verdict
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
    for change in all_changes(architecture, num_variants):
        try:
            verdict = check.check(change.config, change.names)
        except Exception as error:  # a traceback is a finding
            verdict = Verdict(Outcome.FAILED, repr(error)[:300])
        counts[change.kind, verdict.outcome] += 1
        if verdict.outcome in (Outcome.DIFFERENT, Outcome.CONTRADICTS, Outcome.FAILED):
            what = (change.field, change.kind, verdict.outcome, verdict.detail[-150:])
            _tell(architecture, *what)
    outcomes = {kind: {o: counts[kind, o] for o in Outcome if counts[kind, o]} for kind in KINDS}
    return {"architecture": architecture, **outcomes}


def _tell(*words: str) -> None:
    sys.stderr.write(f"{' | '.join(words)}\n")


def table(rows: Iterable[dict[str, Any]]) -> str:
    """Return a table in Markdown, a row for each architecture, sorted by name."""
    names = ("equal", "refused", "no reference", "different")
    titles = [
        f"{part}: {names[0]} | {' | '.join(names[1:])}" for part in ("left out or null", "changed")
    ]
    lines = [f"| architecture | {' | '.join(titles)} |", f"|{'---|' * (1 + 2 * len(names))}"]
    for row in sorted(rows, key=lambda row: str(row["architecture"])):
        left_out = Counter(row["dropped"]) + Counter(row["null"])
        cells = [f"`{row['architecture']}`", *_cells(left_out), *_cells(Counter(row["changed"]))]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _cells(found: Counter[str]) -> list[int]:
    refused = found[Outcome.REFUSED] + found[Outcome.CONTRADICTS]
    different = found[Outcome.DIFFERENT] + found[Outcome.FAILED]
    return [found[Outcome.EQUAL], refused, found[Outcome.NO_REFERENCE], different]


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
