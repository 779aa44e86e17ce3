"""StepsInFlight: the launched steps that have not ended, and what a next step must leave to them.

one stage         a request that samples in the running step is scheduled as if its next token were
                  known
several stages    a request that samples in a running step is left for a later step, so that a plan
                  contains all its tokens, and a step decodes at most its share of the requests
                  that decode (ADR 0107)

Refuses to know: blocks, budgets of tokens, waiting requests.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.core.drafts import ALL
from engine.core.outputs import SchedulerOutput
from engine.core.request import Request


class StepsInFlight:
    """The steps in flight of one scheduler; each ends with its result, the oldest first.

    Args:
        num_stages: number of pipeline stages. With several stages, running requests are divided
            into as many micro-batches, each a step in flight.

    Attributes:
        num_stages: the argument, unchanged.
        num_decodes_left: decodes left for the step that is being scheduled.
    """

    def __init__(self, num_stages: int) -> None:
        self.num_stages = num_stages
        self.num_decodes_left = ALL
        self._num_steps = 0

    def __bool__(self) -> bool:
        return self._num_steps > 0

    @property
    def may_wait(self) -> bool:
        """Return whether scheduling may take some milliseconds without delaying a step."""
        return self.num_stages > 1 or not self._num_steps

    def share(self, num_requests: int) -> int:
        """Return how many of some requests one micro-batch has, rounded up."""
        return -(-num_requests // self.num_stages)

    # ------------------------------------------------------------------ the next step

    def limit_decodes(self, running: Iterable[Request], num_arrived: int) -> None:
        """Set how many requests decode in the next step, if all stages are to have equal work.

        Requests in flight count, too. A request that a step leaves out runs in one of the next
        steps. While requests are left out, the steps in flight have full shares.

        Args:
            num_arrived: requests that start to decode, because their KV has arrived.
        """
        self.num_decodes_left = ALL
        if self.num_stages > 1:
            num_decodes = sum(map(is_decoding, running)) + num_arrived
            self.num_decodes_left = max(self.share(num_decodes), 1)

    def holds_back(self, request: Request) -> bool:
        """Return whether a request of a step in flight must wait for the step's result."""
        if self.num_stages > 1 and _awaits_result(request):
            return True
        return bool(request.num_tokens_pending) and request.num_tokens + 1 >= request.max_num_tokens

    # ------------------------------------------------------------------ steps

    def begin_step(self, scheduled: SchedulerOutput) -> None:
        """Count a step's tokens as in flight, because the step is about to be launched.

        At most two steps are in flight, or as many as there are stages.
        """
        assert self._num_steps < max(self.num_stages, 2)
        self._num_steps += 1
        for item in scheduled.scheduled:
            add_in_flight(item.request, item.num_scheduled_tokens)

    def end_step(self, scheduled: SchedulerOutput) -> None:
        """Stop counting the oldest step's tokens as in flight, if a step is in flight."""
        if not self._num_steps:
            return
        self._num_steps -= 1
        for item in scheduled.scheduled:
            item.request.num_tokens_pending -= item.samples
            item.request.num_tokens_in_flight -= item.num_scheduled_tokens


def add_in_flight(request: Request, num_tokens: int) -> None:
    """Count ``num_tokens`` tokens as in flight, as a step that computes them was submitted."""
    request.num_tokens_in_flight += num_tokens
    end = request.num_computed_tokens + request.num_tokens_in_flight
    request.num_tokens_pending += end >= request.num_tokens + request.num_tokens_pending


def is_decoding(request: Request) -> bool:
    """Return whether a request computes one token in its next step."""
    num_known = request.num_tokens + request.num_tokens_pending
    if num_known >= request.max_num_tokens:  # the last token is being sampled
        return False
    return num_known - request.num_computed_tokens - request.num_tokens_in_flight <= 1


def _awaits_result(request: Request) -> bool:
    """Return whether steps in flight must end before a request's next tokens can be scheduled."""
    wants_logprobs = request.sampling_params.prompt_logprobs is not None
    return bool(request.num_tokens_pending or request.changes_logits or wants_logprobs)
