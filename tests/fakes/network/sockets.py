"""Lists the sockets on which a tree of processes listens, read from /proc as an auditor would."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

_ACCEPTS = 0x10000  # of a unix socket's flags: somebody may connect to it


@dataclass(frozen=True, slots=True, order=True)
class Listening:
    """A socket that other processes can reach.

    Attributes:
        kind: tcp, udp or unix.
        host: address that it is bound to; a path or an abstract name for unix.
        port: 0 for unix.
    """

    kind: str
    host: str
    port: int = 0


def listening(pid: int) -> set[Listening]:
    """Find the sockets by which a process and its descendants can be reached."""
    root = psutil.Process(pid)
    found = set()
    for process in (root, *root.children(recursive=True)):
        for connection in process.net_connections(kind="inet"):
            is_udp = connection.type == socket.SOCK_DGRAM
            if (is_udp and connection.laddr) or connection.status == psutil.CONN_LISTEN:
                kind = "udp" if is_udp else "tcp"
                found.add(Listening(kind, connection.laddr.ip, connection.laddr.port))
        found.update(_unix(process.pid))
    return found


def _unix(pid: int) -> Iterator[Listening]:
    """Listening unix sockets of one process."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(link.readlink())
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    for line in Path(f"/proc/{pid}/net/unix").read_text(encoding="ascii").splitlines()[1:]:
        fields = line.split()
        if fields[6] in inodes and int(fields[3], 16) & _ACCEPTS:
            yield Listening("unix", fields[7] if len(fields) > 7 else "(unnamed)")
