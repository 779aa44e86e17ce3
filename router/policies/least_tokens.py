"""LeastTokens: picks the nodes with the fewest tokens of open requests."""

from __future__ import annotations

from router.fleet.fleet import Fleet
from router.fleet.load.node_load import NodeLoad
from router.policies.base import Placement, RouteQuery


class LeastTokens:
    """Picks the prefill node with the fewest open prompt tokens, then the least loaded decode node.

    The prefill node is chosen first, because its queue decides the time to first token. Of equally
    loaded nodes, the node with fewer requests is picked, then the first by name.
    """

    def pick(self, query: RouteQuery, fleet: Fleet) -> Placement | None:
        if not fleet.prefills:
            return None
        prefill = min(fleet.prefills, key=lambda node: load_with(node, query.num_prompt_tokens))
        num_tokens = query.num_prompt_tokens + query.max_tokens
        decodes = fleet.reached_by(prefill)
        return Placement(prefill, min(decodes, key=lambda node: load_with(node, num_tokens)))


def load_with(node: NodeLoad, num_tokens: int) -> tuple[float, int]:
    """Return a sort key of a node's load with ``num_tokens`` more tokens.

    The key is open tokens divided by the node's weight, then open requests.
    """
    return (node.num_open_tokens + num_tokens) / node.weight, node.num_open_requests
