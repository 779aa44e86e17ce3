"""WaitingRoom: requests that are not running: in line for a step, or parked.

    arrived    in line with blocks: the prompt's KV has arrived, or a sibling has computed it
    waiting    in line without blocks, in order of arrival; preempted ones first
               (by priority: both lines are in order of rank)
    parked     not in line until an event; parked requests do not add any work per step:
                 WAITING_FOR_REMOTE_KVS    a remote node writes their prompt's KV
                 WAITING_FOR_SHARED_KVS    a sibling computes their prompt
                 WAITING_FOR_GRAMMAR       their grammar is being compiled
                 WAITING_FOR_PIXELS        their images are being decoded
                 WAITING_FOR_PREFIX        another node sends a cached part of their prompt's KV

Refuses to know: steps, budgets, blocks.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterable, Iterator

from engine.core.request import Request, RequestStatus

IN_LINE = (RequestStatus.WAITING, RequestStatus.PREEMPTED)
# `resume` ends these statuses; the KV of the prompt ends the other statuses of parked requests.
RESUMABLE = (
    RequestStatus.WAITING_FOR_GRAMMAR,
    RequestStatus.WAITING_FOR_PIXELS,
    RequestStatus.WAITING_FOR_PREFIX,
)
PARKED = (
    RequestStatus.WAITING_FOR_REMOTE_KVS,
    RequestStatus.WAITING_FOR_SHARED_KVS,
    *RESUMABLE,
)


# Distance between the ranks of two adjacent priorities: more than the number of requests that an
# engine ever has.
_RANKS_PER_PRIORITY = 2**48


class WaitingQueue:
    """Waiting requests in the order of arrival, with preempted ones at the front.

    An ended request is removed only when it reaches the front or the back of the queue, so that no
    search is needed.
    """

    def __init__(self) -> None:
        self._requests: deque[Request] = deque()

    def add_new(self, request: Request) -> None:
        """Insert a request that has not run yet at its place by time of arrival."""
        # Usually the request is the newest one and goes last, but a request that waited for its
        # grammar goes before requests that arrived later.
        index = len(self._requests)
        while index and self._requests[index - 1].rank > request.rank:
            index -= 1
        self._requests.insert(index, request)

    def add_last(self, request: Request) -> None:
        """Queue a request behind all others, regardless of its arrival time."""
        self._requests.append(request)

    def put_back(self, request: Request) -> None:
        """Queue a preempted request at the front, because it ran before all waiting requests."""
        self._requests.appendleft(request)

    def peek(self) -> Request | None:
        """Return the next request, or None."""
        requests = self._requests
        while requests and requests[0].status.is_finished:
            requests.popleft()
        return requests[0] if requests else None

    def pop(self) -> Request:
        """Remove the request that `peek` returned."""
        return self._requests.popleft()

    def pop_last(self) -> Request:
        """Remove and return the last request; there must be one."""
        while self._requests[-1].status.is_finished:
            self._requests.pop()
        return self._requests.pop()

    def leave(self, request: Request) -> None:
        """Do nothing yet: an ended request is removed at the front or the back of the queue."""

    def __iter__(self) -> Iterator[Request]:
        """Iterate over the requests that wait, in queue order."""
        return (request for request in self._requests if not request.status.is_finished)


class RankedQueue(WaitingQueue):
    """Waiting requests in order of rank; an ended request is removed at once from any place."""

    def __init__(self) -> None:
        # Sorted by falling rank, so that removing the next request, the last one here, is cheap.
        self._ranked: list[Request] = []

    def add_new(self, request: Request) -> None:
        bisect.insort(self._ranked, request, key=_falling_rank)

    add_last = put_back = add_new

    def peek(self) -> Request | None:
        return self._ranked[-1] if self._ranked else None

    def pop(self) -> Request:
        return self._ranked.pop()

    def pop_last(self) -> Request:
        return self._ranked.pop(0)

    def leave(self, request: Request) -> None:
        index = bisect.bisect_left(self._ranked, _falling_rank(request), key=_falling_rank)
        assert self._ranked[index] is request
        del self._ranked[index]

    def __iter__(self) -> Iterator[Request]:
        return reversed(self._ranked)


def _falling_rank(request: Request) -> int:
    return -request.rank


class WaitingRoom:
    """Requests that are not running, in the order in which they will run.

    Args:
        by_priority: whether requests are ordered by priority, then by arrival; otherwise only by
            arrival.

    Attributes:
        num_arrived: requests in line with blocks.
        num_without_blocks: requests in line without blocks.
        num_remote: parked requests whose prompt KV a remote node computes or writes.
    """

    def __init__(self, *, by_priority: bool = False) -> None:
        self.num_arrived = 0
        self.num_without_blocks = 0
        self.num_remote = 0
        self._by_priority = by_priority
        self._arrived = RankedQueue() if by_priority else WaitingQueue()
        self._waiting = RankedQueue() if by_priority else WaitingQueue()
        self._num_ranks = 0

    def __len__(self) -> int:
        """Return the number of requests in line, without parked ones."""
        return self.num_arrived + self.num_without_blocks

    # ------------------------------------------------------------------ in and out

    def give_rank(self, request: Request) -> None:
        """Give a request its permanent rank: by priority if ``by_priority``, then by arrival."""
        request.rank = self._num_ranks
        if self._by_priority:
            request.rank += request.priority * _RANKS_PER_PRIORITY
        self._num_ranks += 1

    def park(self, request: Request, status: RequestStatus) -> None:
        """Park a request with a status that gives the reason."""
        assert status in PARKED
        self._count_remote(request, status)
        request.status = status

    def queue(self, request: Request) -> None:
        """Put a request in line; park it if its grammar, images or fetched prefix are not ready."""
        if request.awaits_grammar:
            self.park(request, RequestStatus.WAITING_FOR_GRAMMAR)
            return
        if request.awaits_pixels:
            self.park(request, RequestStatus.WAITING_FOR_PIXELS)
            return
        if request.awaits_prefix:
            self.park(request, RequestStatus.WAITING_FOR_PREFIX)
            return
        self._count_remote(request, RequestStatus.WAITING)
        request.status = RequestStatus.WAITING
        if request.block_ids:
            self._arrived.add_last(request)
            self.num_arrived += 1
        else:
            self._waiting.add_new(request)
            self.num_without_blocks += 1

    def resume(self, request: Request) -> None:
        """Put a request in line if all that it waited for is ready; ignored if it has ended."""
        if request.status in RESUMABLE:
            self.queue(request)

    def put_back(self, request: Request) -> None:
        """Put a preempted request, which has lost its blocks, back in line, or park it."""
        assert not request.block_ids
        if request.awaits_pixels:
            self.park(request, RequestStatus.WAITING_FOR_PIXELS)
            return
        request.status = RequestStatus.PREEMPTED
        self._waiting.put_back(request)
        self.num_without_blocks += 1

    def leave(self, request: Request) -> None:
        """Remove an ending request from the room; call before its status or blocks change."""
        if request.status not in IN_LINE:
            self._count_remote(request, None)
            return
        if request.block_ids:
            self._arrived.leave(request)
            self.num_arrived -= 1
        else:
            self._waiting.leave(request)
            self.num_without_blocks -= 1

    def _count_remote(self, request: Request, status: RequestStatus | None) -> None:
        """Update ``num_remote`` for a request whose status changes to ``status``.

        ``status`` is None if the request ends.
        """
        self.num_remote -= request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        self.num_remote += status is RequestStatus.WAITING_FOR_REMOTE_KVS

    # ------------------------------------------------------------------ whose turn it is

    def waiting(self) -> Iterator[Request]:
        """Iterate over the requests in line without blocks, in queue order."""
        return iter(self._waiting)

    def peek_arrived(self) -> Request | None:
        """Return the next request that holds blocks, or None."""
        return self._arrived.peek()

    def pop_arrived(self) -> Request:
        """Remove the request that `peek_arrived` returned."""
        self.num_arrived -= 1
        return self._arrived.pop()

    def pop_last_arrived(self) -> Request:
        """Remove and return the last request that holds blocks; there must be one."""
        self.num_arrived -= 1
        return self._arrived.pop_last()

    def peek(self) -> Request | None:
        """Return the next request that needs blocks, or None."""
        return self._waiting.peek()

    def pop(self) -> Request:
        """Remove the request that `peek` returned."""
        self.num_without_blocks -= 1
        return self._waiting.pop()

    # ------------------------------------------------------------------ checks

    def check(self, requests: Iterable[Request]) -> None:
        """Assert the invariants; for tests and debug runs.

        Args:
            requests: all requests that have not ended.
        """
        in_line, num_remote = [], 0
        for request in requests:
            num_remote += request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
            if request.status in IN_LINE:
                in_line.append(request)
                assert not request.awaits_grammar
                assert not request.awaits_pixels
                assert not request.awaits_prefix
            if request.status is RequestStatus.WAITING_FOR_GRAMMAR:
                assert request.awaits_grammar
        num_arrived = sum(bool(request.block_ids) for request in in_line)
        num_without = len(in_line) - num_arrived
        assert (num_arrived, num_without) == (self.num_arrived, self.num_without_blocks)
        assert num_remote == self.num_remote
