"""Connections between a node's leading process and its other ranks, for one more transport.

A rank's process has one connection for its first transport. For another transport over the same
memory, each rank connects to a socket of the leading process, so all ranks must be on one machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection

import msgspec

from baton.api.errors import TransferError
from baton.processes import rank_links
from kvconnector.ranks.messages import Open


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
    links: dict[int, Connection] = {}
    with rank_links.listen() as listener:
        first = attach(msgspec.msgpack.encode(Open(connector, engine_id, listener.address)))
        while len(links) < len(first):
            try:
                rank, link = listener.accept()
            except TimeoutError:
                raise TransferError(
                    "a rank's process opened no transport for cached prefixes in "
                    f"{rank_links.START_TIMEOUT_S:g} s"
                ) from None
            links[int(rank)] = link
    return dict(sorted(links.items()))


def connect_rank(address: str, rank: int) -> Connection:
    """Connect this rank to the leading process; see `link_ranks`."""
    return rank_links.connect(address, b"%d" % rank)
