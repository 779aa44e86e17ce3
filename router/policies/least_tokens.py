"""LeastTokens: the pair whose nodes have the fewest tokens before them."""

from __future__ import annotations

from collections.abc import Sequence

from router.policies.base import NodePair, RouteQuery


class LeastTokens:
    """The prefill node with the fewest open prompt tokens, then the decode node with the fewest.

    The prefill queue decides the time to first token, so it counts first. Ties go to the node
    with fewer requests, then by name.
    """

    def pick(self, query: RouteQuery, pairs: Sequence[NodePair]) -> NodePair:
        return min(
            pairs,
            key=lambda pair: (
                pair.prefill.num_open_tokens,
                pair.decode.num_open_tokens,
                pair.prefill.num_open_requests + pair.decode.num_open_requests,
                pair.prefill.node_name,
                pair.decode.node_name,
            ),
        )
