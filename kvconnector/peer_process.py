"""PeerProcess: proves that all processes of a peer have ended; works in containers.

A pidfd is opened when the peer is met, while its process lives; the start time that the peer tells
proves that the process is the right one. The descriptor then shows when all threads of the process
have ended, even if the process id is reused. A missing /proc/PID proves nothing, as it may be
hidden (hidepid, containers), and neither does a process id of another machine, whose kernel may
have a copied boot id.
"""

from __future__ import annotations

import os
import select
from pathlib import Path

from kvconnector.peer_info import PeerInfo, ProcessPlace, host_identity


class PeerProcess:
    """One peer's processes, one per rank, opened while they lived.

    Args:
        peer: peer info, which names the processes.
    """

    def __init__(self, peer: PeerInfo) -> None:
        self.engine_id = peer.engine_id
        self._pidfds = [_open(place) for place in set(peer.processes())]

    def has_ended(self) -> bool:
        """Return whether all processes have certainly ended; zombies have: they write nothing."""
        return bool(self._pidfds) and all(
            pidfd is not None and _has_ended(pidfd) for pidfd in self._pidfds
        )

    def close(self) -> None:
        """Stop watching the processes."""
        for pidfd in self._pidfds:
            if pidfd is not None:
                os.close(pidfd)
        self._pidfds = []


def start_time(pid: int) -> int:
    """Return when a process started, in kernel ticks since boot; 0: unknown."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        return int(text.rpartition(")")[2].split()[19])  # "pid (name) state ...": field 22
    except (OSError, ValueError, IndexError):
        return 0


def _open(place: ProcessPlace) -> int | None:
    """Return a descriptor of a process; None if it may be another process."""
    is_near = place.host != "" and place.host == host_identity()
    if not is_near or place.pid == 0 or place.started_at == 0 or not hasattr(os, "pidfd_open"):
        return None
    try:
        pidfd = os.pidfd_open(place.pid)
    except OSError:
        return None
    # Read while the process lives, so its id has not been reused.
    if start_time(place.pid) == place.started_at and not _has_ended(pidfd):
        return pidfd
    os.close(pidfd)
    return None


def _has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))
