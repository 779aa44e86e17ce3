"""Writes docs/models.md's table of the GGUF files that `test_gguf_families` compares.

python -m tests.numerics.gguf_table
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tests.numerics.gguf_families import CASES, Case

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- written by tests/numerics/gguf_table.py -->", "<!-- end -->"


def table(cases: Iterable[Case]) -> str:
    """Return a table with a row per model and a column per type; cells list numbers of parts."""
    parts: dict[tuple[str, str], list[str]] = {}
    for name, kind, num_parts in cases:
        parts.setdefault((name, kind), []).append(str(num_parts))
    kinds = list(dict.fromkeys(kind for _, kind in parts))
    lines = [f"| architecture | {' | '.join(kinds)} |", "|---" * (len(kinds) + 1) + "|"]
    for name in dict.fromkeys(name for name, _ in parts):
        architecture, _, model = name.partition(" ")
        cells = [", ".join(parts.get((name, kind), ())) for kind in kinds]
        lines.append(f"| {f'`{architecture}` {model}'.strip()} | {' | '.join(cells)} |")
    return "\n".join(lines)


def write(page: str, lines: str) -> str:
    """Return a page with the table between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert end, "the page has no place for the table"
    return f"{before}{BEGIN}\n{lines}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(write(PAGE.read_text(encoding="utf-8"), table(CASES)), encoding="utf-8")
