"""RoundRobin: picks the nodes in turn, whatever their load."""

from __future__ import annotations

from collections.abc import Sequence

from router.fleet.fleet import Fleet
from router.fleet.load.node_load import NodeLoad
from router.policies.base import Placement, RouteQuery


class RoundRobin:
    """Picks prefill nodes in turn, and for each in turn the decode nodes that it reaches."""

    def __init__(self) -> None:
        self._prefill_turns, self._decode_turns = _Turns(), _Turns()

    def pick(self, query: RouteQuery, fleet: Fleet) -> Placement | None:
        if not fleet.prefills:
            return None
        prefill = self._prefill_turns.next_node(fleet.prefills)
        return Placement(prefill, self._decode_turns.next_node(fleet.reached_by(prefill)))


class _Turns:
    """Counts each node's turns; a node that joins or returns starts at the current count."""

    def __init__(self) -> None:
        self._turns: dict[str, float] = {}  # by engine id
        self._now = 0.0

    def next_node(self, nodes: Sequence[NodeLoad]) -> NodeLoad:
        """Return the node that had the fewest turns, the first by name if several had.

        A turn counts double for a node of half the weight.
        """
        turns = self._turns
        # Drop the counts of nodes that left once they outnumber the counts of present nodes
        if len(turns) > 2 * len(nodes) + 16:
            ids = {node.engine_id for node in nodes}
            self._turns = turns = {key: turn for key, turn in turns.items() if key in ids}
        next_ = min(nodes, key=lambda node: max(turns.get(node.engine_id, 0.0), self._now))
        self._now = max(turns.get(next_.engine_id, 0.0), self._now)
        turns[next_.engine_id] = self._now + 1.0 / next_.weight
        return next_
