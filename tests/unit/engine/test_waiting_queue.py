"""Unit tests of the waiting queue."""

from __future__ import annotations

import pytest

from engine.core.request import Request, RequestStatus
from engine.core.waiting_room import WaitingQueue
from tests.fakes.engine.engine_parts import make_request


def arrived(number: int) -> list[Request]:
    """Requests that came in this order, ranked as the scheduler ranks them."""
    requests = [make_request(f"r{index}") for index in range(number)]
    for rank, request in enumerate(requests):
        request.rank = rank
    return requests


def drain(queue: WaitingQueue) -> list[str]:
    """Ids in the order in which the queue gives them."""
    ids = []
    while (request := queue.peek()) is not None:
        assert queue.pop() is request
        ids.append(request.request_id)
    return ids


def filled(requests: list[Request]) -> WaitingQueue:
    queue = WaitingQueue()
    for request in requests:
        queue.add_new(request)
    return queue


def abort(request: Request) -> None:
    request.status = RequestStatus.FINISHED_ABORTED


def test_an_empty_queue_has_no_next_one() -> None:
    assert WaitingQueue().peek() is None


def test_looking_takes_nothing() -> None:
    queue = filled(arrived(2))
    first = queue.peek()
    assert first is not None
    assert queue.peek() is first


def test_among_equals_first_come_is_first_served() -> None:
    assert drain(filled(arrived(4))) == ["r0", "r1", "r2", "r3"]


@pytest.mark.parametrize("gone", [[0], [1], [2], [0, 1], [1, 2], [0, 2], [0, 1, 2]])
def test_aborted_ones_are_skipped_wherever_they_are(gone: list[int]) -> None:
    requests = arrived(3)
    queue = filled(requests)
    for index in gone:
        abort(requests[index])
    assert drain(queue) == [f"r{index}" for index in range(3) if index not in gone]


def test_one_that_is_aborted_after_a_look_is_not_given() -> None:
    requests = arrived(2)
    queue = filled(requests)
    assert queue.peek() is requests[0]
    abort(requests[0])
    assert queue.peek() is requests[1]


def test_preempted_ones_come_before_later_ones_and_in_their_own_order() -> None:
    requests = arrived(4)
    queue = filled(requests)
    queue.pop()
    queue.pop()
    queue.put_back(requests[1])  # the last of those that run is preempted first
    queue.put_back(requests[0])
    assert drain(queue) == ["r0", "r1", "r2", "r3"]


def test_one_that_comes_late_goes_before_those_that_arrived_after_it() -> None:
    requests = arrived(4)
    queue = filled([requests[1], requests[3]])
    queue.add_new(requests[2])
    queue.add_new(requests[0])
    assert drain(queue) == ["r0", "r1", "r2", "r3"]
