"""Unit tests of WaitingRoom: its queues, its counts, and requests that are in no queue."""

from __future__ import annotations

import pytest

from baton.api.sampling_params import SamplingParams
from baton.api.structured_output import StructuredOutput
from engine.core.request import Request, RequestStatus
from engine.core.waiting_room import PARKED, WaitingRoom
from tests.fakes.engine.engine_parts import make_request

STRUCTURED = SamplingParams(max_tokens=4, structured_output=StructuredOutput(regex="a+"))


def enter(room: WaitingRoom, *requests: Request) -> None:
    for request in requests:
        room.give_rank(request)
        room.queue(request)


def holding(name: str) -> Request:
    request = make_request(name)
    request.block_ids = [1]
    return request


def end(room: WaitingRoom, request: Request) -> None:
    """End a request as the scheduler does."""
    room.leave(request)
    request.status = RequestStatus.FINISHED_ABORTED
    request.block_ids = []


def counts(room: WaitingRoom) -> tuple[int, int, int]:
    return room.num_arrived, room.num_without_blocks, len(room)


def test_who_holds_blocks_has_a_line_of_its_own() -> None:
    room = WaitingRoom()
    first, second, third = make_request("first"), holding("second"), make_request("third")
    enter(room, first, second, third)
    assert counts(room) == (1, 2, 3)
    room.check([first, second, third])
    assert room.peek_arrived() is second
    assert room.pop_arrived() is second
    assert room.peek_arrived() is None
    assert room.peek() is first
    room.pop(first)
    assert room.peek() is third
    assert counts(room) == (0, 1, 1)


def test_parked_ones_are_in_no_line() -> None:
    room = WaitingRoom()
    requests = [make_request(status.value) for status in PARKED[:2]]
    for request, status in zip(requests, PARKED[:2], strict=True):
        room.park(request, status)
    unread = make_request("unread", params=STRUCTURED)
    enter(room, unread)
    assert unread.status is RequestStatus.WAITING_FOR_GRAMMAR
    assert not room
    assert room.peek() is room.peek_arrived() is None
    room.check([*requests, unread])
    for request in (*requests, unread):
        end(room, request)
    assert counts(room) == (0, 0, 0)


def test_only_a_status_of_waiting_for_something_parks() -> None:
    with pytest.raises(AssertionError):
        WaitingRoom().park(make_request("a"), RequestStatus.RUNNING)


@pytest.mark.parametrize("gone", range(3))
def test_who_ends_in_line_counts_no_more_and_is_never_given(gone: int) -> None:
    room = WaitingRoom()
    waiting = [make_request(f"w{index}") for index in range(3)]
    arrived = [holding(f"a{index}") for index in range(3)]
    enter(room, *waiting, *arrived)
    end(room, waiting.pop(gone))
    end(room, arrived.pop(gone))
    assert counts(room) == (2, 2, 4)
    room.check(waiting + arrived)
    assert room.peek() is waiting[0]
    assert room.peek_arrived() is arrived[0]
    assert room.pop_last_arrived() is arrived[1]
    assert room.pop_arrived() is arrived[0]
    for request in waiting:
        assert room.peek() is request
        room.pop(request)
    assert counts(room) == (0, 0, 0)
    assert room.peek() is room.peek_arrived() is None


def test_a_preempted_one_waits_again_before_those_that_came_after_it() -> None:
    room = WaitingRoom()
    old, new = make_request("old"), make_request("new")
    enter(room, old)
    room.pop(old)
    enter(room, new)
    room.put_back(old)
    assert old.status is RequestStatus.PREEMPTED
    assert counts(room) == (0, 2, 2)
    assert room.peek() is old
