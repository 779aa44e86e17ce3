"""Last words: finds out whether an error, a signal or lack of memory ended a process."""

from __future__ import annotations

import re
import signal
from pathlib import Path

_READ_BYTES = 64 * 1024
_SHOWN_CHARS = 1000
_ERROR = "error: "  # beginning of the lines that `print_error` writes
_NO_MEMORY = re.compile(r"MemoryError|bad_alloc|out of memory|can't allocate memory", re.IGNORECASE)
_WRITTEN_BY_PYTHON = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt)\b.*")
_SIGNALS = {
    signal.SIGBUS: "crashed (SIGBUS): a file that it had mapped was cut off, or /dev/shm is full",
    signal.SIGILL: "crashed (SIGILL): a library has instructions that this CPU does not have",
    signal.SIGALRM: "was ended by its own alarm (SIGALRM), as it hung when it should have ended",
}


def why_ended(code: int, log: Path, log_start: int = 0, *, ran_out: bool = False) -> str:
    """Return why a process ended, and the path of its log.

    Args:
        code: exit code; negative if a signal ended the process: minus the signal's number.
        log: file with the process's output.
        log_start: size of the log in bytes before the process began.
        ran_out: whether the kernel killed a process for lack of memory while this process ran.
    """
    try:
        lines = _last_lines(log, log_start)
    except OSError as error:  # no descriptor is free, or the log was removed
        return f"{_of_code(code, ran_out)}; its log {log} cannot be read: {error.strerror}"
    return f"{_of_lines(lines) or _of_code(code, ran_out)}; log: {log}"


def num_oom_kills(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return how many processes the kernel has killed for lack of memory.

    Counts the kills in this process's control group if possible, else on the whole machine. Returns
    0 if the number is unknown.
    """
    try:
        groups = (proc / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        groups = []
    files = [proc / "vmstat"]
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            files.insert(0, cgroups / path.lstrip("/") / "memory.events")
        elif "memory" in controllers.split(","):
            files.insert(0, cgroups / "memory" / path.lstrip("/") / "memory.oom_control")
    for file in files:
        try:
            words = [line.split() for line in file.read_text(encoding="utf-8").splitlines()]
        except OSError:
            continue
        for name, *numbers in filter(None, words):
            if name == "oom_kill" and numbers:
                return int(numbers[0])
    return 0


def _last_lines(log: Path, start: int) -> list[str]:
    with log.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(start, size - _READ_BYTES))
        return file.read().decode(errors="replace").strip().splitlines()


def _of_lines(lines: list[str]) -> str:
    """Return the last error line of a log, or the last line of a traceback; empty if none."""
    for line in reversed(lines):
        if line.startswith(_ERROR):
            return line.removeprefix(_ERROR)[:_SHOWN_CHARS]
        is_raised = _WRITTEN_BY_PYTHON.fullmatch(line) is not None
        if is_raised or line.startswith("terminate called"):
            text = line[:_SHOWN_CHARS]
            return f"out of memory ({text})" if _NO_MEMORY.search(line) else text
    return ""


def _of_code(code: int, ran_out: bool) -> str:
    if code >= 0:
        return f"ended with exit code {code} and named no error"
    try:
        number = signal.Signals(-code)
    except ValueError:
        return f"was ended by signal {-code}"
    if number is signal.SIGKILL:
        return (
            "out of memory: the kernel killed it (SIGKILL)"
            if ran_out
            else "was killed (SIGKILL): by somebody, or by the kernel as memory ran out"
        )
    if number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        return f"was told to end ({number.name})"
    return _SIGNALS.get(number, f"crashed ({number.name})")
