"""Unit tests of priorities: the order of starts, preemptions and grants."""

from __future__ import annotations

import pytest

from engine.core.request import Request, RequestStatus
from engine.core.scheduler import Scheduler
from engine.core.waiting_room import RankedQueue
from tests.fakes.engine.engine_parts import FakeRunner, make_request, make_scheduler


def requests_of(*priorities: int, num_prompt_tokens: int = 4, max_tokens: int = 4) -> list[Request]:
    return [
        make_request(f"r{index}", num_prompt_tokens, max_tokens, priority=priority)
        for index, priority in enumerate(priorities)
    ]


def scheduler_with(requests: list[Request], **options: object) -> Scheduler:
    scheduler = make_scheduler(**{"by_priority": True, **options})  # type: ignore[arg-type]
    for request in requests:
        scheduler.add_request(request)
    return scheduler


def step(scheduler: Scheduler) -> list[str]:
    """Run a step; return the ids of its requests."""
    scheduled = scheduler.schedule()
    scheduler.check()
    scheduler.update(scheduled, FakeRunner().execute(scheduled))
    return [item.request.request_id for item in scheduled.scheduled]


@pytest.mark.parametrize(
    ("by_priority", "order"),
    [(True, ["r2", "r1", "r3", "r0", "r4"]), (False, ["r0", "r1", "r2", "r3", "r4"])],
)
def test_important_requests_start_first_and_equals_in_the_order_of_arrival(
    by_priority: bool, order: list[str]
) -> None:
    requests = requests_of(5, 0, -3, 0, 5, max_tokens=1)
    scheduler = scheduler_with(requests, by_priority=by_priority, max_num_requests=1)
    assert [name for _ in requests for name in step(scheduler)] == order


def test_a_running_request_is_not_stopped_for_an_important_one() -> None:
    running, urgent = requests_of(0, -1)
    scheduler = scheduler_with([running], max_num_requests=1)
    step(scheduler)
    scheduler.add_request(urgent)
    assert step(scheduler) == ["r0"]
    assert scheduler.num_preemptions == 0


@pytest.mark.parametrize(
    ("priorities", "lost"),
    [((0, 0), "r1"), ((1, 0), "r0"), ((0, 1), "r1"), ((-5, -6), "r0")],
)
def test_the_least_important_request_is_preempted_and_the_latest_among_equals(
    priorities: tuple[int, int], lost: str
) -> None:
    requests = requests_of(*priorities, num_prompt_tokens=3, max_tokens=8)
    scheduler = scheduler_with(requests, num_blocks=3)
    while not scheduler.num_preemptions:
        step(scheduler)
    preempted = [r.request_id for r in requests if r.status is RequestStatus.PREEMPTED]
    assert preempted == [lost]
    while scheduler.has_work:
        step(scheduler)
    assert [request.output_token_ids for request in requests] == [[2] * 8] * 2


def test_a_preempted_request_waits_behind_more_important_ones() -> None:
    low, high = requests_of(3, 0, num_prompt_tokens=3, max_tokens=8)
    scheduler = scheduler_with([low, high], num_blocks=3, max_num_requests=2)
    while not scheduler.num_preemptions:
        step(scheduler)
    late = make_request("late", 3, 2, priority=1)
    scheduler.add_request(late)
    while late.started_at is None:
        step(scheduler)
    assert low.status is RequestStatus.PREEMPTED


def test_only_more_important_waiting_requests_delay_a_grant() -> None:
    [running] = requests_of(0, num_prompt_tokens=8, max_tokens=9)
    scheduler = scheduler_with([running], num_blocks=6, max_num_requests=1)
    step(scheduler)
    scheduler.add_request(make_request("waits", 8, 2, priority=1))
    parked = [make_request(f"p{priority}", 4, priority=priority) for priority in (2, 0)]
    for request in parked:
        scheduler.park(request)
    assert scheduler.grant("p2") is None
    assert scheduler.grant("p0") is not None


def test_an_ended_request_leaves_a_queue_by_rank_at_once() -> None:
    requests = requests_of(0, 1, 2, 3)
    queue = RankedQueue()
    for rank, request in enumerate(requests):
        request.rank = rank
        queue.add_new(request)
    queue.leave(requests[1])
    assert list(queue) == [requests[0], requests[2], requests[3]]
    assert queue.pop_last() is requests[3]
    assert [queue.pop(), queue.pop(), queue.peek()] == [requests[0], requests[2], None]


def test_starts_and_preemptions_are_counted_by_the_sign_of_the_priority() -> None:
    requests = requests_of(0, -2, 7, num_prompt_tokens=3, max_tokens=8)
    scheduler = scheduler_with(requests, num_blocks=4)
    while scheduler.has_work:
        step(scheduler)
    assert scheduler.counters.started == {-1: 1, 0: 1, 1: 1}
    assert scheduler.counters.preempted[-1] == 0
    assert sum(scheduler.counters.preempted.values()) == scheduler.num_preemptions > 0
