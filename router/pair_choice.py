"""PairChoice: which pairs are left for a call's next attempt, after what went wrong on others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from baton.link import NodeRole
from router.node_pool import LegDelta
from router.policies.base import NodePair


class PairChoice:
    """What one call remembers of its failed attempts.

    Nothing is ruled out for good: where nothing better is left, what failed is tried again.
    """

    def __init__(self) -> None:
        self._failed_nodes: set[str] = set()
        self._failed_pairs: set[tuple[str, str]] = set()
        self._last_decode = ""

    def note_failure(self, prefill: str, decode: str, item: LegDelta) -> None:
        """An attempt on this pair of engine ids ended with an error.

        A node that is lost, dead or short of memory is at fault alone. What else one of the two
        says is about what passes between them, and so about the pair.
        """
        error = item.delta.error
        assert error is not None
        self._last_decode = decode
        if item.node_lost or error.code in ("INTERNAL", "PREEMPTED"):
            self._failed_nodes.add(prefill if item.role is NodeRole.PREFILL else decode)
        else:
            self._failed_pairs.add((prefill, decode))

    def candidates(self, pairs: Sequence[NodePair]) -> Sequence[NodePair]:
        """The best of ``pairs``; as good as each other, and never none if there is one.

        The decode node of the last attempt comes first among those without fault: its prefix
        cache has what had arrived.
        """
        wishes: tuple[Callable[[NodePair], bool], ...] = (
            lambda pair: pair.prefill.engine_id not in self._failed_nodes,
            lambda pair: pair.decode.engine_id not in self._failed_nodes,
            lambda pair: _ids(pair) not in self._failed_pairs,
            lambda pair: pair.decode.engine_id == self._last_decode,
        )
        for is_wished in wishes:
            pairs = [pair for pair in pairs if is_wished(pair)] or pairs
        return pairs

    def has_failed(self, pair: NodePair) -> bool:
        """Whether a pair, or one of its nodes, failed this call before."""
        return _ids(pair) in self._failed_pairs or not self._failed_nodes.isdisjoint(_ids(pair))


def _ids(pair: NodePair) -> tuple[str, str]:
    return pair.prefill.engine_id, pair.decode.engine_id
