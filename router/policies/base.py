"""RoutingPolicy: picks a request's nodes. One file and one registry line per policy.

Policies see what is here, in `Fleet` and in `NodeLoad`. Node values are live, and policies only
read them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from router.fleet.fleet import Fleet
from router.fleet.load.node_load import NodeLoad


def _nothing_cached() -> Mapping[str, int]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteQuery:
    """Hold what is known of a request before it is placed.

    Attributes:
        num_prompt_tokens: tokens whose KV is needed first, including output of earlier attempts.
        max_tokens: most output tokens that may follow.
        session_id: requests of one session share a prefix; empty: no session.
        timeout_s: seconds until its deadline.
        leaves_room: whether to avoid nodes with queued work, so that other tenants find room.
        num_waiting: requests that wait at the router for nodes to have room.
        now: current time, by `time.monotonic`; 0: ignore elapsed times.
        find_cached_tokens: returns how many leading prompt tokens each node has cached, by engine
            id; nodes without any are left out. Called only if needed.
        adapter_load_s: seconds until a node that lacks the request's adapter has loaded it, by
            engine id.
    """

    num_prompt_tokens: int
    max_tokens: int
    session_id: str = ""
    timeout_s: float = math.inf
    leaves_room: bool = False
    num_waiting: int = 0
    now: float = 0.0
    find_cached_tokens: Callable[[], Mapping[str, int]] = _nothing_cached
    adapter_load_s: Mapping[str, float] = field(default_factory=dict)


class Candidate(NamedTuple):
    """A place that a policy considered, with its cost; for operators.

    Attributes:
        prefill: node name; empty: the decode node computes the prompt.
        cost: cost of the placement in a unit of the policy; lower is better.
        terms: parts of the cost, by name.
        assumed: names of nodes whose speed was not measured yet.
    """

    prefill: str
    decode: str
    cost: float
    terms: Mapping[str, float]
    assumed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Placement:
    """Hold where a request goes.

    Attributes:
        prefill: the prefill node; None: the decode node computes the prompt.
        num_cached_tokens: prompt tokens believed to be cached on the node that computes the prompt.
        is_probe: whether a more expensive node was chosen in order to measure it.
        explain: returns the best places considered, as of then, the chosen one first.
    """

    prefill: NodeLoad | None
    decode: NodeLoad
    num_cached_tokens: int = 0
    is_probe: bool = False
    explain: Callable[[], Sequence[Candidate]] = tuple


class RoutingPolicy(Protocol):
    """Pick nodes for requests. Called on the router's event loop: must not wait."""

    def pick(self, query: RouteQuery, fleet: Fleet) -> Placement | None:
        """Return nodes of ``fleet`` that reach each other, or None if there are none.

        Equal calls give equal answers, whatever the order in which nodes joined.
        """
