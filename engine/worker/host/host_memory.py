"""Host memory: how much this process may use, and its peak during a call. For Linux."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class HostMemory:
    """The memory that this process may use, in bytes.

    Attributes:
        total: the machine's memory, or the smallest limit of this process's control groups if less.
        available: the part of ``total`` that can still be allocated without swapping.
    """

    total: int
    available: int


def read_host_memory(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> HostMemory:
    """Return the memory that the machine and control groups (version 1 or 2) leave this process.

    Args:
        proc: where procfs is mounted.
        cgroups: where control groups are mounted.
    """
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    machine = _named_numbers(proc / "meminfo")
    total = machine.get("MemTotal", physical // 1024) * 1024
    available = machine.get("MemAvailable", total // 1024) * 1024
    for group in _memory_groups(proc, cgroups):
        limit = _first_number(group, "memory.max", "memory.limit_in_bytes")
        used = _first_number(group, "memory.current", "memory.usage_in_bytes")
        if limit is None or used is None:
            continue
        statistics = _named_numbers(group / "memory.stat")
        # The kernel can drop inactive file pages, so they are available.
        reclaimable = statistics.get("total_inactive_file", statistics.get("inactive_file", 0))
        total = min(total, limit)
        available = min(available, max(limit - used + reclaimable, 0))
    return HostMemory(total, min(available, total))


def peak_growth(call: Callable[[], None], proc: Path = _PROC) -> int:
    """Run ``call``; return by how many bytes the resident set grew at its peak.

    The kernel's peak of the resident set is reset first (proc_pid_clear_refs(5)). If that is
    forbidden, the peak counts from the process's start, and the result is an upper bound.

    Args:
        proc: where procfs is mounted.
    """
    before = _named_numbers(proc / "self" / "status").get("VmRSS", 0) * 1024
    try:
        (proc / "self" / "clear_refs").write_text("5", encoding="ascii")
    except OSError:
        call()
        unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, other systems KiB
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    else:
        call()
        peak = _named_numbers(proc / "self" / "status").get("VmHWM", 0) * 1024
    return max(peak - before, 0)


def _memory_groups(proc: Path, cgroups: Path) -> Iterator[Path]:
    """Return the control groups that may limit this process's memory, with all their parents."""
    try:
        lines = (proc / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mount = cgroups / "memory" if controllers else cgroups
        # In a container, the path may be the host's; then only the mount itself is visible here.
        group = mount / path.strip("/")
        yield group
        while group != mount:
            group = group.parent
            yield group


def _named_numbers(path: Path) -> dict[str, int]:
    """Read lines such as ``MemTotal:  100 kB`` or ``inactive_file 100``; empty if unreadable."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    words = [line.split() for line in lines]
    return {w[0].rstrip(":"): int(w[1]) for w in words if len(w) > 1 and w[1].isdigit()}


def _first_number(folder: Path, *names: str) -> int | None:
    """Return the number in the first of the files that has one; ``max`` is no number."""
    for name in names:
        try:
            text = (folder / name).read_text(encoding="utf-8").strip()
        except OSError:
            continue
        if text.isdigit():
            return int(text)
    return None
