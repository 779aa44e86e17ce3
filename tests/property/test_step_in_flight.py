"""The scheduler's state machine with steps in flight while all else happens.

What a step writes is there when it begins and once more when it ends, so that who is given a
block too early finds foreign content in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant

from baton.api.pooling import PoolingParams
from engine.core.outputs import ModelRunnerOutput, ScheduledRequest, SchedulerOutput
from engine.core.request import Request
from tests.fakes.engine.engine_parts import extended
from tests.property.test_scheduler import SchedulerMachine


@dataclass
class View:
    """A request as a step finds it that has been prepared: with tokens of the step before."""

    request_id: str
    extra_keys: tuple[bytes, ...]
    token_ids: list[int]
    num_computed_tokens: int
    block_ids: list[int]
    pooling: PoolingParams | None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass
class Flight:
    """A step that has begun; it writes, into these blocks, positions start .. start + num - 1."""

    scheduled: SchedulerOutput
    output: ModelRunnerOutput
    seen: list[ScheduledRequest]  # with a `View` each


class InFlightMachine(SchedulerMachine):
    """Steps end when the next one has been scheduled, or has begun, as in `Engine.execute`."""

    def __init__(self) -> None:
        super().__init__()
        self.in_flight: list[Flight] = []
        self.runs_ahead = False

    @initialize(runs_ahead=st.booleans())
    def choose(self, runs_ahead: bool) -> None:
        self.runs_ahead = runs_ahead

    def one_step(self, next_token: Callable[[Request], int], abort_during: bool = False) -> None:
        step = self.scheduler.schedule()
        self.scheduler.check()
        if abort_during and step.scheduled:
            request_id = step.scheduled[0].request.request_id
            self.scheduler.abort(request_id)
            self.end(request_id, "aborted")
        step = step.without_finished()
        if self.in_flight and not (self.runs_ahead and step.may_run_ahead):
            self.end_step()
            step = step.without_finished()
        self.check_ahead(step)
        if not step.scheduled:
            return
        self.begin(step, next_token)
        if len(self.in_flight) == 2:
            self.end_step()

    def begin(self, step: SchedulerOutput, next_token: Callable[[Request], int]) -> None:
        seen = [
            ScheduledRequest(
                cast(Request, self.view(item.request)),
                item.num_scheduled_tokens,
                item.draft_token_ids,
            )
            for item in step.scheduled
        ]
        output = self.run(next_token, SchedulerOutput(tuple(seen), step.num_scheduled_tokens))
        self.scheduler.in_flight.begin_step(step)
        self.in_flight.append(Flight(step, output, seen))

    def view(self, request: Request) -> View:
        token_ids = list(request.token_ids)
        if request.num_tokens_pending:
            (sampled,) = self.in_flight[-1].output.sampled_token_ids[request.request_id]
            token_ids.append(sampled)
        start = request.num_computed_tokens + request.num_tokens_in_flight
        return View(
            *(request.request_id, request.extra_keys, token_ids, start, list(request.block_ids)),
            request.pooling,
        )

    def end_step(self) -> None:
        flight = self.in_flight.pop(0)
        for item in flight.seen:
            view = extended(item.request, item.draft_token_ids)
            start = view.num_computed_tokens
            end = start + item.num_scheduled_tokens
            self.runner.write_into(view.block_ids, view, start, end)
        self.take(self.scheduler.update(flight.scheduled, flight.output))

    def check_ahead(self, step: SchedulerOutput) -> None:
        """Assert that a step scheduled while another ran is right by now."""
        ids = [item.request.request_id for item in step.scheduled]
        sizes = [item.num_scheduled_tokens for item in step.scheduled]
        assert len(set(ids)) == len(ids) <= self.max_num_requests
        assert step.num_scheduled_tokens == sum(sizes) <= self.budget
        for item in step.scheduled:
            request = item.request
            start = request.num_computed_tokens + request.num_tokens_in_flight
            end = start + item.num_scheduled_tokens
            end_of_known = request.num_tokens + request.num_tokens_pending
            assert end <= end_of_known + len(item.draft_token_ids)
            if item.draft_token_ids:
                assert not request.num_tokens_in_flight
                assert end == end_of_known + len(item.draft_token_ids)
            assert self.scheduler.kv_cache_manager.num_tokens_held(request) >= end

    def blocks_held(self) -> Counter[int]:
        """Count held blocks, with those that steps in flight write for ended requests."""
        held = super().blocks_held()
        for request in {i.request for one in self.in_flight for i in one.scheduled.scheduled}:
            if request.request_id not in self.scheduler.requests:
                held.update(request.block_ids)
        return held

    @invariant()
    def what_the_steps_write_is_not_free(self) -> None:
        if not self.in_flight:
            return
        manager = self.scheduler.kv_cache_manager
        ref_counts = manager.block_pool.ref_counts()
        for item in (item for flight in self.in_flight for item in flight.seen):
            start = item.request.num_computed_tokens
            first = start // manager.block_size * manager.num_groups
            end = start + item.num_scheduled_tokens
            written = item.request.block_ids[first : manager.num_blocks_for(end)]
            assert all(ref_counts[block_id] for block_id in written)

    def teardown(self) -> None:
        if hasattr(self, "scheduler"):
            for _ in range(2000):
                if not self.scheduler.has_work:
                    break
                self.one_step(lambda request: 2)
        super().teardown()

    def drained(self) -> bool:
        return not self.in_flight and super().drained()


class StagesMachine(InFlightMachine):
    """Pipeline stages: as many steps are in flight as there are stages, as in `Engine.execute`."""

    def __init__(self) -> None:
        super().__init__()
        self.num_stages = 2

    @initialize(num_stages=st.integers(2, 4))
    def choose_stages(self, num_stages: int) -> None:
        self.num_stages = num_stages

    def one_step(self, next_token: Callable[[Request], int], abort_during: bool = False) -> None:
        self.scheduler.in_flight.num_stages = self.num_stages
        step = self.scheduler.schedule()
        self.scheduler.check()
        self.check_ahead(step)
        assert not any(item.request.num_tokens_pending for item in step.scheduled)
        if step.scheduled:
            self.begin(step, next_token)
            if abort_during:
                request_id = step.scheduled[0].request.request_id
                self.scheduler.abort(request_id)
                self.end(request_id, "aborted")
            if len(self.in_flight) < self.num_stages:
                return
        if self.in_flight:
            self.end_step()


TestStages = StagesMachine.TestCase
TestStages.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)

TestStepInFlight = InFlightMachine.TestCase
TestStepInFlight.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
