"""Records where, when and with which options a measurement ran, and writes its JSON file.

What is recorded helps readers to judge the figures. Refuses to record: host names, user names,
paths.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEMO_MODEL = ROOT / "examples" / "demo_model"
RESULTS = ROOT / "benchmarks" / "results"


def record_environment(words: Sequence[str] | None = None) -> dict[str, object]:
    """Describe the machine, the software, and how busy the machine is now.

    Args:
        words: the measurement's command-line options; None: those of this process.
    """
    words = sys.argv[1:] if words is None else [word for word in words if word != "--save"]
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "git_revision": _git_revision(),
        "arguments": ["..." if "/" in word else word for word in words],
        "cpu": _cpu_model(),
        "num_cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }


def summary(samples: Sequence[float], digits: int = 2) -> dict[str, float]:
    """Return the median, the 90th percentile and the mean of two or more samples."""
    return {
        "median": round(statistics.median(samples), digits),
        "p90": round(statistics.quantiles(samples, n=10, method="inclusive")[-1], digits),
        "mean": round(statistics.fmean(samples), digits),
    }


def write_results(
    name: str, environment: Mapping[str, object], results: Mapping[str, object]
) -> None:
    """Write `results/<name>.json`; ``environment`` was recorded before the measurement."""
    document = {
        "environment": {
            **environment,
            "load_average_after": [round(x, 2) for x in os.getloadavg()],
        },
        **results,
    }
    path = RESULTS / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(f"written to benchmarks/results/{path.name}")


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _git_revision() -> str:
    """Return git's short revision, with ``+`` if files that affect results are changed."""
    try:
        revision = _git("rev-parse", "--short", "HEAD")
        # paths of files that affect no result
        apart = (":!tests", ":!docs", ":!benchmarks/results")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", *apart)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return revision + ("+" if changed else "")


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()
