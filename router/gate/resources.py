"""Measures which shares of its limits the router's process uses, and reports them to `Overload`."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

from baton.processes.process import num_descriptors_allowed
from router.gate.overload import Level, LoopLag, Overload

_CGROUP = Path("/sys/fs/cgroup")
_UNLIMITED = 2**60  # version-1 cgroups write a number near 2**63 if there is no limit
# Seconds between two measurements of descriptors and memory; the event loop's lag is measured more
# often.
_OTHERS_INTERVAL_S = 0.45
_OTHERS_AT_REST_S = 1.95  # while no connection has a request
# While fewer connections than this share have requests, and no timer is late, the lag is measured
# rarely.
_CALM_SHARE = 0.25


def num_descriptors() -> int:
    """Return the number of open file descriptors."""
    folder = Path("/proc/self/fd")
    # On Linux 6.2 and later, st_size is the number of open descriptors; older kernels report 0, so
    # they are counted.
    return folder.stat().st_size or sum(1 for _ in folder.iterdir())


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes."""
    num_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return num_pages * os.sysconf("SC_PAGE_SIZE")


def memory_limit_bytes(root: Path = _CGROUP, own: Path = Path("/proc/self/cgroup")) -> int:
    """Return the smallest of the machine's memory and the limits of the process's cgroups."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    try:
        lines = own.read_text(encoding="ascii").splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:  # cgroups of version 2, in which the limits of parent groups hold, too
            folder = root / path.lstrip("/")
            limits += [_limit_in(one / "memory.max") for one in (folder, *folder.parents)]
        elif "memory" in controllers.split(","):
            group = root / "memory" / path.lstrip("/")
            limits += [_limit_in(one / "memory.limit_in_bytes") for one in (group, *group.parents)]
    return min(limits)


def _limit_in(file: Path) -> int:
    try:
        text = file.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return _UNLIMITED
    return int(text) if text.isdecimal() else _UNLIMITED


def _share_of_descriptors(may_open: int) -> float:
    """Return the share of allowed descriptors that are open; 1 if none is left for counting."""
    try:
        return num_descriptors() / may_open
    except OSError:
        return 1.0


async def watch_resources(
    overload: Overload, connections_in_use: Callable[[], float], memory_limit: int = 0
) -> None:
    """Measure all signals and report them to ``overload`` until cancelled.

    Args:
        connections_in_use: returns the share of allowed connections that have a request in
            progress.
        memory_limit: limit in bytes; 0: the limit of the cgroup or machine.
    """
    lag = LoopLag()
    may_open, may_use = num_descriptors_allowed(), memory_limit or memory_limit_bytes()
    in_use, looked_at = 0.0, -math.inf
    while True:
        await lag.look(may_be_slow=in_use < _CALM_SHARE and overload.level is Level.NORMAL)
        in_use = connections_in_use()
        overload.note({"loop_lag": lag.lag_s, "connections": in_use})
        interval_s = _OTHERS_INTERVAL_S if in_use else _OTHERS_AT_REST_S
        if (now := time.monotonic()) - looked_at < interval_s:
            continue
        looked_at = now
        overload.note({"descriptors": _share_of_descriptors(may_open)})
        with contextlib.suppress(OSError):  # reading fails if no file descriptor is left
            overload.note({"memory": resident_bytes() / may_use})
