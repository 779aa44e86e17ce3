"""PrefixAware: picks the nodes with the longest cached prefix, unless they are too busy."""

from __future__ import annotations

from collections.abc import Sequence

from router.fleet.fleet import Fleet
from router.fleet.load.node_load import NodeLoad
from router.policies.base import Placement, RouteQuery
from router.policies.least_tokens import load_with

# A node is too busy if its load exceeds the mean load both by this factor and by this many tokens.
MAX_LOAD_FACTOR = 1.5
MIN_EXCESS_TOKENS = 4096


class PrefixAware:
    """Picks the node with the longest prefix hit among those that are not too busy.

    If several nodes have equal hits, or no node has a hit, the policy picks the node with the
    fewest open tokens.
    """

    def pick(self, query: RouteQuery, fleet: Fleet) -> Placement | None:
        if not fleet.prefills:
            return None
        num_tokens = query.num_prompt_tokens
        prefill, num_cached = self._best(query, fleet.prefills, num_tokens)
        decodes = fleet.reached_by(prefill)
        decode, _ = self._best(query, decodes, num_tokens + query.max_tokens)
        return Placement(prefill, decode, num_cached)

    @staticmethod
    def _best(
        query: RouteQuery, nodes: Sequence[NodeLoad], num_tokens: int
    ) -> tuple[NodeLoad, int]:
        cached = query.find_cached_tokens()
        if cached:
            mean = sum(node.num_open_tokens for node in nodes) / len(nodes)
            limit = max(MAX_LOAD_FACTOR * mean, mean + MIN_EXCESS_TOKENS)
            hits = [
                (-cached[node.engine_id], load_with(node, num_tokens), index)
                for index, node in enumerate(nodes)
                if node.engine_id in cached and node.num_open_tokens <= limit * node.weight
            ]
            if hits:
                _, _, index = min(hits)
                return nodes[index], cached[nodes[index].engine_id]
        return min(nodes, key=lambda node: load_with(node, num_tokens)), 0
