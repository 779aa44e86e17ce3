"""A policy that lets decode nodes compute some requests alone, and places all others by another."""

from __future__ import annotations

from router.fleet.fleet import Fleet
from router.policies.base import Placement, RouteQuery, RoutingPolicy

EVERY = 3  # request goes to a decode node alone


class SometimesAlone:
    """See the module.

    Args:
        policy: policy for pairs.
    """

    def __init__(self, policy: RoutingPolicy) -> None:
        self._policy = policy
        self._num_picked = 0

    def pick(self, query: RouteQuery, fleet: Fleet) -> Placement | None:
        self._num_picked += 1
        number, rest = divmod(self._num_picked, EVERY)
        if rest or not fleet.self_prefilling:
            return self._policy.pick(query, fleet)
        nodes = fleet.self_prefilling
        return Placement(None, nodes[number % len(nodes)])
