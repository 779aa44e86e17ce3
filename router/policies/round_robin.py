"""RoundRobin: the pairs in turn."""

from __future__ import annotations

from collections.abc import Sequence

from router.policies.base import NodePair, RouteQuery


class RoundRobin:
    """Each pair in turn, in the order of their names."""

    def __init__(self) -> None:
        self._turn = 0

    def pick(self, query: RouteQuery, pairs: Sequence[NodePair]) -> NodePair:
        ordered = sorted(pairs, key=lambda p: (p.prefill.node_name, p.decode.node_name))
        pair = ordered[self._turn % len(ordered)]
        self._turn += 1
        return pair
