"""Routing policies by name. To add one: a file here and a line below."""

from __future__ import annotations

from collections.abc import Callable

from baton.registry import Registry
from router.policies.base import RoutingPolicy

POLICIES: Registry[Callable[[], RoutingPolicy]] = Registry(
    "routing policy",
    {
        "least_tokens": "router.policies.least_tokens:LeastTokens",
        "round_robin": "router.policies.round_robin:RoundRobin",
    },
)
