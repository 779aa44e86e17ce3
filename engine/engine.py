"""Engine: schedules, executes and updates steps. One thread owns an engine.

in turn          schedule | run | update | schedule | run | update
asynchronous     schedule N+1, launch N+1 | wait, update N | schedule N+2, launch N+2 | ...
(and the device)           run N ...............| run N+1 ....................| run N+2
pipeline stages  as many steps as stages are launched before the oldest one is waited for
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from baton.api.errors import BatonError
from baton.kv.block_hash import cache_namespace
from engine.core.kv_cache_manager import GrantedBlocks
from engine.core.metrics import EngineMetrics
from engine.core.outputs import SchedulerOutput, StepResult
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.executors.base import Executor, PendingStep
from engine.features import Features
from engine.step_figures import StepFigures

AfterLayer = Callable[[int], None]
_StepInFlight = tuple[SchedulerOutput, PendingStep]


class Engine:
    """A model, its KV cache and the scheduler over them.

    Attributes:
        executor: computes the steps.
        kv_memory: memory of the KV cache on the worker; see `KVMemory`.
        adapters: the LoRA adapters in memory.
        features: grammars, images and drafts.
        figures: counts and times of the steps, and the limit on prompt tokens that follows from the
            times.
        kv_cache_manager: allocates the blocks of the KV cache, and finds cached prefixes.
        block_pool: reference counts and cached contents of the KV cache's blocks.
        dtype: name of the weights' dtype.
        max_model_len: maximum number of tokens of one request.
        eos_token_ids: tokens that end an output unless a request ignores them.
        last_scheduled: the latest step, running or ended, for failure reports.
        compatibility: properties, by name, that must be equal on two nodes that exchange KV.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        features: Features,
        compatibility: Mapping[str, str],
    ) -> None:
        """Assemble an engine from the parts of `make_engine`; ``executor`` has loaded the model."""
        self.executor = executor
        self.model_config, self.dtype = executor.model_config, executor.dtype
        self.kv_memory, self.max_model_len = executor.kv_memory, executor.max_model_len
        self.num_blocks = self.kv_memory.num_blocks
        self.eos_token_ids = self.model_config.eos_token_ids
        self.compatibility = compatibility
        self.features = features
        self.kv_cache_manager = scheduler.kv_cache_manager
        self.block_pool = self.kv_cache_manager.block_pool
        self._scheduler = scheduler
        self.figures = StepFigures(scheduler, executor)
        self.adapters = features.make_adapters(executor, self._adapters_in_use)
        self.last_scheduled: SchedulerOutput | None = None
        self._in_flight: deque[_StepInFlight] = deque()  # oldest first
        self._busy_until = 0.0  # when the device ended the previous step

    # ------------------------------------------------------------------ requests

    @property
    def requests(self) -> dict[str, Request]:
        """Return unfinished requests by id; callers must not change the dict."""
        return self._scheduler.requests

    @property
    def num_waiting(self) -> int:
        """Return the number of requests that wait for a step; parked ones are not counted."""
        return self._scheduler.num_waiting

    @property
    def by_priority(self) -> bool:
        """Return whether requests are scheduled by priority; otherwise by arrival."""
        return self._scheduler.by_priority

    def add_request(self, request: Request) -> None:
        """Queue a request; its id must not be in use.

        Raises AdapterMissingError if its adapter is not loaded here.
        """
        self.adapters.acquire(request.adapter)
        self.features.prepare_prompt(request)
        self._scheduler.add_request(request)
        self.features.submit(request)

    def park(self, request: Request) -> None:
        """Park a request whose prompt KV a remote node will write.

        Raises AdapterMissingError if its adapter is not loaded here.
        """
        self.adapters.acquire(request.adapter)
        self.features.prepare_parked(request)
        self._scheduler.park(request)
        self.features.submit_grammar(request)  # compile the grammar while the KV is transferred

    def grant(self, request_id: str) -> GrantedBlocks | None:
        """Return the blocks that a parked request still needs from the remote node.

        Returns None if memory is short.
        """
        return self._scheduler.grant(request_id)

    def commit(self, request_id: str, token_id: int, drafts: Sequence[int] = ()) -> None:
        """Let a parked request run in the next step, because the KV of its prompt is complete.

        Args:
            drafts: the remote node's drafts of the tokens after ``token_id``.
        """
        taken = self.features.received_drafts(request_id, drafts)
        self._scheduler.commit(request_id, token_id, taken)

    def take_failures(self) -> list[tuple[str, BatonError]]:
        """Return the requests that failed since the last call: their ids and the reasons.

        A parked request in the list is still open: callers take references on its blocks, as a
        remote node may still write them, and then abort the request.
        """
        failures, self._scheduler.failures = self._scheduler.failures, []
        return failures

    def take_handed_back(self) -> list[Request]:
        """Return the requests, preempted since the last call, that another node must compute."""
        handed_back, self._scheduler.handed_back = self._scheduler.handed_back, []
        return handed_back

    def can_begin(self, request: Request) -> bool:
        """Return whether a new request would run in the next step without delaying another."""
        return self._scheduler.can_begin(request)

    def abort(self, request_id: str) -> Request | None:
        """End a request now; return the request, or None if its id is unknown."""
        aborted = self._scheduler.abort(request_id)
        self.adapters.settle()
        return aborted

    # ------------------------------------------------------------------ steps

    @property
    def has_work(self) -> bool:
        """Return whether a step could compute something now."""
        return self._scheduler.has_work

    @property
    def awaits_masks(self) -> bool:
        """Return whether all running requests wait for masks; callers then `schedule` again.

        `schedule` waits some milliseconds for a mask, so calling it repeatedly is no busy loop.
        """
        return self._scheduler.grammars.awaits_masks

    def rename_cache(self, compatibility: Mapping[str, str]) -> None:
        """Drop cached KV and encodings because the weights changed; call while no request is open.

        Args:
            compatibility: new value of the attribute `compatibility`.
        """
        self.compatibility = compatibility
        self.kv_cache_manager.rename(cache_namespace(compatibility))
        self.features.forget_cached()

    def step(self) -> StepResult:
        """Run one step: schedule, execute, update."""
        return self.execute(self.schedule())

    def schedule(self) -> SchedulerOutput:
        """Choose what the next step computes. Callers pass the result to `execute`."""
        started = time.monotonic()
        self.adapters.settle()
        self.features.pass_on()
        scheduled = self._scheduler.schedule(self.figures.num_beside_decodes())
        self._scheduler.counters.step_s += time.monotonic() - started
        self.figures.log.note_scheduled(scheduled)
        return scheduled

    def execute(
        self, scheduled: SchedulerOutput, after_layer: Callable[[int], None] | None = None
    ) -> StepResult:
        """Compute a scheduled step and update the requests.

        With asynchronous scheduling: launch the step, then wait for the previous step and return
        its result (see ``StepResult.scheduled``). The launched step reads the previous step's
        tokens on the device. A request that the previous step ended is still computed in the
        launched step, and keeps its blocks until that step has ended. Some steps are launched only
        after the previous step has ended: steps for which the host needs the previous tokens
        (penalties, grammars), and steps that return logprobs of a prompt of several chunks.

        With pipeline stages: launch the step; return an empty result while fewer steps than stages
        are in flight, else wait for the oldest step and return its result.

        Args:
            after_layer: called on the computing thread after each layer of the scheduled step; must
                be quick. On a GPU, the layer is then only launched; see `KVMemory.fence`.
        """
        started = time.monotonic()
        if not self.executor.runs_ahead:
            result = self._compute(scheduled, after_layer)
        elif self._scheduler.in_flight.num_stages > 1:
            result = self._fill_stages(scheduled, after_layer)
        else:
            result = self._begin(scheduled, after_layer)
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
        """Launch a step, if possible before the step in flight ends; return the latter's result."""
        result, is_ahead = StepResult(), bool(self._in_flight)
        if is_ahead:
            scheduled = scheduled.without_finished()
            if not scheduled.may_run_ahead:
                result, is_ahead = self._end_oldest(), False
                scheduled = self._scheduler.with_masks(scheduled.without_finished())
        if scheduled.scheduled:
            self._launch(scheduled, after_layer)
            if is_ahead:
                result = self._end_oldest()
                self.last_scheduled = scheduled
        return result

    def _fill_stages(
        self, scheduled: SchedulerOutput, after_layer: AfterLayer | None
    ) -> StepResult:
        """Launch a step; wait for the oldest one if all stages are busy or nothing was launched."""
        if scheduled.scheduled:
            self._launch(scheduled, after_layer)
            if len(self._in_flight) < self._scheduler.in_flight.num_stages:
                return StepResult()
        return self._end_oldest() if self._in_flight else StepResult()

    def _launch(self, scheduled: SchedulerOutput, after_layer: AfterLayer | None) -> None:
        self.last_scheduled = scheduled
        plan, hooks = self._scheduler.plan(scheduled, after_layer)
        self._scheduler.in_flight.begin_step(scheduled)
        self._in_flight.append((scheduled, self.executor.submit(plan, hooks)))

    def _end_oldest(self) -> StepResult:
        scheduled, pending = self._in_flight.popleft()
        self.last_scheduled = scheduled
        return self._end(scheduled, pending)

    def _end(self, scheduled: SchedulerOutput, pending: PendingStep) -> StepResult:
        """Wait for a step and update the requests with its result."""
        output = pending.wait()
        # Do not count the time that a step launched ahead waited for the previous step.
        computed_s = output.ended_at - max(output.started_at, self._busy_until)
        seconds = output.ended_at - self._busy_until
        self._busy_until = output.ended_at
        self.figures.note_step(scheduled, computed_s)
        self._scheduler.fail_all(output.without_numbers)
        self.features.note_step(scheduled, output, seconds)
        result = self._scheduler.update(scheduled, output)
        self.figures.log.note_result(result)
        self.adapters.settle()
        self.features.after_step(result, output)
        return result

    def do_idle_work(self) -> bool:
        """Do a little work that can wait, such as clearing memory; return whether more is left."""
        if self.features.is_reading:  # a thread that reads files clears the memory that it needs
            return False
        num_expected_blocks = self.features.num_expected_blocks
        return self.executor.do_idle_work(self.block_pool.num_made, num_expected_blocks)

    @property
    def num_steps(self) -> int:
        """Return how many steps that computed something have ended since the start."""
        return self.figures.num_steps

    @property
    def step_in_flight(self) -> bool:
        """Return whether a submitted step has not ended; always False without async scheduling."""
        return bool(self._in_flight)

    @property
    def steps_in_flight(self) -> list[SchedulerOutput]:
        """Return the submitted steps that have not ended, oldest first."""
        return [scheduled for scheduled, _ in self._in_flight]

    def metrics(self) -> EngineMetrics:
        """Return the metrics; safe from any thread, even during a step."""
        return self.figures.metrics()

    def close(self) -> None:
        """Stop the workers; no further step can be executed. May be called twice."""
        self.features.close()
        self.executor.close()

    def check(self) -> None:
        """Assert the engine's invariants; for tests and debug runs."""
        self._scheduler.check()

    def _adapters_in_use(self) -> set[str]:
        """Return the digests of the adapters that open requests and the steps in flight use."""
        in_use = {request.adapter for request in self.requests.values()}
        for scheduled in self.steps_in_flight:
            in_use |= {item.request.adapter for item in scheduled.scheduled}
        return in_use
