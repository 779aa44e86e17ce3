"""Drafts: proposed tokens that the next step computes after a request's known tokens.

Schedules speculative decoding: decides which requests the drafter reads, and how many drafts a step
makes and verifies. Does nothing without a `DraftPolicy`.

A drafter with KV of its own reads all tokens of a request, or none. Blocks with tokens that the
drafter has not read have class `UNREAD` in the prefix cache, so that requests with drafts do not
reuse them. Refuses to know: how drafts are made, how good they are, rejection sampling.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from baton.api.outputs import RequestDelta
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.metrics import EngineCounters
from engine.core.outputs import ScheduledRequest, SchedulerOutput
from engine.core.request import Request, RequestStatus

ALL = sys.maxsize
# Cache classes (`block_pool.py`). A block is READ if the drafter has read its tokens, else UNREAD.
# A request is READ if the drafter drafts for it, else UNREAD. If the drafter has no KV of its own,
# all blocks and requests are READ.
READ, UNREAD = 0, 1
# Maximum processor time, in seconds per step, for the grammar masks of tokens after drafts; all
# requests of the step wait for these masks.
_MAX_MASKS_S = 0.01


class DraftPolicy(Protocol):
    """Decides how many drafts per step pay off; implemented in `engine.speculation`.

    Attributes:
        in_steps: whether the workers make the next drafts as a part of each step.
        drafter_reads: whether the drafter has KV of its own, so that it must read all tokens of a
            request.
    """

    in_steps: bool
    drafter_reads: bool

    def num_to_draft(self, num_rows: int, can_draft: Callable[[], bool]) -> int:
        """Return how many drafts the next step is to make after each sampled token.

        Args:
            num_rows: maximum number of requests in the next step.
            can_draft: returns whether drafts can be made for any running request.
        """

    def num_to_read(self) -> int:
        """Return how many of the requests that start now the drafter must read."""


class Drafts:
    """The drafts of all requests of one scheduler.

    Args:
        long_prefill_token_threshold: maximum number of tokens of one request in a step.
        policy: decides how many drafts pay off; None: there are no drafts.

    Attributes:
        kept: drafts that the next step may compute, by request id.
        has_policy: whether there is a policy; without one, `plan_step` need not be called.
    """

    def __init__(
        self,
        kv_cache_manager: KVCacheManager,
        counters: EngineCounters,
        *,
        long_prefill_token_threshold: int,
        policy: DraftPolicy | None = None,
    ) -> None:
        self.kept: dict[str, tuple[int, ...]] = {}
        self._manager = kv_cache_manager
        self._counters = counters
        self._long_prefill_token_threshold = long_prefill_token_threshold
        self._policy = policy
        self.has_policy = policy is not None
        self._drafter_reads = policy is not None and policy.drafter_reads
        self._num_to_draft = 0  # drafts after each sampled token of the step being scheduled
        self._num_to_read = ALL  # how many more new requests the drafter must read
        self._masks_left_s = _MAX_MASKS_S

    # ------------------------------------------------------------------ a step is chosen

    def plan_step(self, num_rows: int, running: Sequence[Request]) -> None:
        """Decide the next step's number of drafts, and how many new requests the drafter reads.

        Call this before the step's requests are chosen.

        Args:
            num_rows: maximum number of requests in the step.
        """
        assert self._policy is not None
        self._num_to_draft = self._policy.num_to_draft(
            num_rows, lambda: any(map(is_drafted_for, running))
        )
        self._num_to_read = self._policy.num_to_read()

    def start(self, request: Request) -> None:
        """Decide whether the drafter reads a request that starts here in this step."""
        if request.pooling is not None:  # a pooled request has no output that drafts could propose
            request.cache_class = UNREAD
            return
        # A prefill node gives each request a limit of one token. The decode node makes drafts for
        # the request, so the drafter must read the prompt here.
        is_passed_on = request.max_num_tokens - request.num_tokens == 1
        request.cache_class = READ if self._num_to_read > 0 or is_passed_on else UNREAD
        self._num_to_read -= not is_passed_on

    def start_parked(self, request: Request, *, is_idle: bool) -> None:
        """Decide whether the drafter reads a request whose prompt KV a remote node writes.

        Args:
            is_idle: whether no request runs.
        """
        policy = self._policy
        is_read = is_idle or policy is None or policy.num_to_read() > 0
        request.cache_class = READ if is_read else UNREAD

    def add_to(self, scheduled: list[ScheduledRequest], budget: int) -> int:
        """Add drafts to scheduled requests within the token budget; return the unused budget.

        Call this after all requests that can run have got their other tokens of the step.
        """
        self._masks_left_s = _MAX_MASKS_S
        for index, item in enumerate(scheduled):
            drafts = self.kept.pop(item.request.request_id, ())
            drafts = drafts[: self._num_to_compute(item, drafts, budget)]
            if drafts:
                num_tokens = item.num_scheduled_tokens + len(drafts)
                scheduled[index] = ScheduledRequest(item.request, num_tokens, drafts)
                budget -= len(drafts)
        return budget

    def look_ahead(self, scheduled: Sequence[ScheduledRequest]) -> int:
        """Allocate blocks for the drafts that follow this step's tokens, if enough blocks are free.

        Enough blocks are free if every request of the step can still get a block for its next
        token. A request that will sample its last token gets no blocks for drafts.

        Returns the number of drafts to make per request; 0 if no request of the step is drafted
        for.
        """
        manager, num_drafts = self._manager, self._num_to_draft
        if not num_drafts or not any(is_drafted_for(item.request) for item in scheduled):
            return 0
        spare = len(scheduled) * manager.num_groups
        for item in scheduled:
            request = item.request
            if manager.block_pool.num_free <= spare + manager.num_blocks_for(num_drafts):
                break
            num_left = request.sampling_params.max_tokens - request.num_output_tokens
            ahead = min(num_drafts, num_left - 1)
            if ahead > 0 and item.samples and is_drafted_for(request):
                start = request.num_computed_tokens + request.num_tokens_in_flight
                manager.allocate(request, start + item.num_scheduled_tokens + ahead)
        return num_drafts

    def _num_to_compute(self, item: ScheduledRequest, drafts: tuple[int, ...], budget: int) -> int:
        """Return how many of a request's drafts the step can compute; allocate their blocks."""
        request, num_tokens = item.request, item.num_scheduled_tokens
        if not item.samples:
            return 0
        # Leave room for one more token, because with n drafts a step samples up to n + 1 tokens.
        room = min(
            budget,
            self._long_prefill_token_threshold - num_tokens,
            request.max_num_tokens - request.num_tokens - 1,
        )
        drafts = drafts[: max(room, 0)]
        if drafts and request.grammar is not None:
            began_at = time.thread_time()
            drafts = drafts[: request.grammar.look_ahead(drafts, self._masks_left_s)]
            self._masks_left_s -= time.thread_time() - began_at
        if not drafts:
            return 0
        granted = self._manager.allocate(request, request.num_tokens + len(drafts))
        return 0 if granted is None else len(drafts)

    # ------------------------------------------------------------------ a step has ended

    def cache_class(self, request: Request, num_tokens: int, scheduled: SchedulerOutput) -> int:
        """Return the cache class of the blocks that ``num_tokens`` tokens of a request made full.

        The drafter reads prompt chunks in every step, but single tokens only in steps that make
        drafts. Blocks filled by single tokens in other steps are UNREAD, even if the drafter reads
        them later.
        """
        if not self._drafter_reads:
            return READ
        is_read = is_drafted_for(request) and (num_tokens > 1 or scheduled.num_drafts > 0)
        return READ if is_read else UNREAD

    def append(
        self, item: ScheduledRequest, token_ids: tuple[int, ...], scheduled: SchedulerOutput
    ) -> RequestStatus | None:
        """Add the tokens that a step with drafts sampled, up to the token that ends the output.

        Accepted drafts count as computed tokens, because the step wrote their KV.

        Returns the final status, if the output ends (see `Request.append`).
        """
        request, num_known, ended = item.request, item.request.num_tokens, None
        for token_id in token_ids:
            ended = request.append(token_id)
            # `Request.append` replaced the token by the thought's closing mark, whose KV is not
            # computed: drop the tokens after the mark.
            if ended is not None or request.token_ids[-1] != token_id:
                break
        if ended is RequestStatus.FINISHED_ABORTED:
            del request.token_ids[num_known:]
            return ended
        num_taken = request.num_tokens - num_known
        request.num_computed_tokens += num_taken - 1
        self._manager.cache_blocks(request, self.cache_class(request, 1, scheduled))
        self._manager.free_slid_out(request)
        num_drafts, num_accepted = len(item.draft_token_ids), min(len(token_ids) - 1, num_taken)
        request.num_drafts += num_drafts
        request.num_accepted_drafts += num_accepted
        self._counters.note_drafts(num_drafts, num_accepted)
        self._counters.output_tokens += num_taken - 1  # `Scheduler.update` counts the first token
        return ended

    def keep(self, outputs: Sequence[RequestDelta], drafts: Mapping[str, tuple[int, ...]]) -> None:
        """Keep the drafts that the last ended step made, for the next step to compute.

        Drops earlier drafts of all requests in ``outputs``: they are out of date.
        """
        if not drafts and not self.kept:
            return
        for output in outputs:
            self.kept.pop(output.request_id, None)
            if output.request_id in drafts and output.finish_reason is None:
                self.kept[output.request_id] = drafts[output.request_id]


def is_drafted_for(request: Request) -> bool:
    """Return whether the drafter reads all tokens of a request and makes drafts for it."""
    return request.cache_class == READ
