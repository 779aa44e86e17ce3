"""Unit tests of the waiting queues, alone and under a scheduler."""

from __future__ import annotations

import pytest

from baton.api.errors import ConfigError
from engine.core.request import Request, RequestStatus
from engine.core.waiting_queue import WAITING_QUEUES, WaitingQueue, make_waiting_queue
from tests.fakes.engine_parts import make_request, make_scheduler, step

every_policy = pytest.mark.parametrize("policy", WAITING_QUEUES)


def arrived(*priorities: int) -> list[Request]:
    """Requests that came in this order, ranked as the scheduler ranks them."""
    requests = []
    for number, priority in enumerate(priorities):
        request = make_request(f"r{number}", priority=priority)
        request.rank = (priority, number)
        requests.append(request)
    return requests


def drain(queue: WaitingQueue) -> list[str]:
    """Ids in the order in which the queue gives them."""
    ids = []
    while (request := queue.peek()) is not None:
        assert queue.pop() is request
        ids.append(request.request_id)
    return ids


def filled(policy: str, requests: list[Request]) -> WaitingQueue:
    queue = make_waiting_queue(policy)
    for request in requests:
        queue.add(request)
    return queue


def abort(request: Request) -> None:
    request.status = RequestStatus.FINISHED_ABORTED


@every_policy
def test_an_empty_queue_has_no_next_one(policy: str) -> None:
    assert make_waiting_queue(policy).peek() is None


@every_policy
def test_looking_takes_nothing(policy: str) -> None:
    queue = filled(policy, arrived(0, 0))
    first = queue.peek()
    assert first is not None
    assert queue.peek() is first


@every_policy
def test_among_equals_first_come_is_first_served(policy: str) -> None:
    assert drain(filled(policy, arrived(0, 0, 0, 0))) == ["r0", "r1", "r2", "r3"]


@pytest.mark.parametrize(
    ("policy", "order"),
    [("fcfs", ["r0", "r1", "r2", "r3", "r4"]), ("priority", ["r2", "r1", "r3", "r0", "r4"])],
)
def test_only_the_priority_queue_looks_at_priorities(policy: str, order: list[str]) -> None:
    assert drain(filled(policy, arrived(5, 0, -1, 0, 5))) == order


@every_policy
@pytest.mark.parametrize("gone", [[0], [1], [2], [0, 1], [1, 2], [0, 2], [0, 1, 2]])
def test_aborted_ones_are_skipped_wherever_they_are(policy: str, gone: list[int]) -> None:
    requests = arrived(0, 0, 0)
    queue = filled(policy, requests)
    for index in gone:
        abort(requests[index])
    assert drain(queue) == [f"r{index}" for index in range(3) if index not in gone]


@every_policy
def test_one_that_is_aborted_after_a_look_is_not_given(policy: str) -> None:
    requests = arrived(0, 0)
    queue = filled(policy, requests)
    assert queue.peek() is requests[0]
    abort(requests[0])
    assert queue.peek() is requests[1]


@every_policy
def test_preempted_ones_come_before_later_ones_and_in_their_own_order(policy: str) -> None:
    requests = arrived(0, 0, 0, 0)
    queue = filled(policy, requests)
    queue.pop()
    queue.pop()
    queue.put_back(requests[1])  # the last of those that run is preempted first
    queue.put_back(requests[0])
    assert drain(queue) == ["r0", "r1", "r2", "r3"]


@every_policy
def test_one_that_comes_late_goes_before_those_that_arrived_after_it(policy: str) -> None:
    requests = arrived(0, 0, 0, 0)
    queue = filled(policy, [requests[1], requests[3]])
    queue.add(requests[2])
    queue.add(requests[0])
    assert drain(queue) == ["r0", "r1", "r2", "r3"]


def test_a_preempted_one_does_not_overtake_a_better_priority() -> None:
    requests = arrived(1, 0, 1)
    queue = filled("priority", requests[:1])
    queue.pop()
    queue.add(requests[1])
    queue.add(requests[2])
    queue.put_back(requests[0])
    assert drain(queue) == ["r1", "r0", "r2"]


def test_an_unknown_policy_is_refused_with_the_names_of_the_known() -> None:
    with pytest.raises(
        ConfigError, match=r"^scheduling_policy: must be one of fcfs, priority, got 'lifo'$"
    ):
        make_waiting_queue("lifo")


# ---------------------------------------------------------------- under a scheduler


@pytest.mark.parametrize(("policy", "order"), [("fcfs", "abcd"), ("priority", "cbda")])
def test_a_scheduler_admits_in_the_order_of_its_policy(policy: str, order: str) -> None:
    scheduler = make_scheduler(max_num_requests=1, policy=policy)
    for name, priority in (("a", 2), ("b", 1), ("c", -1), ("d", 1)):
        scheduler.add(make_request(name, 4, 1, priority=priority))
    assert "".join(next(iter(step(scheduler)[0])) for _ in range(4)) == order
    assert not scheduler.has_work


@pytest.mark.parametrize(("policy", "preempted"), [("fcfs", "urgent"), ("priority", "patient")])
def test_who_has_the_worst_rank_is_preempted_even_if_it_came_first(
    policy: str, preempted: str
) -> None:
    scheduler = make_scheduler(num_blocks=4, policy=policy)
    requests = {
        "patient": make_request("patient", 8, 6, priority=3),
        "urgent": make_request("urgent", 8, 6, priority=-3),
    }
    for request in requests.values():
        scheduler.add(request)
    step(scheduler)
    step(scheduler)
    statuses = {name: request.status for name, request in requests.items()}
    assert statuses.pop(preempted) is RequestStatus.PREEMPTED
    assert list(statuses.values()) == [RequestStatus.RUNNING]


def test_an_urgent_request_that_comes_late_gets_its_share_of_the_budget_first() -> None:
    scheduler = make_scheduler(
        max_num_batched_tokens=6, long_prefill_token_threshold=5, policy="priority"
    )
    scheduler.add(make_request("patient", 20, 5, priority=1))
    assert step(scheduler)[0] == {"patient": 5}
    scheduler.add(make_request("urgent", 5, 5, priority=0))
    assert step(scheduler)[0] == {"patient": 5, "urgent": 1}
    assert step(scheduler)[0] == {"urgent": 4, "patient": 2}
    assert step(scheduler)[0] == {"urgent": 1, "patient": 5}
