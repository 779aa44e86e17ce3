"""PowerOfTwo: picks the less loaded of two random nodes, for each role."""

from __future__ import annotations

import random
from collections.abc import Sequence

from router.fleet.fleet import Fleet
from router.fleet.load.node_load import NodeLoad
from router.policies.base import Placement, RouteQuery
from router.policies.least_tokens import load_with


class PowerOfTwo:
    """Picks the less loaded of two random nodes: nearly as good as the least loaded of all nodes.

    Several routers that know the same loads do not all pick the same node.

    Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", 2001.

    Args:
        seed: seed of the random draws.
    """

    def __init__(self, seed: int = 0) -> None:
        self._chance = random.Random(seed)

    def pick(self, query: RouteQuery, fleet: Fleet) -> Placement | None:
        if not fleet.prefills:
            return None
        prefill = self._lighter(fleet.prefills, query.num_prompt_tokens)
        num_tokens = query.num_prompt_tokens + query.max_tokens
        return Placement(prefill, self._lighter(fleet.reached_by(prefill), num_tokens))

    def _lighter(self, nodes: Sequence[NodeLoad], num_tokens: int) -> NodeLoad:
        drawn = self._chance.sample(nodes, min(2, len(nodes)))
        return min(drawn, key=lambda node: load_with(node, num_tokens))
