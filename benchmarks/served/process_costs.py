"""Measures CPU seconds and memory of a process and its descendants."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import psutil

_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Cost:
    """The CPU time and memory of a process and its descendants.

    Attributes:
        cpu_s: CPU seconds since the process started, including descendants that have ended.
        rss_mib: memory in MiB; shared pages count once per process that uses them.
        pss_mib: memory in MiB; shared pages count once, divided among the processes that use them.
    """

    cpu_s: float
    rss_mib: float
    pss_mib: float


def cost_of(pid: int) -> Cost:
    """Return the cost of a process and its living descendants; raises psutil.NoSuchProcess."""
    root = psutil.Process(pid)
    cpu_s = rss = pss = 0.0
    for process in (root, *root.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            cpu_s += times.user + times.system + times.children_user + times.children_system
            memory = process.memory_full_info()
            rss, pss = rss + memory.rss, pss + memory.pss
    return Cost(round(cpu_s, 2), round(rss / _MIB, 1), round(pss / _MIB, 1))
