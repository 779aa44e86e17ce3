"""PairChoice: where a call's next attempt may go, after what went wrong on other nodes."""

from __future__ import annotations

from collections.abc import Set

from baton.link.words import NodeRole
from router.fleet.fleet import Fleet, Pair
from router.fleet.load.node_load import NodeLoad
from router.fleet.node import LegDelta
from router.policies.base import Placement


class PairChoice:
    """What one call remembers of its failed attempts.

    Nothing is ruled out for good: where nothing better is left, what failed is tried again.
    """

    def __init__(self) -> None:
        self._failed_nodes: set[str] = set()
        self._failed_pairs: set[Pair] = set()
        self._last_decode = ""

    def note_failure(
        self, prefill: str, decode: str, item: LegDelta, silent: Set[str] = frozenset()
    ) -> None:
        """An attempt on this pair of engine ids ended with an error.

        Nodes that are silent are at fault, whoever says what. One that is lost, dead or short of
        memory is at fault alone. What else one of the two says is about what passes between them,
        and so about the pair.
        """
        error = item.delta.error
        assert error is not None
        self._last_decode = decode
        if silent:
            self._failed_nodes |= silent
        elif item.node_lost or error.code in ("INTERNAL", "PREEMPTED"):
            self._failed_nodes.add(prefill if item.role is NodeRole.PREFILL else decode)
        else:
            self._failed_pairs.add((prefill, decode))

    def narrow(self, fleet: Fleet) -> Fleet:
        """The best part of ``fleet``; not empty if ``fleet`` is not.

        The decode node of the last attempt comes first among those without fault: its prefix
        cache has what had arrived.
        """
        if not (self._failed_nodes or self._failed_pairs):
            return fleet
        fleet = fleet.only(prefill=self._is_unhurt) or fleet
        fleet = fleet.only(decode=self._is_unhurt) or fleet
        fleet = fleet.only(ruled_out=self._failed_pairs) or fleet
        return fleet.only(decode=lambda node: node.engine_id == self._last_decode) or fleet

    def has_failed(self, placement: Placement) -> bool:
        """Whether a pair, or one of its nodes, failed this call before."""
        prefill = placement.prefill.engine_id if placement.prefill else ""
        pair = (prefill, placement.decode.engine_id)
        return pair in self._failed_pairs or not self._failed_nodes.isdisjoint(pair)

    def _is_unhurt(self, node: NodeLoad) -> bool:
        return node.engine_id not in self._failed_nodes
