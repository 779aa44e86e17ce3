"""RoutingPolicy: where a request goes. One file per policy, one registry line.

What policies see is here and in `router/fleet/fleet.py`; what they read of a node is live and
theirs to read only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from baton.link import NodeBeat

if TYPE_CHECKING:  # a fleet is made of the views below
    from router.fleet.fleet import Fleet


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
        num_waiting: requests that wait at the router, and begin as nodes have room.
        now: by `time.monotonic`; 0 if nothing is to go by it.
        find_cached_tokens: how many first tokens of the prompt each node has in its prefix cache,
            by engine id; nodes that have none are not in it. Asked only by who needs it.
    """

    num_prompt_tokens: int
    max_tokens: int
    session_id: str = ""
    timeout_s: float = math.inf
    num_waiting: int = 0
    now: float = 0.0
    find_cached_tokens: Callable[[], Mapping[str, int]] = _nothing_cached


class Rate(Protocol):
    """``seconds = base + per_unit * units``, as measured.

    Attributes:
        num_measured: on this node; 0: taken from others, or guessed.
    """

    @property
    def base(self) -> float: ...
    @property
    def per_unit(self) -> float: ...
    @property
    def num_measured(self) -> int: ...


class Averages(Protocol):
    """Of all requests of a router lately; see `router.fleet.load.node_load.SharedRates`."""

    @property
    def output_tokens(self) -> float: ...
    @property
    def long_output_tokens(self) -> float: ...
    @property
    def residence_s(self) -> float: ...
    @property
    def kv_bytes_per_token(self) -> float: ...


class NodeView(Protocol):
    """A node as a policy sees it, now.

    Attributes:
        weight: share of its due that it is to get, above 0 to 1: less while it warms up.
        num_blocks: of its KV cache.
        max_model_len: most tokens of a request there.
        beat: how busy the node said it is, all routers' requests together.
        num_open_requests: placed there by this router and not finished there.
        num_open_tokens: prompt tokens not computed yet (prefill), or prompt tokens and those that
            may follow (decode), of these requests.
        num_uncomputed_requests: of these, whose prompt is to be computed there.
        num_placed_tokens: the same of all requests ever placed there.
        prefill: seconds per prompt, by its tokens that are computed.
        prefill_queue_s: that its open prompts take.
        prefill_base_s, prefill_s_per_token: that one more prompt takes until it is computed, of
            so many tokens; for a weight below 1 as if all took longer.
        prefill_front_s: of that, for the prompt in front; it may be computed in part.
        prefill_progress_at: when the last one was done, by `time.monotonic`; of a node that was
            idle, when it got one.
        step: seconds per decode step, by `step_units`.
        step_units: context in tokens, and some more for each request.
        step_base_s, step_s_per_unit: of a step with one more request of so many units, and what
            all others lose by each step that is longer.
        num_batch: requests there, or on their way there.
        num_free_tokens: of KV, when all that is on its way has arrived; may be below 0.
        num_room_tokens: of the longest prompt that need not wait for room.
        shared: what all nodes of the router measured together.
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
    def max_model_len(self) -> int: ...
    @property
    def beat(self) -> NodeBeat: ...
    @property
    def num_open_requests(self) -> int: ...
    @property
    def num_open_tokens(self) -> int: ...
    @property
    def num_uncomputed_requests(self) -> int: ...
    @property
    def num_placed_tokens(self) -> int: ...
    @property
    def prefill(self) -> Rate: ...
    @property
    def prefill_queue_s(self) -> float: ...
    @property
    def prefill_base_s(self) -> float: ...
    @property
    def prefill_s_per_token(self) -> float: ...
    @property
    def prefill_front_s(self) -> float: ...
    @property
    def prefill_progress_at(self) -> float: ...
    @property
    def step(self) -> Rate: ...
    @property
    def step_units(self) -> float: ...
    @property
    def step_base_s(self) -> float: ...
    @property
    def step_s_per_unit(self) -> float: ...
    @property
    def num_batch(self) -> int: ...
    @property
    def num_free_tokens(self) -> int: ...
    @property
    def num_room_tokens(self) -> int: ...
    @property
    def shared(self) -> Averages: ...

    def spare_s(self, now: float) -> float:
        """How long all that decodes there may pause, besides for the prompts that are before it,
        until the first of them is expected to miss its deadline. O(requests there)."""


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
        explain: the best of the places looked at, the chosen one first, as they were then.
    """

    prefill: NodeView | None
    decode: NodeView
    num_cached_tokens: int = 0
    explain: Callable[[], Sequence[Candidate]] = tuple


class RoutingPolicy(Protocol):
    """Picks nodes. Called on the router's event loop: must not wait."""

    def pick(self, query: RouteQuery, fleet: Fleet) -> Placement | None:
        """Choose nodes of ``fleet`` that reach each other; None if this policy finds none.

        The same calls give the same answers, in whatever order nodes joined.
        """
