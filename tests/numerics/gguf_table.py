"""The GGUF files that `test_gguf_families` compares; a program that writes docs/models.md's table.

python -m tests.numerics.gguf_table
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tests.numerics.gguf_families import GGUF_FAMILIES

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- written by tests/numerics/gguf_table.py -->", "<!-- end -->"

KINDS = ("F32", "F16", "Q8_0", "Q4_K")
Case = tuple[str, str, int]  # name of a family, type of the weights, number of parts
# Every family with each type in one file and in three; gpt-oss with its own type besides.
CASES: tuple[Case, ...] = (
    *((name, kind, parts) for name in GGUF_FAMILIES for kind in KINDS for parts in (1, 3)),
    ("gpt-oss", "MXFP4", 1),
)


def is_in_gate(case: Case) -> bool:
    """Return whether the gate tests a case: one of each family, and the last one."""
    name, kind, num_parts = case
    index = list(GGUF_FAMILIES).index(name)
    chosen = KINDS[index % len(KINDS)], 1 + 2 * (index % 2)
    return (kind, num_parts) == chosen or kind not in KINDS


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
