"""WaitingRoom: requests that do not run. In line for a step, or parked and out of everyone's way.

    arrived    in line with blocks: their prompt's KV has come, or a sibling has computed it
    waiting    in line without blocks, in the order of arrival; preempted ones first
    parked     in no line until something else happens, and costs nothing per step:
                 WAITING_FOR_REMOTE_KVS    a remote node writes their prompt's KV
                 WAITING_FOR_SHARED_KVS    a sibling computes their prompt
                 WAITING_FOR_GRAMMAR       their grammar is being compiled

Refuses to know: steps, budgets, blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from engine.core.request import Request, RequestStatus

IN_LINE = (RequestStatus.WAITING, RequestStatus.PREEMPTED)
PARKED = (
    RequestStatus.WAITING_FOR_REMOTE_KVS,
    RequestStatus.WAITING_FOR_SHARED_KVS,
    RequestStatus.WAITING_FOR_GRAMMAR,
)


class WaitingQueue:
    """Requests that wait, in the order of their arrival; preempted ones at the front.

    First come first served: the router knows priorities. An aborted request stays in the queue
    until it comes to the front: nothing is searched for.
    """

    def __init__(self) -> None:
        self._requests: deque[Request] = deque()

    def add(self, request: Request) -> None:
        """Queue a request that has not run yet, at the place of its arrival."""
        # Most are the newest; one that waited for its grammar goes before those that came later.
        index = len(self._requests)
        while index and self._requests[index - 1].rank > request.rank:
            index -= 1
        self._requests.insert(index, request)

    def put_back(self, request: Request) -> None:
        """Queue a request that was preempted; it had its turn before those that wait."""
        self._requests.appendleft(request)

    def peek(self) -> Request | None:
        """The next request, or None."""
        requests = self._requests
        while requests and requests[0].status.is_finished:
            requests.popleft()
        return requests[0] if requests else None

    def pop(self) -> Request:
        """Take the one that `peek` gave."""
        return self._requests.popleft()

    def __iter__(self) -> Iterator[Request]:
        """Iterate over the requests that wait, in their order."""
        return (request for request in self._requests if not request.status.is_finished)


class WaitingRoom:
    """Who may run next.

    A request that ends here stays in its queue until it comes to an end of it, and counts no more.

    Attributes:
        num_arrived: in line with blocks.
        num_waiting: in line without.
    """

    def __init__(self) -> None:
        self.num_arrived = 0
        self.num_waiting = 0
        self._arrived: deque[Request] = deque()
        self._waiting = WaitingQueue()
        self._num_ranks = 0

    def __len__(self) -> int:
        """Requests in line; parked ones are not among them."""
        return self.num_arrived + self.num_waiting

    # ------------------------------------------------------------------ in and out

    def give_rank(self, request: Request) -> None:
        """Say who goes before whom, once and for all: by arrival."""
        request.rank = self._num_ranks
        self._num_ranks += 1

    def park(self, request: Request, status: RequestStatus) -> None:
        """Keep a request out of line."""
        assert status in PARKED
        request.status = status

    def queue(self, request: Request) -> None:
        """Let a request wait for its turn, unless it still waits for its grammar."""
        if request.awaits_grammar:
            self.park(request, RequestStatus.WAITING_FOR_GRAMMAR)
            return
        request.status = RequestStatus.WAITING
        if request.block_ids:
            self._arrived.append(request)
            self.num_arrived += 1
        else:
            self._waiting.add(request)
            self.num_waiting += 1

    def put_back(self, request: Request) -> None:
        """Let a request wait that had its turn and lost its blocks."""
        assert not request.block_ids
        request.status = RequestStatus.PREEMPTED
        self._waiting.put_back(request)
        self.num_waiting += 1

    def leave(self, request: Request) -> None:
        """Count a request no more that is about to end; its status and blocks are still the old."""
        if request.status not in IN_LINE:
            return
        if request.block_ids:
            self.num_arrived -= 1
        else:
            self.num_waiting -= 1

    # ------------------------------------------------------------------ whose turn it is

    def waiting(self) -> Iterator[Request]:
        """Iterate over the requests in line without blocks, in their order."""
        return iter(self._waiting)

    def peek_arrived(self) -> Request | None:
        """The next of those that hold blocks, or None."""
        while self._arrived and self._arrived[0].status.is_finished:
            self._arrived.popleft()
        return self._arrived[0] if self._arrived else None

    def pop_arrived(self) -> Request:
        """Take the one that `peek_arrived` gave."""
        self.num_arrived -= 1
        return self._arrived.popleft()

    def pop_last_arrived(self) -> Request:
        """Take the last of those that hold blocks; there must be one."""
        while self._arrived[-1].status.is_finished:
            self._arrived.pop()
        self.num_arrived -= 1
        return self._arrived.pop()

    def peek(self) -> Request | None:
        """The next of those that need blocks, or None."""
        return self._waiting.peek()

    def pop(self) -> Request:
        """Take the one that `peek` gave."""
        self.num_waiting -= 1
        return self._waiting.pop()

    # ------------------------------------------------------------------ checks

    def check(self, requests: Iterable[Request]) -> None:
        """Assert the invariants; for tests and debug runs.

        Args:
            requests: all that have not ended.
        """
        in_line = []
        for request in requests:
            if request.status in IN_LINE:
                in_line.append(request)
                assert not request.awaits_grammar
            if request.status is RequestStatus.WAITING_FOR_GRAMMAR:
                assert request.awaits_grammar
        num_arrived = sum(bool(request.block_ids) for request in in_line)
        assert (num_arrived, len(in_line) - num_arrived) == (self.num_arrived, self.num_waiting)
