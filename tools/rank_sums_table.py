"""Writes the table by which ranks choose who sums, from GPU suite results.

    python -m tools.rank_sums_table [RESULTS]

RESULTS is a file that `python -m benchmarks gpu_first --save` wrote; by default
results/gpu_suite.json. The rows of other GPUs stay in the table.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from baton_kernels.triton.ranks.measured import TABLE, MeasuredSum, read_table

RESULTS = Path("benchmarks/results/gpu_suite.json")
PART = "sum times"  # part of gpu_first
SUM = re.compile(r"sum: (\d+) ranks, (\d+) bytes")
TIME = re.compile(r"(\w+) ([\d.]+)")


def sums_in(document: dict[str, object]) -> list[MeasuredSum]:
    """Return the measured sums of the part `PART`; empty if it was not run."""
    environment, parts = document["environment"], document["parts"]
    assert isinstance(environment, dict)
    assert isinstance(parts, dict)
    return [
        MeasuredSum(
            environment["gpu"],
            int(found[1]),
            int(found[2]),
            {way: float(number) for way, number in TIME.findall(text)},
        )
        for key, text in parts.get(PART, {}).items()
        if (found := SUM.fullmatch(key))
    ]


def main(path: Path = RESULTS) -> int:
    sums = sums_in(json.loads(path.read_text(encoding="utf-8")))
    if not sums:
        print(f"{path} has no sums over ranks", file=sys.stderr)
        return 1
    measured = {(row.gpu, row.num_ranks) for row in sums}
    kept = [row for row in read_table() if (row.gpu, row.num_ranks) not in measured]
    rows = sorted([*sums, *kept], key=lambda row: row[:3])
    text = json.dumps([row._asdict() for row in rows], indent=1)
    TABLE.write_text(text + "\n", encoding="utf-8")
    print(f"{TABLE}: {len(rows)} sums of {len({row.gpu for row in rows})} GPUs")
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:2])))
