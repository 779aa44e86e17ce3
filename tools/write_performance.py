"""Write docs/performance.md from benchmarks/results; `python -m tools.write_performance`.

Measures nothing. The rows, their targets, and what holds the missed ones back are in
`tools/performance/`: edit them there.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tools.performance import engine, first_use, fleet, gpu, handoff, others, speculation
from tools.performance.page import write

PAGE = "docs/performance.md"
AREAS = (
    *handoff.AREAS,
    *engine.AREAS[:1],
    *first_use.AREAS,
    *others.AREAS,
    *fleet.AREAS,
    *engine.AREAS[1:],
    *speculation.AREAS,
    *gpu.AREAS,
)


def main(root: Path) -> int:
    """Write the page; returns the exit code."""
    (root / PAGE).write_text(write(AREAS, root), encoding="utf-8")
    print(f"written to {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parents[1]))
