"""SessionAffinity: sends a session's requests to the same nodes unless these are overloaded."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from router.fleet.fleet import Fleet
from router.fleet.load.node_load import NodeLoad
from router.policies.base import Placement, RouteQuery
from router.policies.least_tokens import LeastTokens

# A node whose load exceeds the mean load by this factor is left out.
MAX_LOAD_FACTOR = 1.25


class SessionAffinity:
    """Picks a session's nodes by rendezvous hashing with bounded loads.

    When a node leaves, only its own sessions move to other nodes. Requests without a session are
    placed by `LeastTokens`. Thaler and Ravishankar, "Using Name-Based Mappings to Increase Hit
    Rates", 1998; Mirrokni et al., "Consistent Hashing with Bounded Loads", 2016.
    """

    def __init__(self) -> None:
        self._by_tokens = LeastTokens()

    def pick(self, query: RouteQuery, fleet: Fleet) -> Placement | None:
        if not query.session_id or not fleet.prefills:
            return self._by_tokens.pick(query, fleet)
        prefill = _home(query.session_id, fleet.prefills, query.num_prompt_tokens)
        num_tokens = query.num_prompt_tokens + query.max_tokens
        return Placement(prefill, _home(query.session_id, fleet.reached_by(prefill), num_tokens))


def _home(session_id: str, nodes: Sequence[NodeLoad], num_tokens: int) -> NodeLoad:
    """Return the first node in the session's order of nodes that is not overloaded."""
    total = sum(node.num_open_tokens for node in nodes) + num_tokens
    total_weight = sum(node.weight for node in nodes)
    limit = MAX_LOAD_FACTOR * total / total_weight
    # An idle node is never left out, even if this one request exceeds the limit.
    free = [n for n in nodes if n.num_open_tokens == 0 or n.num_open_tokens < limit * n.weight]
    seed = xxhash.xxh3_64_intdigest(session_id.encode())

    # Rank by node name, so that a session keeps its nodes when they restart.
    def rank(node: NodeLoad) -> tuple[int, str]:
        return xxhash.xxh3_64_intdigest(node.node_name.encode(), seed), node.node_name

    return max(free or nodes, key=rank)
