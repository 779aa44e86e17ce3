"""Cores: find out on which CPU cores this process may run."""

from __future__ import annotations

import os


def usable_cores() -> frozenset[int]:
    """Return the cores that this process may use; all cores if the system does not say (macOS)."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))
