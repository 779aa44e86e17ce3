"""DecisionLog: remembers why recent requests were placed on their nodes (`baton admin explain`)."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from router.fleet.load.forecast import PrefillForecast
from router.fleet.prefix_sources import SourceTerms
from router.policies.base import Candidate, Placement, RouteQuery

# Maximum number of placements kept per request; few requests have as many attempts
MAX_DECISIONS = 32


@dataclass(slots=True)
class _Noted:
    """A placement in the log. Its query is not kept, because the query holds the prompt."""

    placed_at: float
    num_prompt_tokens: int
    max_tokens: int
    placement: Placement
    forecast: PrefillForecast | None = None
    sources: Sequence[SourceTerms] = ()


@dataclass(frozen=True, slots=True)
class Decision:
    """The placement of one attempt, as operators see it.

    Attributes:
        placed_at: time of the decision, by `time.time`.
        num_cached_tokens: number of prompt tokens that the node that computes the prompt probably
            had in its cache.
        candidates: the best pairs of nodes that the policy considered, the chosen pair first.
        is_probe: whether the node was chosen in order to measure it; see `Placement`.
        forecast: expected times of computing the prompt; after token 1, also the measured times.
            None: no attempt began.
        sources: nodes that could send a cached prefix to the node that computes the prompt. The
            node that saves the most time is first, and sends if this saves time at all.
    """

    request_id: str
    placed_at: float
    num_prompt_tokens: int
    max_tokens: int
    num_cached_tokens: int
    prefill_node: str
    decode_node: str
    candidates: Sequence[Candidate]
    is_probe: bool = False
    forecast: PrefillForecast | None = None
    sources: Sequence[SourceTerms] = ()


class DecisionLog:
    """Keeps the placements of the latest requests; computes the costs of candidates only on demand.

    Args:
        max_requests: maximum number of requests kept.
    """

    def __init__(self, max_requests: int = 1000) -> None:
        self._max_requests = max_requests
        self._noted: OrderedDict[str, deque[_Noted]] = OrderedDict()

    def note(
        self, request_id: str, query: RouteQuery, placement: Placement, *, is_first: bool = False
    ) -> None:
        """Record the placement of a request's next attempt.

        Args:
            request_id: `Call.scoped_id`.
            is_first: whether this is the first attempt, so that an earlier request with the same id
                is forgotten.
        """
        noted = _Noted(time.time(), query.num_prompt_tokens, query.max_tokens, placement)
        if is_first:
            self._noted.pop(request_id, None)
        self._noted.setdefault(request_id, deque(maxlen=MAX_DECISIONS)).append(noted)
        self._noted.move_to_end(request_id)
        if len(self._noted) > self._max_requests:
            self._noted.popitem(last=False)

    def note_forecast(self, request_id: str, forecast: PrefillForecast | None) -> None:
        """Attach a forecast to the request's last placement.

        The node's `NodeLoad` fills in the measured times when the prompt is computed.
        """
        if noted := self._noted.get(request_id):
            noted[-1].forecast = forecast

    def note_sources(self, request_id: str, sources: Sequence[SourceTerms]) -> None:
        """Attach the sources of a cached prefix to the request's last placement."""
        if sources and (noted := self._noted.get(request_id)):
            noted[-1].sources = sources

    def get(self, request_id: str) -> list[Decision]:
        """Return a request's decisions, one per attempt; empty if the request is not kept."""
        return [_decision(request_id, noted) for noted in self._noted.get(request_id, ())]


def _decision(request_id: str, noted: _Noted) -> Decision:
    placement = noted.placement
    return Decision(
        request_id=request_id,
        placed_at=noted.placed_at,
        num_prompt_tokens=noted.num_prompt_tokens,
        max_tokens=noted.max_tokens,
        num_cached_tokens=placement.num_cached_tokens,
        prefill_node=placement.prefill.node_name if placement.prefill else "",
        # A pooled call needs one node only: the placement names its prefill node twice.
        decode_node=placement.decode.node_name if placement.decode is not placement.prefill else "",
        candidates=placement.explain(),
        is_probe=placement.is_probe,
        forecast=noted.forecast,
        sources=noted.sources,
    )
