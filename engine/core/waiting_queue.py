"""WaitingQueue: who is admitted next. First come first served; the router knows priorities.

An aborted request stays in the queue until it comes to the front: nothing is searched for.
"""

from __future__ import annotations

from collections import deque

from engine.core.request import Request


class WaitingQueue:
    """Requests that wait, in the order of their arrival; preempted ones at the front."""

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
