"""Drafts: proposed tokens that the next step computes behind a request's known tokens.

The scheduler's part of speculation; does nothing without a proposer.
Refuses to know: how drafts are made, how good they are, and which tokens were sampled instead.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from baton.api.outputs import RequestDelta
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.metrics import EngineCounters
from engine.core.outputs import ScheduledRequest, SchedulerOutput
from engine.core.request import Request, RequestStatus

# Most processor time per step for masks behind drafts, as all requests wait for these.
_MAX_MASKS_S = 0.01


class Drafts:
    """Drafts of one scheduler's requests.

    Args:
        long_prefill_token_threshold: most tokens of one request in a step.
        drafter_reads: see `EngineConfig.drafter_reads`.

    Attributes:
        kept: drafts by request id, for the step behind the one that was updated last.
    """

    def __init__(
        self,
        kv_cache_manager: KVCacheManager,
        counters: EngineCounters,
        *,
        long_prefill_token_threshold: int,
        drafter_reads: bool,
    ) -> None:
        self.kept: dict[str, tuple[int, ...]] = {}
        self._manager = kv_cache_manager
        self._counters = counters
        self._long_prefill_token_threshold = long_prefill_token_threshold
        self._drafter_reads = drafter_reads
        self._masks_left_s = _MAX_MASKS_S

    # ------------------------------------------------------------------ a step is chosen

    def add_to(self, scheduled: list[ScheduledRequest], budget: int) -> int:
        """Add drafts to scheduled requests within the rest of the budget; return what is left.

        Call this last: all requests that can run have got their tokens by then.
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

    def look_ahead(self, scheduled: Sequence[ScheduledRequest], num_drafts: int) -> int:
        """Give requests blocks for the drafts behind this step's tokens, if enough blocks are free.

        Enough means that every request of the step can still get a block for its next token. The
        last token that a request may sample needs no block, as no token follows.

        Returns the number of drafts per request; 0 if no request of the step is drafted for.
        """
        manager = self._manager
        if not any(item.request.is_drafted_for for item in scheduled):
            return 0
        spare = len(scheduled) * manager.num_groups
        for item in scheduled:
            request = item.request
            if manager.block_pool.num_free <= spare + manager.num_blocks_for(num_drafts):
                break
            num_left = request.sampling_params.max_tokens - request.num_output_tokens
            ahead = min(num_drafts, num_left - 1)
            if ahead > 0 and item.samples and request.is_drafted_for:
                start = request.num_computed_tokens + request.num_tokens_in_flight
                manager.allocate(request, start + item.num_scheduled_tokens + ahead)
        return num_drafts

    def _num_to_compute(self, item: ScheduledRequest, drafts: tuple[int, ...], budget: int) -> int:
        """Return how many of the drafts a request may compute, after allocating their blocks."""
        request, num_tokens = item.request, item.num_scheduled_tokens
        if not item.samples:
            return 0
        # With n drafts, a step samples up to n + 1 tokens.
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

    def is_read(self, request: Request, num_tokens: int, scheduled: SchedulerOutput) -> bool:
        """Return whether the drafter, if it must read all tokens, has read all computed ones.

        A drafter reads prompts at once, and outputs only when it drafts. Tokens that fill up a
        block in between may be read later, or never.
        """
        if not self._drafter_reads:
            return True
        return request.is_drafted_for and (num_tokens > 1 or scheduled.num_drafts > 0)

    def take(
        self, item: ScheduledRequest, token_ids: tuple[int, ...], scheduled: SchedulerOutput
    ) -> tuple[RequestStatus | None, int]:
        """Add the tokens that a step with drafts sampled, up to the token that ends the output.

        Accepted drafts count as computed, as their KV is in the cache.

        Returns the final status, if the output ends (see `Request.append`), and the number of
        tokens that were added.
        """
        request, num_known, ended = item.request, item.request.num_tokens, None
        for token_id in token_ids:
            ended = request.append(token_id)
            # A closing mark that replaced the token has no KV, and the tokens behind it do not
            # count.
            if ended is not None or request.token_ids[-1] != token_id:
                break
        if ended is RequestStatus.FINISHED_ABORTED:
            del request.token_ids[num_known:]
            return ended, 0
        num_taken = request.num_tokens - num_known
        request.num_computed_tokens += num_taken - 1
        self._manager.cache_blocks(request, is_read=self.is_read(request, 1, scheduled))
        self._manager.free_slid_out(request)
        num_drafts, num_accepted = len(item.draft_token_ids), min(len(token_ids) - 1, num_taken)
        request.num_drafts += num_drafts
        request.num_accepted_drafts += num_accepted
        self._counters.note_drafts(num_drafts, num_accepted)
        return ended, num_taken

    def keep(self, outputs: Sequence[RequestDelta], drafts: Mapping[str, tuple[int, ...]]) -> None:
        """Keep the drafts of the step that was updated last, for the next step to compute.

        Earlier drafts of these requests are out of date and dropped.
        """
        if not drafts and not self.kept:
            return
        for output in outputs:
            self.kept.pop(output.request_id, None)
            if output.request_id in drafts and output.finish_reason is None:
                self.kept[output.request_id] = drafts[output.request_id]
