"""BusyClock: for how long this process has had something to do.

A router that shares its core with other processes uses little CPU time even if it always has
something to do. It must not take itself for idle, so the time for which its event loop waited for a
CPU counts, too.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

_SCHEDSTAT = Path("/proc/thread-self/schedstat")
_MAX_BYTES = 128


class BusyClock:
    """Clock of the process's CPU seconds plus the seconds for which a thread waited for a CPU.

    The thread is the one that makes the first call. If the kernel does not tell its waiting time,
    only the CPU seconds count.
    """

    def __init__(self) -> None:
        self._file: int | None = None
        self._is_open = False

    def __call__(self) -> float:
        return time.process_time() + self._waited_s()

    def _waited_s(self) -> float:
        if not self._is_open:
            self._is_open = True
            try:
                self._file = os.open(_SCHEDSTAT, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:  # another system than Linux, or a kernel without these figures
                self._file = None
        if self._file is None:
            return 0.0
        # Three numbers: nanoseconds on a CPU, nanoseconds of waiting for one, number of time slices
        return int(os.pread(self._file, _MAX_BYTES, 0).split()[1]) / 1e9
