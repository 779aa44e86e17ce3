"""Routing policies by name. A new policy is a file in this package and a line below."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from baton.registry import Registry

if TYPE_CHECKING:  # policies are imported late, because `--help` must be fast
    from router.policies.base import RoutingPolicy

POLICIES: Registry[Callable[[], RoutingPolicy]] = Registry(
    "routing policy",
    {
        "cost": "router.policies.cost:Cost",
        "least_tokens": "router.policies.least_tokens:LeastTokens",
        "power_of_two": "router.policies.power_of_two:PowerOfTwo",
        "prefix_aware": "router.policies.prefix_aware:PrefixAware",
        "round_robin": "router.policies.round_robin:RoundRobin",
        "session_affinity": "router.policies.session_affinity:SessionAffinity",
    },
    plugin_group="baton.policies",
)
