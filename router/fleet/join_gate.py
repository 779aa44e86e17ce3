"""JoinGate: which of the nodes that may join at all may do so now. Knows no link and no request.

    a name, or an engine id, that a living node has     its own process only, by its key
    more joins from one address than a cluster makes    later
    more nodes than a router can hold                   later
    registrations of more bytes than it keeps           later

A name belongs to the node that has it for as long as that node's link lives: who comes under the
same name later is told so, and asks again. A node that was restarted gets in as soon as its old
link is seen to be gone: at once when its process died, after the node timeout when its machine did.
"""

from __future__ import annotations

import hmac
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable

from baton.link.words import NodeRegistration
from router.fleet.node import Node, num_bytes_of

MAX_NODES = 4096
# Of registrations: what nodes tell their peers through the router, some kilobytes each.
MAX_KEPT_BYTES = 96 * 2**20
MAX_KEPT_BYTES_OF_ADDRESS = 32 * 2**20
# A whole cluster may come back at once; nobody joins so often for long.
JOIN_BURST, JOINS_PER_S = 2048.0, 20.0
MAX_ADDRESSES = 1024
MAX_EXPELLED = 4096


class JoinGate:
    """Of one router.

    Args:
        clock: seconds that never go back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # Address -> (joins left, at that time); who came last is last.
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._expelled: OrderedDict[str, None] = OrderedDict()  # engine ids

    def expel(self, engine_id: str) -> None:
        """Have this start of a node not come back."""
        self._expelled[engine_id] = None
        while len(self._expelled) > MAX_EXPELLED:
            self._expelled.popitem(last=False)

    def is_expelled(self, engine_id: str) -> bool:
        """Say whether an operator parted with this start of a node."""
        return engine_id in self._expelled

    def obstacle(
        self, registration: NodeRegistration, nodes: Iterable[Node], address: str = ""
    ) -> str:
        """What keeps a node out now and may be gone soon; empty if nothing.

        Args:
            nodes: that have joined.
            address: where it dials from, without its port; counted only if it is given.
        """
        num_nodes, num_bytes = 0, num_bytes_of(registration)
        num_bytes_there = num_bytes
        for node in nodes:
            num_nodes += 1
            if is_same_process(node.registration, registration):
                continue
            if node.engine_id == registration.engine_id:
                return f"engine_id: {node.name}, which is alive, has {node.engine_id}"
            if node.name == registration.node_name:
                return (
                    f"node_name: a node {node.name} is alive here; "
                    "stop it first, or give this one another --name"
                )
            num_bytes += node.num_bytes
            if address and node.address == address:
                num_bytes_there += node.num_bytes
        if num_bytes > MAX_KEPT_BYTES or num_bytes_there > MAX_KEPT_BYTES_OF_ADDRESS:
            return (
                f"registrations of all nodes may have {MAX_KEPT_BYTES} bytes together, those from "
                f"one address {MAX_KEPT_BYTES_OF_ADDRESS}"
            )
        if num_nodes >= MAX_NODES:
            return f"this router has {num_nodes} nodes, the most that it takes"
        if address and not self._take(address):
            return f"too many nodes join from {address}: {JOINS_PER_S:g} per second may"
        return ""

    def _take(self, address: str) -> bool:
        """Count a join; returns whether it was one too many."""
        now = self._clock()
        left, since = self._left.pop(address, (JOIN_BURST, now))
        left = min(left + JOINS_PER_S * (now - since), JOIN_BURST)
        self._left[address] = (max(left - 1, 0.0), now)
        while len(self._left) > MAX_ADDRESSES:
            self._left.popitem(last=False)
        return left >= 1


def is_same_process(one: NodeRegistration, other: NodeRegistration) -> bool:
    """Say whether two registrations come from one process: only it and its routers know the key."""
    keys = one.process_key, other.process_key
    return one.engine_id == other.engine_id and all(keys) and hmac.compare_digest(*keys)
