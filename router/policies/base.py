"""RoutingPolicy: where a request goes. One file per policy, one registry line.

What policies see is here and in `router/fleet.py`; what they read of a node is live and theirs to
read only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from baton.link import NodeBeat

if TYPE_CHECKING:  # a fleet is made of the views below
    from router.fleet import Fleet


def _nothing_cached() -> Mapping[str, int]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteQuery:
    """What is known of a request before it is placed.

    Attributes:
        num_prompt_tokens: whose KV is needed before the next token: also those that earlier
            attempts sampled.
        max_tokens: that may follow.
        session_id: requests with the same one share a prefix; empty: unknown.
        timeout_s: until its deadline.
        find_cached_tokens: how many first tokens of the prompt each node has in its prefix cache,
            by engine id; nodes that have none are not in it. Asked only by who needs it.
    """

    num_prompt_tokens: int
    max_tokens: int
    session_id: str = ""
    timeout_s: float = math.inf
    find_cached_tokens: Callable[[], Mapping[str, int]] = _nothing_cached


class NodeView(Protocol):
    """A node as a policy sees it, now.

    Attributes:
        weight: share of its due that it is to get, above 0 to 1: less while it warms up.
        num_blocks: of its KV cache.
        num_open_requests: placed there by this router and not finished there.
        num_open_tokens: prompt tokens not computed yet (prefill), or prompt tokens and those that
            may follow (decode), of these requests.
        beat: how busy the node said it is, all routers' requests together.
    """

    @property
    def node_name(self) -> str: ...
    @property
    def engine_id(self) -> str: ...
    @property
    def weight(self) -> float: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def num_open_requests(self) -> int: ...
    @property
    def num_open_tokens(self) -> int: ...
    @property
    def beat(self) -> NodeBeat: ...


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request goes.

    Attributes:
        prefill: None: the decode node computes the prompt itself.
    """

    prefill: NodeView | None
    decode: NodeView


class RoutingPolicy(Protocol):
    """Picks nodes. Called on the router's event loop: must not wait."""

    def pick(self, query: RouteQuery, fleet: Fleet) -> Placement | None:
        """Choose nodes of ``fleet`` that reach each other; None if this policy finds none.

        The same calls give the same answers, in whatever order nodes joined.
        """
