"""The processes of a node of several ranks, found as any operator would."""

from __future__ import annotations

import os
from pathlib import Path

from baton.deployment.local_deployment import LocalDeployment


def ranks_of(deployment: LocalDeployment, name: str) -> list[int]:
    """Return the process ids of a node's ranks; the leader, the node's own process, is first."""
    node = deployment.child(name).process.pid
    others = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue  # it has ended meanwhile
        if parent == node and b"engine.executors.rank_process" in words:
            others.append(int(folder.name))
    return [node, *sorted(others)]


def is_running(pid: int) -> bool:
    """Return whether a process exists and is more than a zombie."""
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (ProcessLookupError, FileNotFoundError):
        return False
    return state != "Z"
