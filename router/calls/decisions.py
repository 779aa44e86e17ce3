"""DecisionLog: why requests went where they went, for the last ones; see `baton admin explain`."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from router.fleet.load.forecast import PrefillForecast
from router.policies.base import Candidate, Placement, RouteQuery

MAX_DECISIONS = 32  # of one request: more than its attempts may be


@dataclass(slots=True)
class _Noted:
    """One placement in the log. The query is not kept, because the query has the prompt."""

    placed_at: float
    num_prompt_tokens: int
    max_tokens: int
    placement: Placement
    forecast: PrefillForecast | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """One attempt's placement.

    Attributes:
        placed_at: by `time.time`.
        num_cached_tokens: that the node which computes the prompt was thought to have.
        candidates: the best of the places that the policy looked at, the chosen one first.
        is_probe: see `Placement`.
        forecast: expected times of the prompt, measured once token 1 came; None: not placed.
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


class DecisionLog:
    """The decisions on the last requests. What a policy makes of them is told when asked for.

    Args:
        max_requests: kept.
    """

    def __init__(self, max_requests: int = 1000) -> None:
        self._max_requests = max_requests
        self._noted: OrderedDict[str, deque[_Noted]] = OrderedDict()

    def note(
        self, request_id: str, query: RouteQuery, placement: Placement, *, is_first: bool = False
    ) -> None:
        """A request was placed; an earlier one of the same id is another attempt at it.

        Args:
            request_id: `Call.scoped_id`.
            is_first: an earlier one was another request of that id, which is forgotten.
        """
        noted = _Noted(time.time(), query.num_prompt_tokens, query.max_tokens, placement)
        if is_first:
            self._noted.pop(request_id, None)
        self._noted.setdefault(request_id, deque(maxlen=MAX_DECISIONS)).append(noted)
        self._noted.move_to_end(request_id)
        if len(self._noted) > self._max_requests:
            self._noted.popitem(last=False)

    def note_forecast(self, request_id: str, forecast: PrefillForecast | None) -> None:
        """Keep what is expected of the prompt that was placed last; its node measures it later."""
        if noted := self._noted.get(request_id):
            noted[-1].forecast = forecast

    def get(self, request_id: str) -> list[Decision]:
        """The decisions on a request, one per attempt; empty if it is not (or no longer) known."""
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
        decode_node=placement.decode.node_name,
        candidates=placement.explain(),
        is_probe=placement.is_probe,
        forecast=noted.forecast,
    )
