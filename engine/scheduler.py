"""Scheduler: who runs how many tokens in the next step. The only writer of requests.

One rule: computed tokens catch up with known tokens. Chunked prefill, decoding, prefix hits,
resuming after preemption and starting from remote KV are all the same case of it.

    waiting -------\\
    arrived --------> running --> finished          parked: WAITING_FOR_REMOTE_KVS, until `commit`,
       ^               |  ^                         or WAITING_FOR_SHARED_KVS, until a sibling has
    parked    preempted --/                         computed their prompt; costs nothing per step

WAITING_FOR_GRAMMAR comes before waiting or arrived, in no queue, and costs nothing either.

A step costs time in proportion to what it schedules, not to what waits.
"""

from __future__ import annotations

import bisect
import time
from collections import deque

from baton.errors import InvalidRequestError
from baton.outputs import RequestOutput
from engine.grammar import GrammarState
from engine.kv_cache_manager import KVCacheManager
from engine.metrics import EngineCounters
from engine.outputs import (
    GrantedBlocks,
    ModelRunnerOutput,
    ScheduledRequest,
    SchedulerOutput,
    StepResult,
)
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
        counters: of what was done since the start.
        failures: request ids, and what was wrong with their grammars; whoever reads them ends the
            requests that are still here, and empties it.
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
        self.counters = EngineCounters()
        self.failures: list[tuple[str, str]] = []
        self._max_num_requests = max_num_requests
        self._max_num_batched_tokens = max_num_batched_tokens
        self._long_prefill_threshold = long_prefill_threshold
        self._num_arrivals = 0
        self._watermark_blocks = int(kv_cache_manager.block_pool.num_blocks * WATERMARK)
        self._waiting = make_waiting_queue(policy)
        self._by_priority = policy == "priority"
        self._num_waiting = 0
        self._arrived: deque[Request] = deque()  # their prompt's KV is there; they hold blocks
        self._num_arrived = 0
        self._running: list[Request] = []  # by rank: the last one is preempted first
        self._step_in_flight = False

    # ------------------------------------------------------------------ requests come

    def add(self, request: Request) -> None:
        """Queue a request whose KV this engine computes; its siblings follow it."""
        self._register(request)
        self._queue(request)
        for sibling in request.siblings:
            self._register(sibling)
            sibling.status = RequestStatus.WAITING_FOR_SHARED_KVS

    def park(self, request: Request) -> None:
        """Take a request whose prompt KV a remote node will write."""
        self._register(request)
        request.status = RequestStatus.WAITING_FOR_REMOTE_KVS

    def grant(self, request_id: str) -> GrantedBlocks | None:
        """Give a parked request what the prefix cache has, blocks for the rest, a decode block.

        Returns:
            None when too few blocks are free or others wait for blocks: who was preempted comes
            before who comes anew.
        """
        if self._num_waiting:
            return None
        request = self.requests[request_id]
        assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        assert not request.block_ids
        manager = self.kv_cache_manager
        num_tokens, block_size = request.num_initial_tokens, manager.block_size
        # The decode block: room for the tokens up to the end of the block after the prompt's last.
        room = min((-(-num_tokens // block_size) + 1) * block_size, request.max_num_tokens)
        if not manager.allocate_for_handoff(request, max(room, num_tokens)):
            return None
        self._note_prefix_hit(request, request.num_cached_blocks * block_size)
        return manager.blocks_to_receive(request)

    def keep_received(self, request_id: str, num_tokens: int) -> tuple[int, ...]:
        """Name the full blocks of a granted request that came; it is about to be aborted.

        Args:
            num_tokens: whose KV is complete here, whatever else happens to its transfer.

        Returns:
            Those of its granted blocks that are not complete.
        """
        request = self.requests[request_id]
        assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        assert num_tokens <= request.num_initial_tokens
        request.num_computed_tokens = num_tokens
        self.kv_cache_manager.cache_blocks(request)
        return self.kv_cache_manager.blocks_to_receive(request).block_ids

    def commit(self, request_id: str, token_id: int) -> None:
        """The prompt's KV is complete and the remote node sampled ``token_id``: run from here."""
        request = self.requests[request_id]
        assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        request.token_ids.append(token_id)
        request.num_computed_tokens = request.num_initial_tokens
        self.kv_cache_manager.cache_blocks(request)
        self._queue(request)
        if request.grammar is not None and not request.grammar.accept(token_id):
            self._fail(request, request.grammar.problem)

    def set_grammar(self, request: Request, grammar: GrammarState | InvalidRequestError) -> None:
        """A request's grammar is compiled, or cannot be; ignored if the request has ended."""
        if self.requests.get(request.request_id) is not request:
            return
        if isinstance(grammar, InvalidRequestError):
            self._fail(request, str(grammar))
            return
        request.grammar = grammar
        if request.status is RequestStatus.WAITING_FOR_GRAMMAR:
            self._queue(request)
        if not all(grammar.accept(token_id) for token_id in request.output_token_ids):
            self._fail(request, grammar.problem)

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
        elif request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
            # It stays in its queue until it comes to the front.
            if request.block_ids:
                self._num_arrived -= 1
            else:
                self._num_waiting -= 1
        self._finish(request, RequestStatus.FINISHED_ABORTED)
        left = [s for s in request.siblings if not s.status.is_finished]
        if left:  # the next one computes the prompt
            left[0].siblings = left[1:]
            self._queue(left[0])
        return request

    # ------------------------------------------------------------------ a step

    @property
    def has_work(self) -> bool:
        """Whether a step could compute anything now."""
        waits = self._num_arrived or self._num_waiting
        return bool(self._running or waits or self._step_in_flight)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that could run, were there room; parked ones are not among them."""
        return self._num_waiting + self._num_arrived

    def schedule(self) -> SchedulerOutput:
        """Choose what the next step computes, and give it blocks.

        May be called while a step runs (between `begin` and `update`): each request that samples
        in it is taken to get one more token, whatever that will be. Nobody is preempted then, for
        the step writes into the blocks: where memory is short, nothing is scheduled until it ends.
        """
        scheduled: list[ScheduledRequest] = []
        num_preemptions = self.num_preemptions
        budget = self._schedule_running(scheduled, self._max_num_batched_tokens)
        if budget is None:
            return SchedulerOutput((), 0)
        budget = self._admit_arrived(scheduled, budget)
        # Memory is short after a preemption: who just lost its blocks must not come straight back.
        if self.num_preemptions == num_preemptions:
            budget = self._admit_waiting(scheduled, budget)
        return SchedulerOutput(tuple(scheduled), self._max_num_batched_tokens - budget)

    def begin(self, scheduled: SchedulerOutput) -> None:
        """A step runs from now on, until `update`; another may be scheduled meanwhile."""
        assert not self._step_in_flight
        self._step_in_flight = True
        for item in scheduled.scheduled:
            item.request.num_tokens_pending = int(item.samples)
            item.request.num_tokens_in_flight = item.num_scheduled_tokens

    def without_finished(self, scheduled: SchedulerOutput) -> SchedulerOutput:
        """What of a step that was scheduled ahead is still to be computed."""
        left = tuple(item for item in scheduled.scheduled if not item.request.status.is_finished)
        return SchedulerOutput(left, sum(item.num_scheduled_tokens for item in left))

    def update(self, scheduled: SchedulerOutput, output: ModelRunnerOutput) -> StepResult:
        """Write a step's result into its requests and end those that are done."""
        outputs: list[RequestOutput] = []
        finished: list[Request] = []
        self._step_in_flight = False
        for item in scheduled.scheduled:
            request = item.request
            request.num_tokens_in_flight = request.num_tokens_pending = 0
            if request.status.is_finished:  # aborted while the step ran
                self.kv_cache_manager.free(request)
                continue
            if output.prompt_logprobs:
                chunk = output.prompt_logprobs.get(request.request_id)
                if chunk is not None:
                    request.keep_prompt_logprobs(chunk.first_position, chunk.logprobs)
            self._note_computed(request, item.num_scheduled_tokens)
            token_id = output.sampled_token_ids.get(request.request_id)
            if token_id is None:
                continue
            if request.grammar is not None and not request.grammar.accept(token_id):
                self._fail(request, request.grammar.problem)
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
        self.counters.output_tokens += len(outputs)
        return StepResult(tuple(outputs), tuple(finished), scheduled)

    def check(self) -> None:
        """Assert the invariants; for tests and debug runs."""
        self.kv_cache_manager.block_pool.check()
        assert self._running == sorted(self._running, key=lambda r: r.rank)
        waiting = arrived = 0
        for request in self.requests.values():
            assert not request.status.is_finished
            assert request.num_computed_tokens <= request.num_tokens
            assert request.num_computed_tokens <= self.kv_cache_manager.num_tokens_held(request)
            assert (request.status is RequestStatus.RUNNING) == (request in self._running)
            if request.awaits_grammar:
                assert request.status in (
                    RequestStatus.WAITING_FOR_GRAMMAR,
                    RequestStatus.WAITING_FOR_REMOTE_KVS,
                    RequestStatus.WAITING_FOR_SHARED_KVS,
                )
            else:
                assert request.status is not RequestStatus.WAITING_FOR_GRAMMAR
            if request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
                arrived += bool(request.block_ids)
                waiting += not request.block_ids
        assert (waiting, arrived) == (self._num_waiting, self._num_arrived)

    # ------------------------------------------------------------------ parts of schedule

    def _schedule_running(self, scheduled: list[ScheduledRequest], budget: int) -> int | None:
        """Let running requests go on, best rank first.

        Returns what is left of the budget, or None when somebody must be preempted first.
        """
        index = 0
        while index < len(self._running) and budget > 0:
            request = self._running[index]
            index += 1
            num_tokens = self._num_tokens_next(request, budget)
            if num_tokens == 0:  # the step in flight samples its last token
                continue
            if not self._allocate_or_preempt(request, num_tokens):
                if self._step_in_flight:
                    return None
                break  # the request itself was preempted: it was the last
            scheduled.append(ScheduledRequest(request, num_tokens))
            budget -= num_tokens
        return budget

    def _admit_arrived(self, scheduled: list[ScheduledRequest], budget: int) -> int:
        """Start requests whose prompt's KV is there: they hold blocks, so they come first."""
        while self._arrived and budget > 0 and len(self._running) < self._max_num_requests:
            request = self._arrived[0]
            if not request.status.is_finished:
                num_tokens = self._num_tokens_next(request, budget)
                target = request.num_computed_tokens + num_tokens
                if self.kv_cache_manager.allocate(request, target) is None:
                    if self._running:
                        break
                    # They hold all there is among themselves, and none can begin.
                    self._preempt_last_arrived()
                    continue
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
                self._note_prefix_hit(request, num_cached)
            budget -= self._run(request, self._num_tokens_next(request, budget), scheduled)
        return budget

    def _run(self, request: Request, num_tokens: int, scheduled: list[ScheduledRequest]) -> int:
        request.status = RequestStatus.RUNNING
        request.started_at = request.started_at or time.monotonic()
        bisect.insort(self._running, request, key=lambda r: r.rank)
        scheduled.append(ScheduledRequest(request, num_tokens))
        return num_tokens

    # ------------------------------------------------------------------ inside

    def _register(self, request: Request) -> None:
        assert request.request_id not in self.requests, request.request_id
        self.requests[request.request_id] = request
        request.rank = (request.priority if self._by_priority else 0, self._num_arrivals)
        self._num_arrivals += 1

    def _queue(self, request: Request) -> None:
        """Let a request wait for its turn, unless it still waits for its grammar."""
        if request.awaits_grammar:
            request.status = RequestStatus.WAITING_FOR_GRAMMAR
            return
        request.status = RequestStatus.WAITING
        if request.block_ids:  # its prompt's KV has come
            self._arrived.append(request)
            self._num_arrived += 1
        else:
            self._waiting.add(request)
            self._num_waiting += 1

    def _fail(self, request: Request, problem: str) -> None:
        """End one request; a parked one is left to whoever knows who may still write its blocks."""
        self.failures.append((request.request_id, problem))
        if request.status is not RequestStatus.WAITING_FOR_REMOTE_KVS:
            self.abort(request.request_id)

    def _num_tokens_next(self, request: Request, budget: int) -> int:
        num_tokens = len(request.token_ids)
        if request.num_tokens_in_flight:
            num_tokens += request.num_tokens_pending - request.num_tokens_in_flight
            if request.num_tokens_pending and request.num_tokens + 1 >= request.max_num_tokens:
                return 0
        missing = num_tokens - request.num_computed_tokens
        return min(missing, budget, self._long_prefill_threshold)

    def _allocate_or_preempt(self, request: Request, num_tokens: int) -> bool:
        """Give a running request its blocks, taking them from the last ones if need be."""
        target = request.num_computed_tokens + request.num_tokens_in_flight + num_tokens
        while self.kv_cache_manager.allocate(request, target) is None:
            if self._step_in_flight:
                return False
            last = self._running.pop()
            self._preempt(last)
            if last is request:
                return False
        return True

    def _preempt_last_arrived(self) -> None:
        request = self._arrived.pop()
        if not request.status.is_finished:
            self._num_arrived -= 1
            self._preempt(request)

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
        self.kv_cache_manager.cache_blocks(request)
        prompt_left = request.num_prompt_tokens - start
        if prompt_left > 0:
            num_prompt_tokens = min(prompt_left, num_tokens)
            request.num_prompt_tokens_computed += num_prompt_tokens
            self.counters.prompt_tokens_computed += num_prompt_tokens
            if num_tokens >= prompt_left:
                self._begin_siblings(request)
        if not request.siblings:  # they may need what this one does not look at any more
            self.kv_cache_manager.free_slid_out(request)

    def _begin_siblings(self, request: Request) -> None:
        """The prompt is computed: who has the same one goes on from its full blocks."""
        siblings, request.siblings = request.siblings, []
        for sibling in siblings:
            if sibling.status.is_finished:
                continue
            self.kv_cache_manager.share_prompt(request, sibling)
            # Each computed position but the prompt's last predicts the one behind it.
            sibling.prompt_logprobs = request.prompt_logprobs[: sibling.num_computed_tokens]
            self._queue(sibling)

    def _note_prefix_hit(self, request: Request, num_tokens: int) -> None:
        request.num_cached_tokens = num_tokens
        self.counters.prefix_lookups += 1
        self.counters.prefix_lookup_tokens += request.num_prompt_tokens
        self.counters.cached_prompt_tokens += num_tokens

    @staticmethod
    def _status_after(request: Request, token_id: int) -> RequestStatus:
        if token_id in request.stop_token_ids:
            return RequestStatus.FINISHED_STOPPED
        if request.grammar is not None and request.grammar.is_terminated:
            return RequestStatus.FINISHED_STOPPED
        if request.num_tokens >= request.max_num_tokens:
            return RequestStatus.FINISHED_LENGTH
        return request.status

    def _finish(self, request: Request, status: RequestStatus) -> None:
        request.status = status
        assert status.finish_reason is not None
        self.counters.finished[status.finish_reason] += 1
        if not request.num_tokens_in_flight:  # else `update` does, when nothing writes there
            self.kv_cache_manager.free(request)
        del self.requests[request.request_id]
