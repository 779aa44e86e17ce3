"""PairChoice: which nodes a call's next attempt prefers after its earlier failures."""

from __future__ import annotations

from collections.abc import Set

from baton.link.words import MOVED, NodeRole
from router.fleet.fleet import Fleet, Pair
from router.fleet.load.node_load import NodeLoad
from router.fleet.node import LegDelta
from router.policies.base import Placement


class PairChoice:
    """Remembers on which nodes and pairs of nodes one call has failed.

    No node is excluded for good: failed nodes are used again if no other nodes are left.
    """

    def __init__(self) -> None:
        self._failed_nodes: set[str] = set()
        self._failed_pairs: set[Pair] = set()
        self._last_decode = ""

    def note_failure(
        self, prefill: str, decode: str, item: LegDelta, silent: Set[str] = frozenset()
    ) -> None:
        """Note that an attempt on this pair of nodes, given by engine ids, failed.

        If nodes are silent, they are blamed, even if their partner reported the error. Otherwise
        the node that failed is blamed if it is lost, broken, out of memory, or lacks the call's
        adapter. Any other error concerns the hand-off between the nodes, so the pair is blamed.
        """
        error = item.delta.error
        assert error is not None
        self._last_decode = decode
        if silent:
            self._failed_nodes |= silent
        elif item.node_lost or error.code in ("INTERNAL", *MOVED):
            self._failed_nodes.add(prefill if item.role is NodeRole.PREFILL else decode)
        else:
            self._failed_pairs.add((prefill, decode))

    def narrow(self, fleet: Fleet) -> Fleet:
        """Return the nodes of ``fleet`` that suit this call best; empty only if ``fleet`` is empty.

        Nodes and pairs on which the call failed are left out if others remain. The decode node of
        the last attempt is preferred, because its prefix cache already has the KV that arrived.
        """
        if not (self._failed_nodes or self._failed_pairs):
            return fleet
        fleet = fleet.only(prefill=self._is_unhurt) or fleet
        fleet = fleet.only(decode=self._is_unhurt) or fleet
        fleet = fleet.only(ruled_out=self._failed_pairs) or fleet
        return fleet.only(decode=lambda node: node.engine_id == self._last_decode) or fleet

    def has_failed(self, placement: Placement) -> bool:
        """Return whether the call has failed on this pair before, or on one of its nodes."""
        prefill = placement.prefill.engine_id if placement.prefill else ""
        pair = (prefill, placement.decode.engine_id)
        return pair in self._failed_pairs or not self._failed_nodes.isdisjoint(pair)

    def _is_unhurt(self, node: NodeLoad) -> bool:
        return node.engine_id not in self._failed_nodes
