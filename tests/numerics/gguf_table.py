"""Writes docs/models.md's table of GGUF files from a run of the tests.

pytest tests/numerics/test_gguf_families.py -m "thorough or not thorough" --junitxml FILE
python -m tests.numerics.gguf_table FILE
"""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- written by tests/numerics/gguf_table.py -->", "<!-- end -->"
_CASE = re.compile(
    r"test_tensors_and_tokens_are_those_of_the_file\[(?P<name>.+)-(?P<kind>\w+)-(?P<parts>\d)\]"
)
_FAILED = "differs"

# (name of a row, type of the file) -> whether all was equal, by number of parts
Results = Mapping[tuple[str, str], Mapping[int, bool]]


def read_results(report: str) -> Results:
    """Read which cases passed from a report of pytest in JUnit's format."""
    found: dict[tuple[str, str], dict[int, bool]] = {}
    for case in ET.fromstring(report).iter("testcase"):  # our own file
        if not (match := _CASE.fullmatch(case.get("name", ""))):
            continue
        has_passed = all(case.find(tag) is None for tag in ("failure", "error", "skipped"))
        row = found.setdefault((match["name"], match["kind"]), {})
        row[int(match["parts"])] = has_passed
    return found


def table(results: Results) -> str:
    """Return a table with a row per architecture and a column per type."""
    kinds = list(dict.fromkeys(kind for _, kind in results))
    lines = [f"| architecture | {' | '.join(kinds)} |", "|---" * (len(kinds) + 1) + "|"]
    for name in dict.fromkeys(name for name, _ in results):
        architecture, _, model = name.partition(" ")
        cells = [_cell(results.get((name, kind), {})) for kind in kinds]
        lines.append(f"| {f'`{architecture}` {model}'.strip()} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(parts: Mapping[int, bool]) -> str:
    if not all(parts.values()):
        return _FAILED
    return ", ".join(map(str, sorted(parts)))


def write(page: str, lines: str) -> str:
    """Return a page with the table between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert end, "the page has no place for the table"
    return f"{before}{BEGIN}\n{lines}\n{END}{after}"


if __name__ == "__main__":
    found = table(read_results(Path(sys.argv[1]).read_text(encoding="utf-8")))
    PAGE.write_text(write(PAGE.read_text(encoding="utf-8"), found), encoding="utf-8")
