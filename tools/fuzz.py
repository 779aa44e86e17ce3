"""Fuzzes one target, guided by coverage (atheris): ``python -m tools.fuzz TARGET SECONDS``.

Inputs that reach new code, and inputs that fail, are added to the target's corpus. The exit code is
not 0 if any input fails.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import atheris

OURS = ["baton", "router", "kvconnector"]
with atheris.instrument_imports(include=OURS):
    from tests.fuzz.seeds import seeds
    from tests.fuzz.targets import CORPUS, TARGETS, run

MAX_BYTES = 4096
FOUND = Path("build/fuzz")


def main(name: str, seconds: int) -> int:
    """Fuzz in a new process, because libFuzzer ends the process; return the exit code."""
    found, kept = FOUND / name, CORPUS / name
    for folder in (found, kept):
        folder.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds(name)):
        (found / f"seed-{number}").write_bytes(seed)
    limits = [f"-max_len={MAX_BYTES}", "-rss_limit_mb=2048", "-timeout=5", "-verbosity=0"]
    command = [sys.executable, "-m", "tools.fuzz", "--libfuzzer", name, *limits]
    fuzzing = [f"-max_total_time={seconds}", "-print_final_stats=1", f"-artifact_prefix={kept}/"]
    rc = subprocess.run([*command, *fuzzing, str(found), str(kept)], check=False).returncode
    # An input that fails again during the merge is not stored twice.
    merging = ["-merge=1", f"-artifact_prefix={found}/"]
    subprocess.run([*command, *merging, str(kept), str(found)], check=False)
    print(f"{name}: exit code {rc}, {len(list(kept.iterdir()))} files in its corpus", flush=True)
    return rc


def _fuzz_here(name: str, arguments: list[str]) -> None:
    def target(data: bytes) -> None:
        run(name, data)

    # For a merge, libFuzzer starts itself again in a shell.
    itself = f"{sys.executable} -m tools.fuzz --libfuzzer {name}"
    atheris.Setup([itself, *arguments], target)
    atheris.Fuzz()


if __name__ == "__main__":
    if sys.argv[1] == "--libfuzzer":
        _fuzz_here(sys.argv[2], sys.argv[3:])
    names = list(TARGETS) if sys.argv[1] == "all" else [sys.argv[1]]
    sys.exit(max(main(name, int(sys.argv[2])) for name in names) and os.EX_SOFTWARE)
