"""Checks the formal model of the hand-off (docs/protocol/handoff.pml) with spin.

For each configuration, all reachable states are searched. A configuration with a deliberate mistake
must have an error. The script prints a table, and returns 1 if a result is not as expected. It
installs nothing; see install_spin.sh.
"""

from __future__ import annotations

import argparse
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

MODEL = Path(__file__).resolve().parents[1] / "docs" / "protocol" / "handoff.pml"
MEMORY_MIB = 8000
MAX_DEPTH = 1_000_000
FAULTS = ("LOSSES", "DUPLICATES", "CRASHES", "SUSPECTS", "CANCELS", "ROUTER_CRASHES")


@dataclass(frozen=True, slots=True)
class Configuration:
    """One search of the model's states.

    Attributes:
        settings: the model's macros (such as numbers of faults) that differ from those for "no
            fault at all".
        mistake: a macro that breaks the protocol, so that the search must find an error; empty:
            none.
        cycles: whether to search for endless runs in place of wrong states.
        quick: whether the short check includes this search.
    """

    name: str
    settings: dict[str, int]
    mistake: str = ""
    cycles: bool = False
    quick: bool = False


TWO = {"REQUESTS": 2, "TOKENS": 2, "ABSORB": 1}
SHARED_D = {**TWO, "PART_P": 1, "PART_D": 2, "PICK_LOWEST": 1}
SHARED_P = {**TWO, "PART_P": 0, "PART_D": 3, "PICK_LOWEST": 1}
CONFIGURATIONS = [
    Configuration("1 request: nothing fails", {}, quick=True),
    Configuration("1 request: crash, loss", {"CRASHES": 1, "LOSSES": 1}, quick=True),
    Configuration(
        "1 request: crash, 2 losses, duplicate", {"CRASHES": 1, "LOSSES": 2, "DUPLICATES": 1}
    ),
    Configuration("1 request: 2 crashes, loss", {"CRASHES": 2, "LOSSES": 1}),
    Configuration(
        "1 request: crash, loss, cancel, router's crash",
        {"CRASHES": 1, "LOSSES": 1, "CANCELS": 1, "ROUTER_CRASHES": 1},
    ),
    Configuration("1 request: stop and return", {"SUSPECTS": 1}),
    Configuration("1 request: stop and return, loss", {"SUSPECTS": 1, "LOSSES": 1, "ABSORB": 1}),
    Configuration("1 request: no endless run", {"CRASHES": 1, "LOSSES": 1}, cycles=True),
    Configuration("2 requests: nothing fails", TWO, quick=True),
    Configuration("2 requests: cancel, loss", {**TWO, "CANCELS": 1, "LOSSES": 1}),
    Configuration(
        "2 requests, 1 try: cancel, duplicate",
        {**TWO, "TRIES": 1, "CANCELS": 1, "DUPLICATES": 1},
    ),
    Configuration("2 requests, 1 try: crash, loss", {**TWO, "TRIES": 1, "CRASHES": 1, "LOSSES": 1}),
    Configuration("2 requests, 1 try: stop and return", {**SHARED_D, "TRIES": 1, "SUSPECTS": 1}),
    Configuration("2 requests: crash of their D", {**SHARED_D, "PART_KILLED": 2, "CRASHES": 1}),
    Configuration("2 requests: crash of one P", {**SHARED_D, "PART_KILLED": 0, "CRASHES": 1}),
    Configuration("2 requests: crash of their P", {**SHARED_P, "PART_KILLED": 0, "CRASHES": 1}),
    # With all faults at once, a search takes 5 GiB and some minutes of one core.
    Configuration("2 requests: crash of any node", {**TWO, "CRASHES": 1}),
    Configuration("2 requests: router's crash, loss", {**TWO, "ROUTER_CRASHES": 1, "LOSSES": 1}),
    Configuration("no quarantine", {"SUSPECTS": 1}, "NO_QUARANTINE", quick=True),
    Configuration("an expired lease frees", {"SUSPECTS": 1}, "LEASE_FREES", quick=True),
    Configuration("no epoch", {"SUSPECTS": 1, "CRASHES": 1}, "NO_EPOCH", quick=True),
    Configuration("commit before the data", {"CRASHES": 1}, "EARLY_COMMIT", quick=True),
    Configuration("quiet before the data", {**TWO, "CANCELS": 1}, "EARLY_QUIET", quick=True),
    Configuration("Cancel is sent once", {"CANCELS": 1, "LOSSES": 1}, "NO_RECANCEL", quick=True),
    Configuration("what no watermark covers", {"CRASHES": 1}, "KEEP_UNCOVERED", quick=True),
    Configuration("bytes outlive their process", {"CRASHES": 1}, "SOCKET_TAIL", quick=True),
]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a search; ``num_states``: number of states until its end or first error."""

    num_states: int
    seconds: float
    complete: bool
    error: str


def search(configuration: Configuration, folder: Path) -> Outcome:
    """Build spin's verifier for a configuration, and run it."""
    macros = [
        f"-D{name}={value}"
        for name, value in {**dict.fromkeys(FAULTS, 0), **configuration.settings}.items()
    ]
    if configuration.mistake:
        macros.append(f"-D{configuration.mistake}")
    _run(["spin", "-a", *macros, str(MODEL)], folder)
    kind = "-DNP" if configuration.cycles else "-DSAFETY"
    options = ["-O2", "-w", kind, "-DCOLLAPSE", "-DNOFAIR", "-DVECTORSZ=4096"]
    _run(["gcc", *options, f"-DMEMLIM={MEMORY_MIB}", "-o", "pan", "pan.c"], folder)
    start = time.perf_counter()
    told = _run(
        ["./pan", f"-m{MAX_DEPTH}", "-n", *(["-l"] if configuration.cycles else [])], folder
    )
    seconds = time.perf_counter() - start
    states = re.search(r"^\s*(\S+) states, stored", told, re.MULTILINE)
    error = re.search(r"^pan:\d+: (.+)$", told, re.MULTILINE)
    complete = "Search not completed" not in told and "max search depth too small" not in told
    return Outcome(
        num_states=int(float(states[1])) if states else 0,
        seconds=seconds,
        complete=complete and states is not None,
        error=error[1] if error else "",
    )


def _run(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{command[0]}: {(done.stdout + done.stderr).strip()}")
    return done.stdout


def main() -> int:
    """Run all searches, or only the quick ones; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few seconds; skip without spin")
    arguments = parser.parse_args()
    missing = [name for name in ("spin", "gcc") if shutil.which(name) is None]
    if missing:
        print(
            f"{' and '.join(missing)} not found: run tools/install_spin.sh (apt-get install spin)"
        )
        return 0 if arguments.quick else 1
    print(f"{'configuration':<50} {'states':>12} {'time':>8}  result")
    wrong = 0
    for configuration in CONFIGURATIONS:
        if arguments.quick and not configuration.quick:
            continue
        with tempfile.TemporaryDirectory(prefix="handoff-model-") as folder:
            outcome = search(configuration, Path(folder))
        if configuration.mistake:
            good = bool(outcome.error)
            result = f"found: {outcome.error}" if good else "NOT FOUND"
        else:
            good = outcome.complete and not outcome.error
            result = "holds" if good else outcome.error or "SEARCH NOT COMPLETE"
        wrong += not good
        name = ("mistake: " if configuration.mistake else "") + configuration.name
        print(
            f"{name:<50} {outcome.num_states:>12,} {outcome.seconds:>6.1f} s  {result}", flush=True
        )
    peak_mib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024
    print(f"largest search: {peak_mib:,} MiB")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
