"""RoutingPolicy: where a request goes. One file per policy, one registry line.

What policies see is here, in `Fleet` and in `NodeLoad`; what they read of a node is live and theirs
to read only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from router.fleet.fleet import Fleet
from router.fleet.load.node_load import NodeLoad


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
        leaves_room: it is not to wait on a node where others might have to wait behind it.
        num_waiting: requests that wait at the router, and begin as nodes have room.
        now: by `time.monotonic`; 0 if nothing is to go by it.
        find_cached_tokens: how many first tokens of the prompt each node has in its prefix cache,
            by engine id; nodes that have none are not in it. Asked only by who needs it.
    """

    num_prompt_tokens: int
    max_tokens: int
    session_id: str = ""
    timeout_s: float = math.inf
    leaves_room: bool = False
    num_waiting: int = 0
    now: float = 0.0
    find_cached_tokens: Callable[[], Mapping[str, int]] = _nothing_cached


class Candidate(NamedTuple):
    """A place that a policy looked at, and what it made of it; for operators.

    Attributes:
        prefill: name of the node; empty: the decode node alone.
        cost: the lower, the better; in what the policy counts in.
        terms: what the cost is made of, by name.
        assumed: names of nodes whose speed was not measured yet, but taken from others or guessed.
    """

    prefill: str
    decode: str
    cost: float
    terms: Mapping[str, float]
    assumed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request goes.

    Attributes:
        prefill: None: the decode node computes the prompt itself.
        num_cached_tokens: of the prompt, on the node that computes it, as far as is known.
        is_probe: chosen to measure a node that was not asked for long, although another is cheaper.
        explain: the best of the places looked at, the chosen one first, as they were then.
    """

    prefill: NodeLoad | None
    decode: NodeLoad
    num_cached_tokens: int = 0
    is_probe: bool = False
    explain: Callable[[], Sequence[Candidate]] = tuple


class RoutingPolicy(Protocol):
    """Picks nodes. Called on the router's event loop: must not wait."""

    def pick(self, query: RouteQuery, fleet: Fleet) -> Placement | None:
        """Choose nodes of ``fleet`` that reach each other; None if this policy finds none.

        The same calls give the same answers, in whatever order nodes joined.
        """
