"""Engine: schedules, executes and updates steps. One thread owns an engine.

in turn          schedule | run | update | schedule | run | update
asynchronous     schedule N+1, launch N+1 | wait, update N | schedule N+2, launch N+2 | ...
(and the device)           run N ...............| run N+1 ....................| run N+2
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from baton.api.errors import BatonError
from baton.api.sampling_params import SamplingParams
from baton.kv.block_hash import BlockHash, cache_namespace
from engine.adapters import AdapterTable
from engine.core.drafts import is_drafted_for
from engine.core.grammar import GrammarState
from engine.core.kv_cache_manager import GrantedBlocks
from engine.core.metrics import EngineMetrics
from engine.core.outputs import SchedulerOutput, StepResult
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.executors.base import Executor, PendingStep
from engine.images.image_inputs import ImageInputs
from engine.sampling.grammar_compiler import GrammarCompiler
from engine.speculation.speculation import Speculation
from engine.step_figures import StepFigures
from engine.step_log import StepLog

AfterLayer = Callable[[int], None]
_StepInFlight = tuple[SchedulerOutput, PendingStep]


class Engine:
    """A model, its KV cache and the scheduler over them.

    Attributes:
        executor: computes the steps.
        kv_memory: memory of the KV cache on the worker; see `KVMemory`.
        adapters: the LoRA adapters in memory.
        images: checks prompts' images, and submits them to decoders.
        block_pool: reference counts and cached contents of the KV cache's blocks.
        dtype: name of the weights' dtype.
        max_model_len: maximum number of tokens of one request.
        eos_token_ids: tokens that end an output unless a request ignores them.
        last_scheduled: the latest step, running or ended, for failure reports.
        compatibility: properties that KV depends on; the argument of `cache_namespace`.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        grammars: GrammarCompiler,
        speculation: Speculation | None,
        compatibility: Mapping[str, str],
        images: ImageInputs | None = None,
    ) -> None:
        """Assemble an engine from parts made by `make_engine`.

        Args:
            executor: executor that has loaded the model and allocated the cache.
            scheduler: schedules requests over the blocks of the executor's cache.
            grammars: compiles requests' grammars.
            speculation: the scheduler's `DraftPolicy`; None: no drafts.
            compatibility: properties that KV depends on.
            images: decodes images; None: the model takes no images.
        """
        self.executor = executor
        self.model_config, self.dtype = executor.model_config, executor.dtype
        self.kv_memory, self.max_model_len = executor.kv_memory, executor.max_model_len
        self.num_blocks = self.kv_memory.num_blocks
        self.eos_token_ids = self.model_config.eos_token_ids
        self.compatibility = compatibility
        self.images = images or ImageInputs()
        self.block_pool = scheduler.kv_cache_manager.block_pool
        self._scheduler, self._grammars, self._speculation = scheduler, grammars, speculation
        self._figures = StepFigures(scheduler, executor)
        self._log = StepLog(scheduler, executor.config.max_num_requests)
        config = executor.config
        self.adapters = AdapterTable(
            executor, config.max_adapters, config.adapter_cache_bytes, self._adapters_in_use
        )
        self.last_scheduled: SchedulerOutput | None = None
        self._in_flight: _StepInFlight | None = None
        self._busy_until = 0.0  # when the device ended the previous step

    # ------------------------------------------------------------------ requests

    @property
    def requests(self) -> dict[str, Request]:
        """Return unfinished requests by id; do not change the dict."""
        return self._scheduler.requests

    @property
    def num_waiting(self) -> int:
        """Return the number of requests that wait for a step; parked ones are not counted."""
        return self._scheduler.num_waiting

    @property
    def by_priority(self) -> bool:
        """Return whether requests are scheduled by priority; else by arrival."""
        return self._scheduler.by_priority

    def add_request(self, request: Request) -> None:
        """Queue a request; its id must not be in use.

        Raises AdapterMissingError if its adapter is not loaded here.
        """
        self.adapters.acquire(request.adapter)
        self._grammars.follow_thought(request)
        self._scheduler.add_request(request)
        if request.images is not None and request.awaits_pixels:
            self.images.submit(request.images)
        if request.awaits_grammar:
            self._grammars.submit(request)

    def park(self, request: Request) -> None:
        """Park a request whose prompt KV a remote node will write.

        Raises AdapterMissingError if its adapter is not loaded here.
        """
        self.adapters.acquire(request.adapter)
        self._grammars.follow_thought(request)
        self._scheduler.park(request)
        if request.awaits_grammar:  # compile the grammar while the KV is transferred
            self._grammars.submit(request)

    def grant(self, request_id: str) -> GrantedBlocks | None:
        """Return the blocks that a parked request still needs from the remote node.

        Returns None if memory is short.
        """
        return self._scheduler.grant(request_id)

    def find_initial_prefix(self, request: Request) -> tuple[int, list[BlockHash]]:
        """Return the number of cached initial tokens, and the hashes of missing full blocks."""
        return self._scheduler.kv_cache_manager.find_initial_prefix(request)

    def num_usable_cached_tokens(self, request: Request) -> int:
        """Return how many tokens of a new request would be found in the prefix cache now.

        Unlike `find_initial_prefix`, never counts the last token, which must be computed for its
        logits. For layers with sliding windows, a hit needs only the last window's blocks.
        """
        return self._scheduler.kv_cache_manager.num_usable_cached_tokens(request)

    def keep_received(self, request_id: str, num_tokens: int) -> tuple[int, ...]:
        """Cache the full blocks that arrived for a granted request that is about to be aborted.

        Returns the granted blocks beyond ``num_tokens``, which a remote node may still write.
        """
        manager = self._scheduler.kv_cache_manager
        return manager.keep_received(self.requests[request_id], num_tokens)

    def handoff_indices(self, num_prompt_tokens: int) -> list[int]:
        """Return the indices in ``Request.block_ids`` of the blocks that a hand-off transfers."""
        return self._scheduler.kv_cache_manager.handoff_indices(num_prompt_tokens)

    def commit(self, request_id: str, token_id: int, drafts: Sequence[int] = ()) -> None:
        """Let a parked request run in the next step, as its prompt's KV is complete.

        Args:
            drafts: the remote node's drafts of the tokens after ``token_id``.
        """
        taken = self._speculation.received(request_id, drafts) if self._speculation else ()
        self._scheduler.commit(request_id, token_id, taken)

    def first_drafts(self, request: Request) -> tuple[int, ...]:
        """Return drafts of the next tokens, for the node that continues this request."""
        return () if self._speculation is None else self._speculation.first_drafts(request)

    def why_drafts(self, request: Request | None = None) -> str:
        """Explain in words the latest step's number of drafts; empty if the number is fixed.

        Args:
            request: a request; if it had no drafts, the text also says why.
        """
        choice = None if self._speculation is None else self._speculation.choice
        if request is not None and not is_drafted_for(request):
            return f"not drafted for, as no drafts had paid for long when it came; {choice}"
        return "" if choice is None else str(choice)

    def compile_grammar(self, params: SamplingParams) -> GrammarState | None:
        """Compile and return a future request's grammar; without a grammar, track its thought.

        Returns None if the request has neither grammar nor thought. Raises InvalidRequestError.
        """
        if params.structured_output is None and params.thinking is None:
            return None
        return self._grammars.compile_now(params)

    def prepare_grammars(self) -> None:
        """Load the tokenizer and start the threads that grammars need; takes up to seconds.

        Nodes call this before they join the cluster, because creating the grammar library's
        tokenizer holds the GIL. Without this call, the first request with a grammar is slow.

        Raises:
            ConfigError: no thread or descriptor is left.
        """
        self._scheduler.masks.start()
        self._grammars.prepare()

    def wake_with(self, wake: Callable[[], None]) -> None:
        """Set a function to call, on any thread, when a grammar or an image's pixels are ready."""
        self._grammars.on_ready = wake
        self.images.wake_with(wake)

    def take_failures(self) -> list[tuple[str, BatonError]]:
        """Return the ids of requests that cannot continue, and why, since the last call.

        A parked request in the list is still open: take references on its blocks, then abort it.
        """
        failures, self._scheduler.failures = self._scheduler.failures, []
        return failures

    def take_handed_back(self) -> list[Request]:
        """Return the requests preempted since the last call that another node must compute."""
        handed_back, self._scheduler.handed_back = self._scheduler.handed_back, []
        return handed_back

    def can_begin(self, request: Request) -> bool:
        """Return whether a new request would run in the next step without delaying another."""
        return self._scheduler.can_begin(request)

    def abort(self, request_id: str) -> Request | None:
        """End a request now; return it, or None if its id is unknown."""
        aborted = self._scheduler.abort(request_id)
        self.adapters.settle()
        return aborted

    # ------------------------------------------------------------------ steps

    @property
    def has_work(self) -> bool:
        """Return whether a step could compute something now."""
        return self._scheduler.has_work

    @property
    def awaits_pixels(self) -> bool:
        """Return whether some request waits until its images are decoded."""
        return self.images.is_busy or bool(self._scheduler.images.wanted)

    @property
    def awaits_masks(self) -> bool:
        """Return whether all running requests wait for masks; then retry `schedule` at once.

        `schedule` itself waits some milliseconds for a mask, so repeated calls are no busy loop.
        """
        return self._scheduler.awaits_masks

    def rename_cache(self, compatibility: Mapping[str, str]) -> None:
        """Forget cached KV and encodings after the weights changed; call while no request is open.

        Args:
            compatibility: properties that KV depends on from now on.
        """
        self.compatibility = compatibility
        self._scheduler.kv_cache_manager.rename(cache_namespace(compatibility))
        self.forget_encodings()

    def forget_encodings(self) -> None:
        """Forget the encodings of images; call while no request is open."""
        self._scheduler.images.forget_all()

    def limit_stretch(self, limit: float | None) -> None:
        """Limit the time of steps that decode and compute prompts, relative to decode-only steps.

        Steps with drafts are not measured.

        Args:
            limit: longest such step, as a multiple of a decode-only step; above 1. None: only
                ``prefill_tokens_beside_decodes`` limits them.
        """
        self._figures.limit_stretch(limit)

    def step(self) -> StepResult:
        """Run one step: schedule, execute, update."""
        return self.execute(self.schedule())

    def schedule(self) -> SchedulerOutput:
        """Choose what the next step computes. Call `execute` next."""
        started = time.monotonic()
        self.adapters.settle()
        for request, grammar in self._grammars.take_ready():
            self._scheduler.set_grammar(request, grammar)
        self.images.pass_on(self._scheduler)
        scheduled = self._scheduler.schedule(self._figures.num_beside_decodes())
        self._scheduler.counters.step_s += time.monotonic() - started
        self._log.note_scheduled(scheduled)
        return scheduled

    def execute(
        self, scheduled: SchedulerOutput, after_layer: Callable[[int], None] | None = None
    ) -> StepResult:
        """Compute a scheduled step and update the requests.

        With asynchronous scheduling: launch the step, then wait for the previous step and return
        its result (see ``StepResult.scheduled``). The launched step reads the previous step's
        tokens on the device. A request that the previous step ended is still computed in the
        launched step, and keeps its blocks until that step has ended. A step whose logits depend on
        the previous tokens on the host (penalties, grammars), or that wants logprobs of a prompt of
        several chunks, is launched only after the previous step has ended.

        Args:
            after_layer: called on the computing thread after each layer of the scheduled step;
                must be quick. On a GPU, `KVMemory.fence` tells when the layer is computed.
        """
        started = time.monotonic()
        compute = self._begin if self.executor.runs_ahead else self._compute
        result = compute(scheduled, after_layer)
        self._scheduler.counters.step_s += time.monotonic() - started
        return result

    def _compute(self, scheduled: SchedulerOutput, after_layer: AfterLayer | None) -> StepResult:
        """Compute one step and wait for its result."""
        if not scheduled.scheduled:
            self.executor.rest()
            return StepResult()
        self.last_scheduled = scheduled
        plan, hooks = self._scheduler.plan(scheduled, after_layer)
        return self._end(scheduled, self.executor.submit(plan, hooks))

    def _begin(self, scheduled: SchedulerOutput, after_layer: AfterLayer | None) -> StepResult:
        """Launch a step, if possible before the step in flight ends; then wait for the latter."""
        result, before = StepResult(), self._in_flight
        if before is not None:
            scheduled = scheduled.without_finished()
            if not scheduled.may_run_ahead:
                result, before, self._in_flight = self._end_in_flight(before), None, None
                scheduled = self._scheduler.with_masks(scheduled.without_finished())
        if scheduled.scheduled:
            self.last_scheduled = scheduled
            plan, hooks = self._scheduler.plan(scheduled, after_layer)
            self._scheduler.begin_step(scheduled)
            self._in_flight = scheduled, self.executor.submit(plan, hooks)
            if before is not None:
                result = self._end_in_flight(before)
                self.last_scheduled = scheduled
        return result

    def _end_in_flight(self, step: _StepInFlight) -> StepResult:
        scheduled, pending = step
        self.last_scheduled = scheduled
        return self._end(scheduled, pending)

    def _end(self, scheduled: SchedulerOutput, pending: PendingStep) -> StepResult:
        """Wait for a step and update the requests with its result."""
        output = pending.wait()
        # Exclude the time that a step launched ahead waited for the previous step.
        computed_s = output.ended_at - max(output.started_at, self._busy_until)
        if self._speculation is not None:
            seconds = output.ended_at - self._busy_until
            self._speculation.note_step(scheduled, seconds, output.drafting_s)
        self._busy_until = output.ended_at
        self._figures.note_step(scheduled, computed_s)
        self._scheduler.fail_all(output.without_numbers)
        self._scheduler.fail_images(output.failed_images)
        self._scheduler.counters.encoder_s += output.encoding_s
        result = self._scheduler.update(scheduled, output)
        self._log.note_result(result)
        self.adapters.settle()
        if self._speculation is not None:
            drafted = output.draft_token_ids
            drafts = self._speculation.after_step(result, self.requests, drafted)
            self._scheduler.drafts.keep(result.outputs, drafts)
        return result

    def do_idle_work(self) -> bool:
        """Do a little deferrable work, such as clearing new KV memory.

        Return whether more is left.
        """
        return self.executor.do_idle_work(self.block_pool.num_made)

    @property
    def num_steps(self) -> int:
        """Return how many steps have computed something and ended, since the start."""
        return self._figures.num_steps

    @property
    def step_in_flight(self) -> bool:
        """Return whether a submitted step has not ended; always False without async scheduling."""
        return self._in_flight is not None

    def metrics(self) -> EngineMetrics:
        """Return the metrics; safe from any thread, even during a step."""
        return self._figures.metrics()

    def close(self) -> None:
        """Stop the workers; no further step can be executed. May be called twice."""
        self.images.close()
        self.executor.close()

    def check(self) -> None:
        """Assert the engine's invariants; for tests and debug runs."""
        self._scheduler.check()

    def _adapters_in_use(self) -> set[str]:
        """Return the adapters of open requests and of the step in flight."""
        in_use = {request.adapter for request in self.requests.values()}
        if self._in_flight is not None:
            in_use |= {item.request.adapter for item in self._in_flight[0].scheduled}
        return in_use
