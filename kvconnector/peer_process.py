"""PeerProcess: detects that all processes of a peer have ended, also in containers.

When a peer connects, a pidfd (a file descriptor that refers to a process) is opened for each of its
processes. The start time in the peer info shows that the process id was not reused. The pidfd then
shows when all threads of the process have ended. A missing /proc/PID proves nothing, because it may
be hidden (hidepid, containers). A process id of another machine proves nothing either: that machine
may have a copied boot id.
"""

from __future__ import annotations

import os
import select
from pathlib import Path

from kvconnector.peer_info import PeerInfo, ProcessPlace, host_identity


class PeerProcess:
    """A watch on the processes of one peer, one process per rank.

    Args:
        peer: the peer's info, which names its processes.
    """

    def __init__(self, peer: PeerInfo) -> None:
        self.engine_id = peer.engine_id
        self._pidfds = [_open(place) for place in set(peer.processes())]

    def has_ended(self) -> bool:
        """Return whether all processes have certainly ended. Zombies count as ended."""
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
        return int(text.rpartition(")")[2].split()[19])  # field 22 of "pid (name) state ..."
    except (OSError, ValueError, IndexError):
        return 0


def _open(place: ProcessPlace) -> int | None:
    """Return a pidfd of a process; None if its process id may belong to another process now."""
    is_near = place.host != "" and place.host == host_identity()
    if not is_near or place.pid == 0 or place.started_at == 0 or not hasattr(os, "pidfd_open"):
        return None
    try:
        pidfd = os.pidfd_open(place.pid)
    except OSError:
        return None
    # If the start time still matches once the pidfd is open, the pidfd refers to this process.
    if start_time(place.pid) == place.started_at and not _has_ended(pidfd):
        return pidfd
    os.close(pidfd)
    return None


def _has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))
