"""Writes docs/performance.md from the files in benchmarks/results; `make performance`.

The script measures nothing. To change rows, targets or reasons for misses, edit `rows.py` in the
subject's folder.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from benchmarks.engine.rows import SUBJECT as ENGINE
from benchmarks.engine_cpu.rows import SUBJECT as ENGINE_CPU
from benchmarks.faults.rows import SUBJECT as FAULTS
from benchmarks.fleet.rows import SUBJECT as FLEET
from benchmarks.gpu.rows import SUBJECT as GPU
from benchmarks.handoff.rows import SUBJECT as HANDOFF
from benchmarks.kernels.rows import SUBJECT as KERNELS
from benchmarks.loadtest.rows import SUBJECT as LOADTEST
from benchmarks.page.headlines import HEADLINES
from benchmarks.page.page import write
from benchmarks.page.rows import Json, Measurement
from benchmarks.pooling.rows import SUBJECT as POOLING
from benchmarks.router.rows import SUBJECT as ROUTER
from benchmarks.security.rows import SUBJECT as SECURITY
from benchmarks.served.rows import SUBJECT as SERVED

PAGE = "docs/performance.md"
SUBJECTS = (
    *(
        HANDOFF,
        FAULTS,
        SERVED,
        POOLING,
        LOADTEST,
        ROUTER,
        FLEET,
        ENGINE,
        ENGINE_CPU,
        KERNELS,
        GPU,
        SECURITY,
    ),
)


def write_page(root: Path) -> None:
    """Write the page from the results in this repository."""

    def changes(measurement: Measurement, environment: Json) -> int:
        return count_changes(root, measurement.code, environment)

    (root / PAGE).write_text(write(SUBJECTS, root, HEADLINES, changes), encoding="utf-8")
    print(f"written to {PAGE}")


def count_changes(root: Path, code: str, environment: Json) -> int:
    """Return the number of commits since a run that changed these files; 0 if git cannot tell.

    A run with uncommitted changes ("+" after its revision) counts as a run of the next commit.
    """
    revision = str(environment["git_revision"])
    span = f"{revision.removesuffix('+')}..HEAD"
    try:
        done = subprocess.run(
            ["git", "rev-list", "--count", span, "--", *code.split()],
            cwd=root, capture_output=True, text=True, check=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return 0
    return max(int(done.stdout) - revision.endswith("+"), 0)
