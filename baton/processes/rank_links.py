"""Links between a node's leading process and its other ranks, over a socket of this machine.

    leading process   with listen() as listener:  start the ranks with listener.address
                      listener.accept() -> greeting, connection
    other rank        connect(address, greeting) -> connection

Refuses to know: what the ranks say to each other.
"""

from __future__ import annotations

import contextlib
import socket
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

START_TIMEOUT_S = 60.0  # longest wait for one rank


class LinkListener:
    """A socket to which ranks connect.

    Attributes:
        address: path of the socket.
    """

    def __init__(self, address: str, server: socket.socket) -> None:
        self.address = address
        self._server = server

    def accept(self) -> tuple[bytes, Connection]:
        """Return a rank's greeting and connection; raise TimeoutError after `START_TIMEOUT_S`."""
        accepted, _ = self._server.accept()
        accepted.setblocking(True)
        link = Connection(accepted.detach())
        return link.recv_bytes(), link


@contextlib.contextmanager
def listen() -> Iterator[LinkListener]:
    """Open a socket for ranks; close it at the end, which leaves the connections open."""
    # Only this user can enter the folder, so only this user can connect to the socket.
    with tempfile.TemporaryDirectory(prefix="baton-ranks-") as folder:
        address = str(Path(folder) / "socket")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
            server.bind(address)
            server.listen()
            server.settimeout(START_TIMEOUT_S)
            yield LinkListener(address, server)


def connect(address: str, greeting: bytes) -> Connection:
    """Connect to the leading process, and send a greeting."""
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    end.connect(address)
    link = Connection(end.detach())
    link.send_bytes(greeting)
    return link
