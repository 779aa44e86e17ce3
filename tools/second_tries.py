"""Records tests that failed and were tried again, and shows the most frequent ones.

    python -m tools.second_tries note    append the failures of pytest's last run to the record
    python -m tools.second_tries show    print how often each recorded test failed, by day

The record is `build/second_tries.jsonl`, or the file in BATON_SECOND_TRIES. Each run with failures
is one line of JSON. `make test` and similar targets record the failed tests before they run them
again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

LAST_FAILED = Path(".pytest_cache") / "v" / "cache" / "lastfailed"


def record_of(root: Path) -> Path:
    """Return the path of the record's file."""
    return Path(os.environ.get("BATON_SECOND_TRIES") or root / "build" / "second_tries.jsonl")


def note(root: Path, record: Path, *, now: datetime, revision: str) -> int:
    """Append the failed tests of pytest's last run to the record; return their number."""
    file = root / LAST_FAILED
    failed = sorted(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else []
    if failed:
        line = {"date": now.isoformat(timespec="seconds"), "revision": revision, "tests": failed}
        record.parent.mkdir(parents=True, exist_ok=True)
        with record.open("a", encoding="utf-8") as output:
            output.write(json.dumps(line) + "\n")
    return len(failed)


def days_of(record: Path) -> dict[str, Counter[str]]:
    """Count the failures of each test by day, the most frequent test first."""
    found: dict[str, Counter[str]] = {}
    if record.exists():
        for line in record.read_text(encoding="utf-8").splitlines():
            run = json.loads(line)
            for test in run["tests"]:
                found.setdefault(test, Counter())[run["date"][:10]] += 1
    return dict(sorted(found.items(), key=lambda one: -one[1].total()))


def main(root: Path, words: list[str]) -> int:
    """Run the command line; return the exit code."""
    record = record_of(root)
    if words == ["note"]:
        git = ["git", "-C", str(root), "rev-parse", "--short", "HEAD"]
        revision = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
        number = note(root, record, now=datetime.now(UTC), revision=revision)
        print(f"{number} failed tests noted in {record}")
    elif words == ["show"]:
        for test, days in days_of(record).items():
            shown = ", ".join(f"{day} {number}" for day, number in sorted(days.items()))
            print(f"{days.total():4} {test} ({shown})")
    else:
        print(__doc__)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parents[1], sys.argv[1:]))
