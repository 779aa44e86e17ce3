"""Host memory: how much of it this process may use, and the peak of what a call uses. Linux.

Refuses to know: models, caches, devices other than the CPU.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes of memory.

    Attributes:
        total: the machine's, or the smallest limit of this process's control groups.
        available: of it, what can still be had without swapping.
    """

    total: int
    available: int


def read_host_memory(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> HostMemory:
    """What the machine and the control groups (version 1 or 2) leave to this process.

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
        # The kernel gives file pages that nobody used lately up before it kills anybody.
        reclaimable = statistics.get("total_inactive_file", statistics.get("inactive_file", 0))
        total = min(total, limit)
        available = min(available, max(limit - used + reclaimable, 0))
    return HostMemory(total, min(available, total))


def peak_growth(call: Callable[[], None], proc: Path = _PROC) -> int:
    """Bytes by which the resident set, while ``call`` ran, was at most larger than before.

    The kernel's mark of the highest resident set is reset before (proc_pid_clear_refs(5)). Where
    it forbids that, the mark is the highest since the process began, and the result an upper bound.

    Args:
        proc: where procfs is mounted.
    """
    before = _named_numbers(proc / "self" / "status").get("VmRSS", 0) * 1024
    try:
        (proc / "self" / "clear_refs").write_text("5", encoding="ascii")
    except OSError:
        call()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    else:
        call()
        peak = _named_numbers(proc / "self" / "status").get("VmHWM", 0) * 1024
    return max(peak - before, 0)


def _memory_groups(proc: Path, cgroups: Path) -> Iterator[Path]:
    """The process's control groups that may limit memory, with all those above them."""
    try:
        lines = (proc / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mount = cgroups / "memory" if controllers else cgroups
        # Inside a container the path may be the host's, and only the mount itself be there.
        group = mount / path.strip("/")
        yield group
        while group != mount:
            group = group.parent
            yield group


def _named_numbers(path: Path) -> dict[str, int]:
    """Lines such as ``MemTotal:  100 kB`` or ``inactive_file 100``; empty when unreadable."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    words = [line.split() for line in lines]
    return {w[0].rstrip(":"): int(w[1]) for w in words if len(w) > 1 and w[1].isdigit()}


def _first_number(folder: Path, *names: str) -> int | None:
    """Of the first of these files that holds a number; ``max`` is none."""
    for name in names:
        try:
            text = (folder / name).read_text(encoding="utf-8").strip()
        except OSError:
            continue
        if text.isdigit():
            return int(text)
    return None
