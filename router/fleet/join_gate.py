"""JoinGate: decides which nodes may join now.

    a living node has the name or engine id       refuse, unless the process key matches
    too many nodes join from one address          retry later
    the router has its maximum of nodes           retry later
    registrations would take too much memory      retry later

A name belongs to a node while its link lives; another node with this name is refused and retries.
A restarted node can join once its old link is dead: at once if the process died, after the node
timeout if the machine did.
"""

from __future__ import annotations

import hmac
import time
from collections import Counter, OrderedDict
from collections.abc import Callable

from baton.link.words import NodeRegistration
from router.fleet.node import Node, num_bytes_of

MAX_NODES = 4096
# Maximum number of bytes of all registrations. A registration has some kB, mostly what the node's
# peers must know to connect.
MAX_KEPT_BYTES = 96 * 2**20
MAX_KEPT_BYTES_OF_ADDRESS = 32 * 2**20
# Joins allowed per address: a burst that is large enough for a whole cluster to join again, then a
# steady rate.
JOIN_BURST, JOINS_PER_S = 2048.0, 20.0
MAX_ADDRESSES = 1024
MAX_EXPELLED = 4096


class JoinGate:
    """Decides for one router which nodes may join now.

    Args:
        clock: returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # Address -> (joins left, when this number was computed). The address that joined last is at
        # the end.
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._expelled: OrderedDict[str, None] = OrderedDict()  # engine ids
        # The nodes that are here, and the bytes of their registrations by address
        self._by_id: dict[str, Node] = {}
        self._by_name: dict[str, Node] = {}
        self._num_bytes: Counter[str] = Counter()

    def expel(self, engine_id: str) -> None:
        """Refuse the process with this engine id from now on; its node may join after a restart."""
        self._expelled[engine_id] = None
        while len(self._expelled) > MAX_EXPELLED:
            self._expelled.popitem(last=False)

    def is_expelled(self, engine_id: str) -> bool:
        """Return whether an operator removed the node with this engine id."""
        return engine_id in self._expelled

    @property
    def num_nodes(self) -> int:
        """Number of nodes that are here, over all base models of the router."""
        return len(self._by_id)

    def note_joined(self, node: Node) -> None:
        """Count a node that joins one of the router's pools."""
        self._by_id[node.engine_id] = self._by_name[node.name] = node
        self._num_bytes[node.address] += node.num_bytes

    def namesakes(self, node: Node) -> list[Node]:
        """Return the nodes that are here and have the name or the engine id of a joining node."""
        found = self._by_id.get(node.engine_id), self._by_name.get(node.name)
        return [one for one in dict.fromkeys(found) if one is not None]

    def note_left(self, node: Node) -> None:
        """Count no longer a node that left its pool."""
        if self._by_id.get(node.engine_id) is node:
            del self._by_id[node.engine_id]
        if self._by_name.get(node.name) is node:
            del self._by_name[node.name]
        self._num_bytes[node.address] -= node.num_bytes
        if not self._num_bytes[node.address]:
            del self._num_bytes[node.address]

    def obstacle(self, registration: NodeRegistration, address: str = "") -> str:
        """Return why a node may not join now, although it may later; empty if it may join.

        Args:
            address: remote address without the port; empty: unknown, so the limits per address do
                not apply.
        """
        own = self._by_id.get(registration.engine_id)
        named = self._by_name.get(registration.node_name)
        if own is not None and not is_same_process(own.registration, registration):
            return f"engine_id: {own.name}, which is alive, has {own.engine_id}"
        if named is not None and named is not own:
            return (
                f"node_name: a node {named.name} is alive here; "
                "stop it first, or give this one another --name"
            )
        num_bytes = num_bytes_of(registration)
        num_bytes_there = num_bytes + (self._num_bytes[address] if address else 0)
        num_bytes += self._num_bytes.total()
        if own is not None:  # the registration replaces the node's own earlier one
            num_bytes -= own.num_bytes
            num_bytes_there -= own.num_bytes if own.address == address and address else 0
        if num_bytes > MAX_KEPT_BYTES or num_bytes_there > MAX_KEPT_BYTES_OF_ADDRESS:
            return (
                f"registrations of all nodes may have {MAX_KEPT_BYTES} bytes together, those from "
                f"one address {MAX_KEPT_BYTES_OF_ADDRESS}"
            )
        if self.num_nodes >= MAX_NODES:
            return f"this router has {self.num_nodes} nodes, the most that it takes"
        if address and not self._take(address):
            return f"too many nodes join from {address}: {JOINS_PER_S:g} per second may"
        return ""

    def _take(self, address: str) -> bool:
        """Count a join from an address; return whether the rate limit allows it."""
        now = self._clock()
        left, since = self._left.pop(address, (JOIN_BURST, now))
        left = min(left + JOINS_PER_S * (now - since), JOIN_BURST)
        self._left[address] = (max(left - 1, 0.0), now)
        while len(self._left) > MAX_ADDRESSES:
            self._left.popitem(last=False)
        return left >= 1


def is_same_process(one: NodeRegistration, other: NodeRegistration) -> bool:
    """Return whether two registrations come from one process: engine id and process key agree."""
    keys = one.process_key, other.process_key
    return one.engine_id == other.engine_id and all(keys) and hmac.compare_digest(*keys)
