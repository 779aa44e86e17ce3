"""RoutingPolicy: picks a request's nodes. A policy is one file and one registry line.

Policies see the types in this file, `Fleet` and `NodeLoad`. The values of nodes change at any time;
policies only read them.
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
    """Facts about a request that a policy must place.

    Attributes:
        num_prompt_tokens: number of tokens of the prompt and of earlier attempts' output, which
            must be computed before the next token.
        max_tokens: maximum number of output tokens that may follow.
        session_id: requests with the same session id share a prefix; empty: no session.
        timeout_s: seconds until the request's deadline.
        leaves_room: whether to avoid nodes with queued work, to leave room for other tenants.
        num_waiting: number of requests that wait at the gate for room on the nodes.
        now: current time, by the clock of the nodes' loads; 0: ignore elapsed times.
        find_cached_tokens: returns how many leading prompt tokens each node has cached, by engine
            id; nodes that have cached nothing are left out. Tokens that a prefill node can fetch
            from other nodes count as cached. Called only if needed.
        find_cached_alone: returns the same for decode nodes that compute the prompt themselves, and
            may fetch tokens; None: call ``find_cached_tokens`` instead, because no node fetches.
        adapter_load_s: seconds that each node without the request's adapter needs to load it, by
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
    find_cached_alone: Callable[[], Mapping[str, int]] | None = None
    adapter_load_s: Mapping[str, float] = field(default_factory=dict)


class Candidate(NamedTuple):
    """A pair of nodes, or a single node, that a policy considered, with its cost, for operators.

    Attributes:
        prefill: name of the prefill node; empty: the decode node computes the prompt.
        cost: cost in the policy's own unit; the lowest wins.
        terms: parts of the cost, by name.
        assumed: names of the nodes whose speed has not been measured yet.
        num_computed_tokens: number of prompt tokens that the computing node must compute; 0: the
            policy does not tell.
    """

    prefill: str
    decode: str
    cost: float
    terms: Mapping[str, float]
    assumed: tuple[str, ...] = ()
    num_computed_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Placement:
    """The nodes that a request goes to.

    Attributes:
        prefill: the prefill node; None: the decode node computes the prompt.
        num_cached_tokens: number of prompt tokens that the node that computes the prompt probably
            has in its cache.
        is_probe: whether a more expensive node was chosen in order to measure it.
        explain: returns the best candidates of this choice, the chosen one first.
    """

    prefill: NodeLoad | None
    decode: NodeLoad
    num_cached_tokens: int = 0
    is_probe: bool = False
    explain: Callable[[], Sequence[Candidate]] = tuple


class RoutingPolicy(Protocol):
    """Picks nodes for requests. Runs on the router's event loop, so it must not wait."""

    def pick(self, query: RouteQuery, fleet: Fleet) -> Placement | None:
        """Return a pair of connected nodes of ``fleet``, or a node alone; None if there is none.

        The choice must not depend on the order in which the nodes joined.
        """
