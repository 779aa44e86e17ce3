"""Measures the memory bandwidth: how many bytes per second all cores read together.

Decoding reads all weights for each step, so the memory bandwidth limits the tokens per second.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from baton.processes.cores import usable_cores

_MOST_BYTES = 2**29  # size of all buffers together; the CPU's caches hold less
_ROUNDS = 6


def read_bytes_per_s(cores: Sequence[int] = (), *, total_bytes: int = _MOST_BYTES) -> float:
    """Measure the bandwidth with which these cores read memory at the same time.

    Each core searches its own buffer for a byte that the buffer does not contain. The C library's
    search reads as fast as memory allows, and releases the GIL. The fastest round counts, because
    other programs can only make rounds slower.

    Args:
        cores: the cores that read; empty: all cores that this process may use.
        total_bytes: size of all buffers together.
    """
    cores = list(cores) or sorted(usable_cores())
    size = total_bytes // len(cores)
    begin = threading.Barrier(len(cores))
    search = ctypes.CDLL(None).memchr
    search.restype = ctypes.c_void_p
    search.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]

    def read(core: int) -> list[tuple[float, float]]:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {core})  # binds only this thread
        buffer = ctypes.create_string_buffer(size)
        ctypes.memset(buffer, 1, size)  # unwritten pages would all map to one page of zeros
        times = []
        for _ in range(_ROUNDS):
            begin.wait()
            started_at = time.perf_counter()
            found = search(buffer, 2, size)
            times.append((started_at, time.perf_counter()))
            assert found is None, "the buffer has no such byte"
        return times

    with ThreadPoolExecutor(len(cores)) as pool:
        rounds = list(zip(*pool.map(read, cores), strict=True))
    seconds: list[float] = [
        max(end for _, end in one) - min(begun for begun, _ in one) for one in rounds
    ]
    return size * len(cores) / min(seconds)
