"""RoutingPolicy: which pair of nodes gets a request. One file per policy, one registry line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteQuery:
    """What is known of a request before it is placed."""

    num_prompt_tokens: int
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    """A snapshot of a node.

    Attributes:
        num_open_requests: placed there by this router and not finished there.
        num_open_tokens: prompt tokens (prefill) or prompt and output tokens (decode) of those.
    """

    node_name: str
    engine_id: str
    num_open_requests: int
    num_open_tokens: int


@dataclass(frozen=True, slots=True)
class NodePair:
    """A prefill and a decode node that can reach each other."""

    prefill: NodeState
    decode: NodeState


class RoutingPolicy(Protocol):
    """Picks a pair. Called on the router's event loop: must not wait."""

    def pick(self, query: RouteQuery, pairs: Sequence[NodePair]) -> NodePair:
        """Choose one of ``pairs``, which is never empty."""
