"""Connections between a node's leading process and its other ranks, for one more transport.

A rank's process has one connection for its first transport. For another transport over the same
memory, each rank connects to a socket of the leading process, so all ranks must be on one machine.
"""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from baton.api.errors import TransferError
from kvconnector.ranks.messages import Open

START_TIMEOUT_S = 60.0


def link_ranks(
    attach: Callable[[bytes], Mapping[int, Connection]], connector: str, engine_id: str
) -> dict[int, Connection]:
    """Start one more service on each other rank; return the connections by rank.

    Args:
        attach: starts a service on all other ranks with an encoded `Open`, and returns their first
            connections by rank.
        connector: name of the transport in the registry.
        engine_id: name of this end of the connector; no other end has this name.

    Raises TransferError if a rank does not connect in time.
    """
    # Only this user can enter the folder, so only this user can connect to the socket.
    with tempfile.TemporaryDirectory(prefix="baton-ranks-") as folder:
        address = str(Path(folder) / "socket")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
            server.bind(address)
            server.listen()
            server.settimeout(START_TIMEOUT_S)
            first = attach(msgspec.msgpack.encode(Open(connector, engine_id, address)))
            links: dict[int, Connection] = {}
            while len(links) < len(first):
                links.update([_accept(server)])
            return dict(sorted(links.items()))


def _accept(server: socket.socket) -> tuple[int, Connection]:
    try:
        accepted, _ = server.accept()
    except TimeoutError:
        raise TransferError(
            f"a rank's process opened no transport for cached prefixes in {START_TIMEOUT_S:g} s"
        ) from None
    accepted.setblocking(True)
    link = Connection(accepted.detach())
    return int(link.recv_bytes()), link


def connect_rank(address: str, rank: int) -> Connection:
    """Connect this rank to the leading process; see `link_ranks`."""
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    end.connect(address)
    link = Connection(end.detach())
    link.send_bytes(b"%d" % rank)
    return link
