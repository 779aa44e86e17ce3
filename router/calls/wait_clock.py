"""WaitClock: measures how long the event loop's thread has waited for a CPU.

A router that shares its core with other processes uses little CPU time, even if it always has work.
Without this clock, such a router would seem idle.
"""

from __future__ import annotations

import os
from pathlib import Path

_SCHEDSTAT = Path("/proc/thread-self/schedstat")
_MAX_BYTES = 128


class WaitClock:
    """A clock of the seconds for which a thread was ready to run while others used its CPU.

    The thread that calls the clock first is measured. If the kernel does not count these seconds,
    the clock stays at 0.
    """

    def __init__(self) -> None:
        self._file: int | None = None
        self._is_open = False

    def __call__(self) -> float:
        if not self._is_open:
            self._is_open = True
            try:
                self._file = os.open(_SCHEDSTAT, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:  # not Linux, or a kernel that does not count
                self._file = None
        if self._file is None:
            return 0.0
        # Three numbers: nanoseconds on a CPU, nanoseconds of waiting for a CPU, number of time
        # slices
        return int(os.pread(self._file, _MAX_BYTES, 0).split()[1]) / 1e9
