"""Scheduler: who runs how many tokens in the next step. The only writer of requests.

One rule: computed tokens catch up with known tokens. Chunked prefill, decoding, prefix hits,
resuming after preemption and starting from remote KV are all the same case of it.

    waiting -------\\
    arrived --------> running --> finished          parked: WAITING_FOR_REMOTE_KVS, costs nothing
       ^               |  ^                         per step; `commit` moves it to arrived
    parked    preempted --/

A step costs time in proportion to what it schedules, not to what waits.
"""

from __future__ import annotations

import bisect
from collections import deque

from baton.outputs import RequestOutput
from engine.kv_cache_manager import KVCacheManager
from engine.outputs import ModelRunnerOutput, ScheduledRequest, SchedulerOutput, StepResult
from engine.request import Request, RequestStatus
from engine.waiting_queue import make_waiting_queue

# Blocks kept free when a waiting request is admitted, as a share of all: those that run need them
# next, and taking them back later means computing everything again.
WATERMARK = 0.01


class Scheduler:
    """Continuous batching over paged KV.

    Args:
        kv_cache_manager: gives and takes blocks.
        max_num_requests: most requests in a step.
        max_num_batched_tokens: most tokens in a step.
        long_prefill_threshold: most tokens of one request in a step.
        policy: ``fcfs`` or ``priority``.

    Attributes:
        num_preemptions: since the start.
    """

    def __init__(
        self,
        kv_cache_manager: KVCacheManager,
        *,
        max_num_requests: int,
        max_num_batched_tokens: int,
        long_prefill_threshold: int,
        policy: str = "fcfs",
    ) -> None:
        self.kv_cache_manager = kv_cache_manager
        self.requests: dict[str, Request] = {}
        self.num_preemptions = 0
        self._max_num_requests = max_num_requests
        self._max_num_batched_tokens = max_num_batched_tokens
        self._long_prefill_threshold = long_prefill_threshold
        self._num_arrivals = 0
        self._watermark_blocks = int(kv_cache_manager.block_pool.num_blocks * WATERMARK)
        self._waiting = make_waiting_queue(policy)
        self._by_priority = policy == "priority"
        self._num_waiting = 0
        self._arrived: deque[Request] = deque()  # remote KV is complete; they hold blocks already
        self._num_arrived = 0
        self._running: list[Request] = []  # by rank: the last one is preempted first

    # ------------------------------------------------------------------ requests come

    def add(self, request: Request) -> None:
        """Queue a request whose KV this engine computes."""
        self._register(request)
        request.status = RequestStatus.WAITING
        self._waiting.add(request)
        self._num_waiting += 1

    def park(self, request: Request) -> None:
        """Take a request whose prompt KV a remote node will write."""
        self._register(request)
        request.status = RequestStatus.WAITING_FOR_REMOTE_KVS

    def grant(self, request_id: str) -> list[int] | None:
        """Give a parked request blocks for its prompt and one decode block.

        Returns:
            The ids of the blocks that hold the prompt, in order, or None when too few are free
            or others wait for blocks: who was preempted comes before who comes anew.
        """
        if self._num_waiting:
            return None
        request = self.requests[request_id]
        assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        assert not request.block_ids
        manager = self.kv_cache_manager
        num_prompt_blocks = manager.num_blocks_for(request.num_prompt_tokens)
        # The decode block: room for the tokens up to the end of the block after the prompt's last.
        room = min((num_prompt_blocks + 1) * manager.block_size, request.max_num_tokens)
        if manager.allocate(request, max(room, request.num_prompt_tokens)) is None:
            return None
        return request.block_ids[:num_prompt_blocks]

    def commit(self, request_id: str, token_id: int) -> None:
        """The prompt's KV is complete and the remote node sampled ``token_id``: run from here."""
        request = self.requests[request_id]
        assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        request.token_ids.append(token_id)
        request.num_computed_tokens = request.num_prompt_tokens
        request.status = RequestStatus.WAITING
        # What slid out need not have come: a sender that starts from a prefix hit has none of it.
        self.kv_cache_manager.free_slid_out(request)
        self.kv_cache_manager.cache_blocks(request)
        self._arrived.append(request)
        self._num_arrived += 1

    def abort(self, request_id: str) -> Request | None:
        """End a request now and drop its blocks; None when there is no such request.

        A parked request whose blocks a remote node may still write must have another holder
        (quarantine) on them before.
        """
        request = self.requests.get(request_id)
        if request is None:
            return None
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
        elif request.status is not RequestStatus.WAITING_FOR_REMOTE_KVS:
            # It stays in its queue until it comes to the front.
            if request.block_ids:
                self._num_arrived -= 1
            else:
                self._num_waiting -= 1
        self._finish(request, RequestStatus.FINISHED_ABORTED)
        return request

    # ------------------------------------------------------------------ a step

    @property
    def has_work(self) -> bool:
        """Whether a step could compute anything now."""
        return bool(self._running or self._num_arrived or self._num_waiting)

    def schedule(self) -> SchedulerOutput:
        """Choose what the next step computes, and give it blocks."""
        scheduled: list[ScheduledRequest] = []
        num_preemptions = self.num_preemptions
        budget = self._schedule_running(scheduled, self._max_num_batched_tokens)
        budget = self._admit_arrived(scheduled, budget)
        # Memory is short after a preemption: who just lost its blocks must not come straight back.
        if self.num_preemptions == num_preemptions:
            budget = self._admit_waiting(scheduled, budget)
        return SchedulerOutput(tuple(scheduled), self._max_num_batched_tokens - budget)

    def update(self, scheduled: SchedulerOutput, output: ModelRunnerOutput) -> StepResult:
        """Write a step's result into its requests and end those that are done."""
        outputs: list[RequestOutput] = []
        finished: list[Request] = []
        for item in scheduled.scheduled:
            request = item.request
            if request.status.is_finished:  # aborted while the step ran
                continue
            self._note_computed(request, item.num_scheduled_tokens)
            if output.prompt_logprobs:
                chunk = output.prompt_logprobs.get(request.request_id)
                if chunk is not None:
                    request.keep_prompt_logprobs(chunk.first_position, chunk.logprobs)
            token_id = output.sampled_token_ids.get(request.request_id)
            if token_id is None:
                continue
            output_index = request.num_output_tokens
            prompt_logprobs = request.take_prompt_logprobs() if output_index == 0 else ()
            request.token_ids.append(token_id)
            status = self._status_after(request, token_id)
            if status.is_finished:
                self._finish(request, status)
                finished.append(request)
            logprobs = output.logprobs.get(request.request_id)
            outputs.append(
                RequestOutput(
                    request.request_id,
                    output_index,
                    (token_id,),
                    status.finish_reason,
                    () if logprobs is None else (logprobs,),
                    prompt_logprobs,
                )
            )
        if finished:
            self._running = [r for r in self._running if not r.status.is_finished]
        return StepResult(tuple(outputs), tuple(finished))

    def check(self) -> None:
        """Assert the invariants; for tests and debug runs."""
        self.kv_cache_manager.block_pool.check()
        assert self._running == sorted(self._running, key=lambda r: r.rank)
        waiting = arrived = 0
        for request in self.requests.values():
            assert not request.status.is_finished
            assert request.num_computed_tokens <= request.num_tokens
            room = len(request.block_ids) * self.kv_cache_manager.block_size
            assert request.num_computed_tokens <= room
            assert (request.status is RequestStatus.RUNNING) == (request in self._running)
            if request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
                arrived += bool(request.block_ids)
                waiting += not request.block_ids
        assert (waiting, arrived) == (self._num_waiting, self._num_arrived)

    # ------------------------------------------------------------------ parts of schedule

    def _schedule_running(self, scheduled: list[ScheduledRequest], budget: int) -> int:
        """Let running requests go on, best rank first; returns what is left of the budget."""
        index = 0
        while index < len(self._running) and budget > 0:
            request = self._running[index]
            num_tokens = self._num_tokens_next(request, budget)
            if not self._allocate_or_preempt(request, num_tokens):
                break  # the request itself was preempted: it was the last
            scheduled.append(ScheduledRequest(request, num_tokens))
            budget -= num_tokens
            index += 1
        return budget

    def _admit_arrived(self, scheduled: list[ScheduledRequest], budget: int) -> int:
        """Start requests whose remote KV is complete: they hold blocks, so they come first."""
        while self._arrived and budget > 0 and len(self._running) < self._max_num_requests:
            request = self._arrived[0]
            if not request.status.is_finished:
                num_tokens = self._num_tokens_next(request, budget)
                target = request.num_computed_tokens + num_tokens
                if self.kv_cache_manager.allocate(request, target) is None:
                    break
                self._num_arrived -= 1
                budget -= self._run(request, num_tokens, scheduled)
            self._arrived.popleft()
        return budget

    def _admit_waiting(self, scheduled: list[ScheduledRequest], budget: int) -> int:
        """Start waiting requests, from their cached prefix on."""
        while budget > 0 and len(self._running) < self._max_num_requests:
            request = self._waiting.peek()
            if request is None:
                break
            # Alone, a request may take all there is: it fits, and nobody else needs the spare.
            spare = self._watermark_blocks if self._running else 0
            # Room for all known tokens at once, not for the first chunk only: prompts that begin
            # together would else take the blocks that each of them needs to end.
            num_cached = self.kv_cache_manager.allocate_with_prefix(request, spare)
            if num_cached is None:
                break
            self._waiting.pop()
            self._num_waiting -= 1
            request.num_computed_tokens = num_cached
            if request.num_preemptions == 0:
                request.num_cached_tokens = num_cached
            budget -= self._run(request, self._num_tokens_next(request, budget), scheduled)
        return budget

    def _run(self, request: Request, num_tokens: int, scheduled: list[ScheduledRequest]) -> int:
        request.status = RequestStatus.RUNNING
        bisect.insort(self._running, request, key=lambda r: r.rank)
        scheduled.append(ScheduledRequest(request, num_tokens))
        return num_tokens

    # ------------------------------------------------------------------ inside

    def _register(self, request: Request) -> None:
        assert request.request_id not in self.requests, request.request_id
        self.requests[request.request_id] = request
        request.rank = (request.priority if self._by_priority else 0, self._num_arrivals)
        self._num_arrivals += 1

    def _num_tokens_next(self, request: Request, budget: int) -> int:
        missing = request.num_tokens - request.num_computed_tokens
        return min(missing, budget, self._long_prefill_threshold)

    def _allocate_or_preempt(self, request: Request, num_tokens: int) -> bool:
        """Give a running request its blocks, taking them from the last ones if need be."""
        target = request.num_computed_tokens + num_tokens
        while self.kv_cache_manager.allocate(request, target) is None:
            last = self._running.pop()
            self._preempt(last)
            if last is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        self.kv_cache_manager.free(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.status = RequestStatus.PREEMPTED
        self.num_preemptions += 1
        self._waiting.put_back(request)
        self._num_waiting += 1

    def _note_computed(self, request: Request, num_tokens: int) -> None:
        start = request.num_computed_tokens
        request.num_computed_tokens += num_tokens
        request.num_forwards += 1
        prompt_left = max(request.num_prompt_tokens - start, 0)
        request.num_prompt_tokens_computed += min(prompt_left, num_tokens)
        self.kv_cache_manager.cache_blocks(request)
        self.kv_cache_manager.free_slid_out(request)

    @staticmethod
    def _status_after(request: Request, token_id: int) -> RequestStatus:
        if token_id in request.stop_token_ids:
            return RequestStatus.FINISHED_STOPPED
        if request.num_tokens >= request.max_num_tokens:
            return RequestStatus.FINISHED_LENGTH
        return request.status

    def _finish(self, request: Request, status: RequestStatus) -> None:
        request.status = status
        self.kv_cache_manager.free(request)
        del self.requests[request.request_id]
