"""RoutingPolicy: picks a request's nodes. A policy is one file and one registry line.

Policies see this file's types, `Fleet` and `NodeLoad`. Nodes' values change at any time; policies
only read them.
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
    """Facts about a request before it is placed.

    Attributes:
        num_prompt_tokens: tokens to compute first: the prompt, and output of earlier attempts.
        max_tokens: maximum number of output tokens that may follow.
        session_id: requests of one session share a prefix; empty: no session.
        timeout_s: seconds until the request's deadline.
        leaves_room: whether to avoid nodes with queued work, so that other tenants find room.
        num_waiting: requests that wait at the router for room on the nodes.
        now: current time, by `time.monotonic`; 0: ignore elapsed times.
        find_cached_tokens: returns how many leading prompt tokens each node has cached, by engine
            id, without nodes that have cached nothing. Called only if needed.
        adapter_load_s: seconds that a node needs to load the request's adapter, by engine id of
            nodes that lack it.
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
    """A place that a policy considered, with its cost, to show to operators.

    Attributes:
        prefill: node name; empty: the decode node computes the prompt.
        cost: cost of the place in the policy's own unit; lower is better.
        terms: parts of the cost, by name.
        assumed: names of nodes whose speed has not been measured yet.
    """

    prefill: str
    decode: str
    cost: float
    terms: Mapping[str, float]
    assumed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Placement:
    """The nodes that a request goes to.

    Attributes:
        prefill: the prefill node; None: the decode node computes the prompt.
        num_cached_tokens: prompt tokens believed to be cached on the node that computes the prompt.
        is_probe: whether a more expensive node was chosen to measure it.
        explain: returns the best places considered at that time, the chosen one first.
    """

    prefill: NodeLoad | None
    decode: NodeLoad
    num_cached_tokens: int = 0
    is_probe: bool = False
    explain: Callable[[], Sequence[Candidate]] = tuple


class RoutingPolicy(Protocol):
    """Picks nodes for requests. Runs on the router's event loop, so it must not wait."""

    def pick(self, query: RouteQuery, fleet: Fleet) -> Placement | None:
        """Return nodes of ``fleet`` that reach each other, or None if none do.

        Equal calls give equal answers, in whatever order the nodes joined.
        """
