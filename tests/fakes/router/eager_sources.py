"""PrefixSources that fetch whatever can be fetched; how long anything takes plays no part."""

from __future__ import annotations

from collections.abc import Mapping

from router.fleet.node import Node
from router.fleet.prefix_sources import PrefixSources, SourceTerms


class EagerSources(PrefixSources):
    """Sources for which each fetch takes no time, and computing a second."""

    def add_fetchable(
        self, cached: Mapping[str, int], readers: Mapping[str, Node]
    ) -> Mapping[str, int]:
        """Place requests as without fetches, so that nodes lack what other nodes have."""
        return cached

    def _terms(
        self, holder_id: str, name: str, reader: Node, own: int, num_lacking: int
    ) -> SourceTerms:
        self._line(holder_id, reader)
        return SourceTerms(name, num_lacking, fetch_s=0.0, compute_s=1.0)
