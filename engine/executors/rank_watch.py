"""A small process beside a rank that others started: notices when the rank is stopped, and ends it.

    python -I -S rank_watch.py 1234 7 9     (1234: the rank; 7: its line of life;
                                             9: a pipe that ends when it does)

Who is stopped cannot say so, and the engine's process may be on another machine. This file is run
by itself, beside every rank: it imports nothing that is large.
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

STOPPED = ("T", "t")  # in /proc/PID/stat: by a signal, or by a debugger
WAS_STOPPED = b"T"  # what the line of life says then
_LOOK_EVERY_S = 0.2
_MOST_LOOKS = 2


def process_state(pid: int) -> str:
    """Of a process, as the kernel calls it; empty where nobody can say."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def start_watch(life_line: int) -> None:
    """Have this process watched from now on, by one that ends when it does."""
    read_end, _ = os.pipe()  # the other end stays open as long as this process lives
    command = [sys.executable, "-I", "-S", __file__]
    subprocess.Popen(
        [*command, str(os.getpid()), str(life_line), str(read_end)],
        pass_fds=[life_line, read_end],
        stdin=subprocess.DEVNULL,
    )
    os.close(read_end)


def watch(pid: int, life_line: int, its_end: int) -> None:
    """Look at a process until it has ended, or was stopped."""
    num_looks = 0
    while num_looks < _MOST_LOOKS:
        if select.select([its_end], [], [], _LOOK_EVERY_S)[0]:
            return
        num_looks = num_looks + 1 if process_state(pid) in STOPPED else 0
    with contextlib.suppress(OSError):  # nobody listens any more
        os.write(life_line, struct.pack("!i", len(WAS_STOPPED)) + WAS_STOPPED)
    os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    watch(*map(int, sys.argv[1:4]))
