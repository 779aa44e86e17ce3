"""A routing policy, which picks the pair of nodes with the fewest open tokens."""

from __future__ import annotations

from router.fleet.fleet import Fleet
from router.fleet.load.node_load import NodeLoad
from router.policies.base import Placement, RouteQuery


class FewestRequests:
    """Picks the prefill node, and then the decode node, with the fewest open tokens."""

    def pick(self, query: RouteQuery, fleet: Fleet) -> Placement | None:
        prefills = [one for one in fleet.prefills if fleet.reached_by(one)]
        if not prefills:
            return None
        prefill = min(prefills, key=_load)
        return Placement(prefill, min(fleet.reached_by(prefill), key=_load))


def _load(node: NodeLoad) -> tuple[int, str]:
    return node.num_open_tokens, node.node_name
