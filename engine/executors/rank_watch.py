"""A small process beside a rank: reports and ends the rank if it is stopped (SIGSTOP).

    python -I -S rank_watch.py 1234 7 9     (1234: the rank's process, 7: its life line,
                                             9: a pipe that closes when the rank ends)

This process is needed because a stopped rank cannot report its state, and the engine's process may
be on another machine. This file runs as a script beside every rank, so it imports nothing large.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import struct
import subprocess
import sys
from pathlib import Path

STOPPED = ("T", "t")  # states in /proc/PID/stat: stopped by a signal, by a debugger
WAS_STOPPED = b"T"  # message that reports a stop
_LOOK_EVERY_S = 0.2
_MOST_LOOKS = 2


def process_state(pid: int) -> str:
    """Return the state letter of a process from /proc/PID/stat; empty if it is unknown."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def start_watch(life_line: int) -> None:
    """Start a process that watches this process, and that ends when this process ends."""
    read_end, _ = os.pipe()  # this process keeps the other end open
    command = [sys.executable, "-I", "-S", __file__]
    subprocess.Popen(
        [*command, str(os.getpid()), str(life_line), str(read_end)],
        pass_fds=[life_line, read_end],
        stdin=subprocess.DEVNULL,
    )
    os.close(read_end)


def watch(pid: int, life_line: int, its_end: int) -> None:
    """Watch a process until it ends or is stopped; report a stop on its life line and kill it."""
    num_looks = 0
    while num_looks < _MOST_LOOKS:
        if select.select([its_end], [], [], _LOOK_EVERY_S)[0]:
            return
        num_looks = num_looks + 1 if process_state(pid) in STOPPED else 0
    with contextlib.suppress(OSError):  # the life line's reader may be gone
        os.write(life_line, struct.pack("!i", len(WAS_STOPPED)) + WAS_STOPPED)
    os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    watch(*map(int, sys.argv[1:4]))
