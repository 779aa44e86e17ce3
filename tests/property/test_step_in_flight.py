"""The scheduler's state machine again, with a step that runs while everything else happens.

What a step writes is there when it begins and once more when it ends, so that who is given a
block too early finds foreign content in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from hypothesis import settings
from hypothesis.stateful import invariant

from engine.outputs import ModelRunnerOutput, SchedulerOutput
from engine.request import Request
from tests.property.test_scheduler import SchedulerMachine


class InFlightMachine(SchedulerMachine):
    """Steps end when the next one has been scheduled, as in `Engine.execute`."""

    def __init__(self) -> None:
        super().__init__()
        self.in_flight: tuple[SchedulerOutput, ModelRunnerOutput] | None = None
        # What the step in flight writes: positions from..to of requests, in these blocks.
        self.spans: list[tuple[Request, list[int], int, int]] = []

    def one_step(self, next_token: Callable[[Request], int], abort_during: bool = False) -> None:
        ahead = self.scheduler.schedule()
        self.scheduler.check()
        if abort_during and ahead.scheduled:
            request_id = ahead.scheduled[0].request.request_id
            self.scheduler.abort(request_id)
            self.end(request_id, "aborted")
        if self.in_flight is not None:
            self.end_step()
        ahead = ahead.without_finished()
        self.check_ahead(ahead)
        if not ahead.scheduled:
            return
        self.runner.next_token = next_token
        self.spans = [
            (
                item.request,
                list(item.request.block_ids),
                item.request.num_computed_tokens,
                item.request.num_computed_tokens + item.num_scheduled_tokens,
            )
            for item in ahead.scheduled
        ]
        output = self.runner.execute(ahead)
        self.scheduler.begin(ahead)
        self.in_flight = ahead, output

    def end_step(self) -> None:
        assert self.in_flight is not None
        scheduled, output = self.in_flight
        self.in_flight = None
        for request, block_ids, start, end in self.spans:
            self.runner.write_into(block_ids, request, start, end)
        self.take(self.scheduler.update(scheduled, output))

    def check_ahead(self, ahead: SchedulerOutput) -> None:
        """What was scheduled while a step ran is right now that it has ended."""
        ids = [item.request.request_id for item in ahead.scheduled]
        sizes = [item.num_scheduled_tokens for item in ahead.scheduled]
        assert len(set(ids)) == len(ids) <= self.max_num_requests
        assert ahead.num_scheduled_tokens == sum(sizes) <= self.budget
        for item in ahead.scheduled:
            request = item.request
            end = request.num_computed_tokens + item.num_scheduled_tokens
            assert end <= request.num_tokens
            assert self.scheduler.kv_cache_manager.num_tokens_held(request) >= end

    def blocks_held(self) -> Counter[int]:
        """What a step in flight writes is held, even where its request has been aborted."""
        held = super().blocks_held()
        if self.in_flight is not None:
            for item in self.in_flight[0].scheduled:
                if item.request.request_id not in self.scheduler.requests:
                    held.update(item.request.block_ids)
        return held

    @invariant()
    def what_the_step_writes_is_not_free(self) -> None:
        if self.in_flight is None:
            return
        manager = self.scheduler.kv_cache_manager
        ref_counts = manager.block_pool.ref_counts()
        for _, block_ids, start, end in self.spans:
            first = start // manager.block_size * manager.num_groups
            written = block_ids[first : manager.num_blocks_for(end)]
            assert all(ref_counts[block_id] for block_id in written)

    def teardown(self) -> None:
        if hasattr(self, "scheduler"):
            for _ in range(2000):
                if not self.scheduler.has_work:
                    break
                self.one_step(lambda request: 2)
        super().teardown()

    def drained(self) -> bool:
        return self.in_flight is None and super().drained()


TestStepInFlight = InFlightMachine.TestCase
TestStepInFlight.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
