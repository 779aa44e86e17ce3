"""Scheduler: decides which requests run in the next step, and how many tokens each computes.

One rule: computed tokens catch up with known tokens. Chunked prefill, decoding, prefix hits,
resuming after preemption and starting from remote KV are all cases of this rule.

    waiting room --> running --> finished
         ^              |
         \\-- preempted -/

Requests that do not run are in the waiting room (`waiting_room.py`). The time to schedule a step
grows with the number of requests in the step, not with the number of waiting requests. Only the
scheduler and its parts write to requests.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Iterable, Mapping

from baton.api.errors import BatonError, DamagedModelError
from baton.api.outputs import RequestDelta
from engine.core.drafts import ALL, DraftPolicy, Drafts
from engine.core.grammars.grammar import GrammarState, MaskMaker
from engine.core.grammars.grammar_steps import GrammarSteps
from engine.core.images.image_steps import NO_IMAGES, ImageLimits, ImageSteps
from engine.core.kv_cache_manager import GrantedBlocks, KVCacheManager
from engine.core.metrics import EngineCounters
from engine.core.outputs import (
    ModelRunnerOutput,
    PromptLogprobs,
    ScheduledRequest,
    SchedulerOutput,
    StepResult,
    pooled_delta,
)
from engine.core.request import Request, RequestStatus
from engine.core.step_plan import StepHooks, StepPlan, StepPlanner
from engine.core.steps_in_flight import StepsInFlight, is_decoding
from engine.core.waiting_room import PooledShare, WaitingRoom

# Fraction of all blocks to keep free when a waiting request is admitted. Running requests soon need
# these blocks; without them, a request would be preempted and computed again.
FREE_SHARE = 0.01

_NO_NUMBERS = "the model's logits are not numbers: its weights, or this node's memory, are damaged"


class Scheduler:
    """Continuous batching over paged KV.

    Args:
        kv_cache_manager: allocates and frees blocks.
        max_num_requests: maximum number of requests in a step.
        max_num_batched_tokens: maximum number of tokens in a step.
        long_prefill_token_threshold: maximum number of tokens of one request in a step.
        prefill_tokens_beside_decodes: maximum number of prompt tokens in a step that also decodes,
            or that runs while a parked request waits for a remote node's KV.
        preemption: ``recompute`` or ``hand-back``; see `EngineConfig`.
        by_priority: whether requests run in order of priority; otherwise in order of arrival.
        drafting: decides how many drafts pay off; None: there are no drafts.
        masks: computes grammar masks between steps; None: each mask is computed when it is needed.
        images: limits of the images in a step.
        num_stages: number of pipeline stages; see `StepsInFlight`.

    Attributes:
        in_flight: the launched steps that have not ended.
        num_preemptions: number of preemptions since the start.
        counters: counts of all work since the start.
        failures: (request id, reason) of requests that cannot continue. The reader of this list
            aborts the requests that are still open, then empties the list.
        handed_back: ended requests that another node must compute; the reader empties the list.
        drafts: drafts for later steps.
        grammars: lets requests with grammars sample once their masks are ready.
        images: chooses the images that each step encodes.
        on_finish: called with each request that ends.
    """

    def __init__(
        self,
        kv_cache_manager: KVCacheManager,
        *,
        max_num_requests: int,
        max_num_batched_tokens: int,
        long_prefill_token_threshold: int,
        prefill_tokens_beside_decodes: int = ALL,
        preemption: str = "recompute",
        by_priority: bool = False,
        drafting: DraftPolicy | None = None,
        masks: MaskMaker | None = None,
        images: ImageLimits = NO_IMAGES,
        num_stages: int = 1,
    ) -> None:
        self.kv_cache_manager = kv_cache_manager
        self.in_flight = StepsInFlight(num_stages)
        self.requests: dict[str, Request] = {}
        self.num_preemptions = 0
        self.counters = EngineCounters()
        self.failures: list[tuple[str, BatonError]] = []
        self.handed_back: list[Request] = []
        self.by_priority = by_priority
        self._hands_back = preemption == "hand-back"
        self._max_num_requests = max_num_requests
        self._max_num_batched_tokens = max_num_batched_tokens
        self._long_prefill_token_threshold = long_prefill_token_threshold
        self._prefill_tokens_beside_decodes = prefill_tokens_beside_decodes
        self._num_prefill_tokens_left = ALL  # prompt tokens left for this step
        self._reserved_blocks = int(kv_cache_manager.block_pool.num_blocks * FREE_SHARE)
        self._room = WaitingRoom(by_priority=by_priority)
        self._pooled = PooledShare(self._room, max_num_batched_tokens)
        in_steps = drafting is not None and drafting.in_steps
        self._planner = StepPlanner(max_num_requests, has_next_tokens=in_steps)
        self._running: list[Request] = []  # sorted by rank: the last request is preempted first
        self.drafts = Drafts(
            kv_cache_manager,
            self.counters,
            long_prefill_token_threshold=long_prefill_token_threshold,
            policy=drafting,
        )
        self.grammars = GrammarSteps(masks)
        self.images = ImageSteps(images, self.counters)
        self.on_finish: Callable[[Request], None] = lambda request: None
        self._num_adapted = 0  # open requests with an adapter

    # ------------------------------------------------------------------ requests come

    def add_request(self, request: Request) -> None:
        """Queue a request whose prompt this engine computes; its siblings wait for the prompt."""
        self._register(request)
        self._room.queue(request)
        for sibling in request.siblings:
            self._register(sibling)
            self._room.park(sibling, RequestStatus.WAITING_FOR_SHARED_KVS)

    def park(self, request: Request) -> None:
        """Park a request whose prompt KV a remote node will write."""
        self.drafts.start_parked(request, is_idle=not self._running)
        self._register(request)
        self._room.park(request, RequestStatus.WAITING_FOR_REMOTE_KVS)

    def grant(self, request_id: str) -> GrantedBlocks | None:
        """Give a parked request its cached blocks, new blocks for the prompt, and one decode block.

        Leaves the blocks free that waiting requests need (with priorities: only waiting requests of
        better rank). Requests that have blocks, and wait only for a place in a step, need none.
        Returns None if too few blocks are free.
        """
        request, manager = self.requests[request_id], self.kv_cache_manager
        assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        if self._room.num_without_blocks:
            needed = [manager.num_tokens_to_grant(request)]
            needed += [waiting.num_tokens + 1 for waiting in self._room.waiting_before(request)]
            num_blocks = sum(map(manager.num_blocks_for, needed)) + self._reserved_blocks
            if num_blocks > manager.block_pool.num_free:
                return None
        if not manager.allocate_for_handoff(request, manager.num_tokens_to_grant(request)):
            return None
        request.num_hit_tokens = request.num_cached_blocks * manager.block_size
        self.counters.note_lookup(request)
        return manager.blocks_to_receive(request)

    def can_begin(self, request: Request) -> bool:
        """Return whether a new request would run in the next step without delaying another."""
        manager, has_slot = self.kv_cache_manager, len(self._running) < self._max_num_requests
        num_blocks = manager.num_blocks_for(manager.num_tokens_to_grant(request))
        has_blocks = num_blocks + self._reserved_blocks <= manager.block_pool.num_free
        return has_slot and has_blocks and not self._room

    def commit(self, request_id: str, token_id: int, drafts: tuple[int, ...] = ()) -> None:
        """Let a parked request run: its prompt's KV is complete; ``token_id`` is its first output.

        Args:
            drafts: drafts of the tokens after ``token_id``; the request's first step verifies them.
        """
        request = self.requests[request_id]
        assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        request.token_ids.append(token_id)
        self.counters.received_prompt_tokens += request.num_initial_tokens - request.num_hit_tokens
        request.num_computed_tokens = request.num_initial_tokens
        self.kv_cache_manager.cache_blocks(request)
        self._room.queue(request)
        if drafts:
            self.drafts.kept[request_id] = drafts
        self._accept(request, [token_id])

    def set_grammar(self, request: Request, grammar: GrammarState | BatonError) -> None:
        """Set a request's compiled grammar, or its error; ignored if the request has ended.

        Args:
            grammar: a state that has accepted some or all of the output's tokens so far.
        """
        if self.requests.get(request.request_id) is not request:
            return
        if isinstance(grammar, BatonError):
            self.fail(request, grammar)
            return
        request.grammar = grammar
        self.resume(request)
        self._accept(request, request.output_token_ids[grammar.num_accepted :])

    def resume(self, request: Request) -> None:
        """Put a request in line if all that it waited for is ready."""
        self._room.resume(request)

    def fail(self, request: Request, error: BatonError) -> None:
        """Record a failure; end the request unless a peer may still write its blocks.

        A step in flight may still compute the request; `update` ignores that result.
        """
        self.failures.append((request.request_id, error))
        if request.status is not RequestStatus.WAITING_FOR_REMOTE_KVS:
            self.abort(request.request_id)

    def abort(self, request_id: str) -> Request | None:
        """End a request now and drop its blocks; return the request, or None if the id is unknown.

        If a remote node may still write a parked request's blocks, first take references on them.
        """
        if (request := self.requests.get(request_id)) is None:
            return None
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
        else:
            self._room.leave(request)
        self._finish(request, RequestStatus.FINISHED_ABORTED)
        siblings = request.take_siblings()
        if siblings:  # the first remaining sibling computes the prompt
            siblings[0].siblings = siblings[1:]
            self._room.queue(siblings[0])
        return request

    def fail_all(self, without_numbers: Iterable[str]) -> None:
        """End the requests in ``without_numbers``, whose logits are NaN or infinite.

        Call before `update`, which then ignores these requests' results.
        """
        for request_id in without_numbers:
            if (request := self.requests.get(request_id)) is not None:
                self.fail(request, DamagedModelError(_NO_NUMBERS))

    # ------------------------------------------------------------------ a step

    @property
    def has_work(self) -> bool:
        """Return whether a step could compute anything now."""
        return bool(self._running or self._room or self.in_flight)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Return the number of requests that wait for a step, without parked requests."""
        return len(self._room)

    @property
    def next_waiting(self) -> Request | None:
        """Return the request that would start next, or None; used in debug logs."""
        return self._room.peek_arrived() or self._room.peek()

    @property
    def num_competing(self) -> int:
        """Return the number of requests that compete for a place in the next step."""
        num_requests = min(len(self._running) + len(self._room), self._max_num_requests)
        return self.in_flight.share(num_requests)

    def schedule(self, num_beside_decodes: int = ALL) -> SchedulerOutput:
        """Choose what the next step computes, and allocate blocks for it.

        May be called while steps run (between `begin_step` and `update`); see `StepsInFlight`.
        Requests that compute drafts in a running step, or get drafts from it, are left for a later
        step. No request is preempted, as running steps write its blocks; if memory is short,
        nothing is scheduled.

        Args:
            num_beside_decodes: maximum number of prompt tokens if a request decodes; the
                scheduler's own limit applies, too.
        """
        scheduled: list[ScheduledRequest] = []
        num_preemptions = self.num_preemptions
        if self.drafts.has_policy:
            self.drafts.plan_step(self.num_competing, self._running)
        self.grammars.begin_step(may_wait=self.in_flight.may_wait)
        self.images.begin_step()
        is_mixed = self._room.num_arrived > 0 or any(map(is_decoding, self._running))
        num_allowed = ALL
        if is_mixed:
            num_allowed = min(self._prefill_tokens_beside_decodes, num_beside_decodes)
        elif self._room.num_remote:
            # Keep the step short: a request whose KV arrives meanwhile waits for the step's end.
            num_allowed = self._prefill_tokens_beside_decodes
        self._num_prefill_tokens_left = num_allowed
        self._pooled.plan_step(self._running, num_allowed)
        self.in_flight.limit_decodes(self._running, self._room.num_arrived)
        budget = self._schedule_running(scheduled, self._max_num_batched_tokens)
        if budget is None:
            return SchedulerOutput((), 0)
        budget = self._admit_arrived(scheduled, budget)
        # A preempted request must not be admitted again in the step that preempted it.
        if self.num_preemptions == num_preemptions:
            budget = self._admit_waiting(scheduled, budget)
        if has_drafts := bool(self.drafts.kept):
            budget = self.drafts.add_to(scheduled, budget)
        num_drafts = self.drafts.look_ahead(scheduled)
        if self._num_adapted:  # the worker needs an adapter's tokens adjacent
            scheduled.sort(key=lambda item: item.request.adapter)
        num_tokens = self._max_num_batched_tokens - budget
        if not scheduled and self._running and not self.in_flight:
            self.grammars.wait_for_any()  # no request can run before its grammar mask is ready
        num_prompt_tokens = num_allowed - self._num_prefill_tokens_left
        return SchedulerOutput(
            tuple(scheduled), num_tokens, has_drafts, num_drafts, is_mixed, num_prompt_tokens
        )

    def with_masks(self, scheduled: SchedulerOutput) -> SchedulerOutput:
        """Take requests whose masks are not ready out of a step that was scheduled ahead.

        The previous step has sampled tokens since this step was scheduled, so grammars need new
        masks. Prompt chunks stay in the step: hooks that send their blocks may already exist.
        """
        self.grammars.masks.wait()
        return scheduled.without(self.grammars.lacks_mask)

    def plan(
        self, scheduled: SchedulerOutput, after_layer: Callable[[int], None] | None = None
    ) -> tuple[StepPlan, StepHooks]:
        """Return the plan of a step for the workers, and the hooks of this step.

        Call right before `StepsInFlight.begin_step`.
        """
        plan = self._planner.plan(scheduled.scheduled, scheduled.num_drafts)
        plan = self.images.add_to(plan, scheduled.scheduled)
        return plan, self.grammars.hooks(plan, scheduled.scheduled, after_layer)

    def update(self, scheduled: SchedulerOutput, output: ModelRunnerOutput) -> StepResult:
        """Write the result of the oldest step into its requests; end the requests that are done."""
        outputs, finished = list[RequestDelta](), list[Request]()
        token_ids, logprobs = output.sampled_token_ids, output.logprobs
        manager, block_size = self.kv_cache_manager, self.kv_cache_manager.block_size
        slides, has_drafts = manager.slides, scheduled.has_drafts
        self.in_flight.end_step(scheduled)
        for item in scheduled.scheduled:
            request, num_tokens = item.request, item.num_scheduled_tokens
            if request.status.is_finished:  # the request has ended since the step was scheduled
                self._free_when_idle(request)
                continue
            if has_drafts:  # `Drafts.append` has already counted accepted drafts
                num_tokens -= len(item.draft_token_ids)
            start = request.num_computed_tokens
            request.num_computed_tokens = end = start + num_tokens
            request.num_forwards += 1
            if num_tokens > 1 or end % block_size == 0:  # a block may have become full
                manager.cache_blocks(
                    request, self.drafts.cache_class(request, num_tokens, scheduled)
                )
            if start < request.num_prompt_tokens:
                self._note_prompt_computed(request, start, num_tokens, output.prompt_logprobs)
            if slides and not request.siblings:  # siblings may still need these blocks
                manager.free_slid_out(request)
            request_id = request.request_id
            sampled = token_ids.get(request_id)
            if sampled is None:  # a prompt chunk, which samples no token
                if (pooled := output.pooled.get(request_id)) is not None:
                    self._finish(request, RequestStatus.FINISHED_STOPPED)
                    finished.append(request)
                    outputs.append(pooled_delta(request, pooled))
                continue
            index = len(request.token_ids) - request.num_prompt_tokens
            of_prompt = () if index else request.take_prompt_logprobs()
            if request.grammar is None and not (has_drafts and item.draft_token_ids):
                ended = request.append(sampled[0])
            else:
                ended, sampled = self._append_checked(item, sampled, scheduled)
            reason = None
            if ended is not None:
                if ended is RequestStatus.FINISHED_ABORTED:
                    self.fail(request, self.grammars.error_of(request))
                    continue
                self._finish(request, ended)
                finished.append(request)
                reason = ended.finish_reason
            own = logprobs.get(request_id, ())[: len(sampled)] if logprobs else ()
            outputs.append(
                RequestDelta(request_id, index, sampled, reason, own, of_prompt, request.epoch)
            )
        if finished:
            self._running = [r for r in self._running if not r.status.is_finished]
        self.counters.output_tokens += sum(1 for one in outputs if not one.pooled)
        self.drafts.keep(outputs, output.draft_token_ids)
        return StepResult(tuple(outputs), tuple(finished), scheduled)

    def _append_checked(
        self, item: ScheduledRequest, sampled: tuple[int, ...], scheduled: SchedulerOutput
    ) -> tuple[RequestStatus | None, tuple[int, ...]]:
        """Append the sampled tokens of a request with drafts or a grammar, which may change them.

        Returns the final status, if the output ends (see `Request.append`), and the added tokens.
        """
        request, num_known = item.request, item.request.num_tokens
        if item.draft_token_ids:
            ended = self.drafts.append(item, sampled, scheduled)
        else:
            ended = request.append(sampled[0])
        if ended is None:
            self.grammars.begin_mask(request)
        return ended, tuple(request.token_ids[num_known:])

    def check(self) -> None:
        """Assert the invariants; for tests and debug runs."""
        self.kv_cache_manager.block_pool.check()
        self._room.check(self.requests.values())
        self.images.check(self.requests.values())
        assert self._running == sorted(self._running, key=lambda r: r.rank)
        assert not any(request.awaits_grammar for request in self._running)
        for request in self.requests.values():
            assert not request.status.is_finished
            assert request.num_computed_tokens <= request.num_tokens
            assert request.num_computed_tokens <= self.kv_cache_manager.num_tokens_held(request)
            assert (request.status is RequestStatus.RUNNING) == (request in self._running)

    # ------------------------------------------------------------------ parts of schedule

    def _schedule_running(self, scheduled: list[ScheduledRequest], budget: int) -> int | None:
        """Schedule running requests, in order of rank.

        Returns the unused budget, or None if blocks are lacking while a step is in flight.
        """
        block_size, num_groups = self.kv_cache_manager.block_size, self.kv_cache_manager.num_groups
        for request in self._running:  # preemption shortens the list after this request
            if budget <= 0:
                break
            num_tokens = self._num_tokens_next(request, budget)
            if num_tokens <= 0:  # the request must wait for a later step
                continue
            if request.grammar is not None and not self.grammars.may_run(request, num_tokens):
                continue
            target = request.num_computed_tokens + request.num_tokens_in_flight + num_tokens
            # Usually the request's blocks suffice, and no allocation is needed.
            fits = target * num_groups <= len(request.block_ids) * block_size
            if not fits and not self._allocate_or_preempt(request, target):
                if self.in_flight:
                    return None
                break  # the request had the last rank, so it was preempted itself
            budget -= self._add(request, num_tokens, scheduled)
        return budget

    def _admit_arrived(self, scheduled: list[ScheduledRequest], budget: int) -> int:
        """Start arrived requests, whose prompt KV is in their blocks.

        Arrived requests start before waiting ones, because they already hold blocks.
        """
        while budget > 0 and len(self._running) < self._max_num_requests:
            request = self._room.peek_arrived()
            if request is None:
                break
            num_tokens = self._num_tokens_next(request, budget)
            if num_tokens <= 0:  # no room in the step for the request's tokens
                break
            target = request.num_computed_tokens + num_tokens
            if self.kv_cache_manager.allocate(request, target) is None:
                if self._running:
                    break
                # No request runs, and no arrived request can start: preempt the last arrived one.
                self._preempt(self._room.pop_last_arrived())
                continue
            budget -= self._run(self._room.pop_arrived(), num_tokens, scheduled)
        return budget

    def _admit_waiting(self, scheduled: list[ScheduledRequest], budget: int) -> int:
        """Start waiting requests, each at the end of its cached prefix."""
        most = self._max_num_requests
        while min(budget, self._num_prefill_tokens_left) > 0 and len(self._running) < most:
            request = self._room.peek(with_pooled=self._pooled.num_left > 0)
            if request is None:
                break
            # A request that runs alone may take all blocks: no other request needs the reserve.
            num_reserved = self._reserved_blocks if self._running else 0
            self.drafts.start(request)
            # Reserve blocks for all known tokens, not only for the first chunk. Otherwise, prompts
            # that start together would take the blocks that each of them needs to finish.
            num_cached = self.kv_cache_manager.allocate_with_prefix(request, num_reserved)
            if num_cached is None:
                break
            self._room.pop(request)
            request.num_computed_tokens = num_cached
            if not request.can_compute_from(num_cached):
                # The request has no image files, and cached blocks of its images are gone.
                self._hand_back(request)
                continue
            if request.num_preemptions == 0:
                request.num_hit_tokens = num_cached
                self.counters.note_lookup(request)
            budget -= self._run(request, self._num_tokens_next(request, budget), scheduled)
        return budget

    def _run(self, request: Request, num_tokens: int, scheduled: list[ScheduledRequest]) -> int:
        request.status = RequestStatus.RUNNING
        if request.started_at is None:
            request.started_at = time.monotonic()
            self.counters.note_start(request)
        bisect.insort(self._running, request, key=lambda r: r.rank)
        if num_tokens <= 0 or not self.grammars.may_run(request, num_tokens):
            return 0
        return self._add(request, num_tokens, scheduled)

    def _add(self, request: Request, num_tokens: int, scheduled: list[ScheduledRequest]) -> int:
        """Add a request to the step; return the number of tokens added."""
        if request.images is not None:
            self.images.add(request, num_tokens)
        if request.pooling is not None:
            self._pooled.num_left -= num_tokens
        scheduled.append(ScheduledRequest(request, num_tokens))
        if num_tokens > 1:
            self._num_prefill_tokens_left -= num_tokens
        else:
            self.in_flight.num_decodes_left -= 1
        return num_tokens

    # ------------------------------------------------------------------ inside

    def _register(self, request: Request) -> None:
        assert request.request_id not in self.requests, request.request_id
        self.requests[request.request_id] = request
        self._num_adapted += bool(request.adapter)
        self._pooled.num_open += request.pooling is not None
        self.images.register(request)
        self._room.give_rank(request)
        self.grammars.begin_mask(request)

    def _accept(self, request: Request, token_ids: list[int]) -> None:
        """Advance a request's grammar, if any; end the request if the grammar refuses a token."""
        if error := self.grammars.accept(request, token_ids):
            self.fail(request, error)

    def _num_tokens_next(self, request: Request, budget: int) -> int:
        missing = len(request.token_ids) - request.num_computed_tokens
        if request.num_tokens_in_flight:
            if self.in_flight.holds_back(request):
                return 0
            missing += request.num_tokens_pending - request.num_tokens_in_flight
            if request.request_id in self.drafts.kept:  # the step in flight replaces its drafts
                return 0
        if missing == 1:
            if self.in_flight.num_decodes_left <= 0:  # a later micro-batch runs the decode
                return 0
            return 1 if request.images is None else self.images.limit(request, 1, 1)
        left = self._num_prefill_tokens_left
        if request.pooling is not None:
            left = min(left, self._pooled.num_left)
        size = min(missing, budget, self._long_prefill_token_threshold, left)
        size = self.images.limit(request, size, min(missing, budget))
        if size == 1:  # `_add` does not count single tokens, because most of them are decodes
            self._num_prefill_tokens_left -= 1
        return size

    def _allocate_or_preempt(self, request: Request, target: int) -> bool:
        """Give a running request blocks for ``target`` tokens; preempt the last request if needed.

        Returns False if that failed: the request itself was preempted, or a step is in flight.
        """
        while self.kv_cache_manager.allocate(request, target) is None:
            if self.in_flight:
                return False
            last = self._running.pop()
            self._preempt(last)
            if last is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.counters.note_preemption(request)
        if self._hands_back or not request.can_compute_from(0):
            self._hand_back(request)
            return
        self.kv_cache_manager.free(request)
        self._leave_batch(request)
        request.num_computed_tokens = 0
        self.images.start_again(request)
        self._room.put_back(request)

    def _hand_back(self, request: Request) -> None:
        """End a preempted request that another node must compute."""
        self._finish(request, RequestStatus.FINISHED_ABORTED)
        self.handed_back.append(request)

    def _note_prompt_computed(
        self, request: Request, start: int, num_tokens: int, logprobs: Mapping[str, PromptLogprobs]
    ) -> None:
        """Count a prompt chunk that began at ``start``; after the last chunk, queue the siblings.

        Args:
            logprobs: prompt logprobs of the step's chunks; those of this request are kept.
        """
        if logprobs and (chunk := logprobs.get(request.request_id)):
            request.keep_prompt_logprobs(chunk.first_position, chunk.logprobs)
        prompt_left = request.num_prompt_tokens - start
        num_prompt_tokens = min(prompt_left, num_tokens)
        request.num_prompt_tokens_computed += num_prompt_tokens
        self.counters.prompt_tokens_computed += num_prompt_tokens
        self.images.note_computed(request)
        if num_tokens >= prompt_left:
            for sibling in request.take_siblings():
                self.kv_cache_manager.share_prompt(request, sibling)
                # Each computed position but the prompt's last predicts the next prompt token.
                sibling.prompt_logprobs = request.prompt_logprobs[: sibling.num_computed_tokens]
                self._room.queue(sibling)

    def _finish(self, request: Request, status: RequestStatus) -> None:
        request.status = status
        assert status.finish_reason is not None
        self.counters.finished[status.finish_reason] += 1
        self._leave_batch(request)
        self._free_when_idle(request)
        self._num_adapted -= bool(request.adapter)
        self._pooled.num_open -= request.pooling is not None
        self.images.unregister(request)
        del self.requests[request.request_id]
        self.on_finish(request)

    def _leave_batch(self, request: Request) -> None:
        self._planner.leave(request)
        self.images.leave_batch(request)
        self.drafts.kept.pop(request.request_id, None)

    def _free_when_idle(self, request: Request) -> None:
        # Otherwise, `update` frees the blocks once no step in flight uses them.
        if not request.num_tokens_in_flight:
            self.kv_cache_manager.free(request)
