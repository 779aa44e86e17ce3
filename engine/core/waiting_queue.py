"""Waiting queues: who is admitted next. First come first served, or by priority.

An aborted request stays in its queue until it comes to the front: nothing is searched for.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from typing import Protocol

from baton.api.errors import ConfigError
from engine.core.request import Request


class WaitingQueue(Protocol):
    """Requests that wait, the next one first."""

    def add(self, request: Request) -> None:
        """Queue a request that has not run yet, at the place of its arrival."""

    def put_back(self, request: Request) -> None:
        """Queue a request that was preempted; it had its turn before those that wait."""

    def peek(self) -> Request | None:
        """The next request, or None."""

    def pop(self) -> Request:
        """Take the next request."""


class FcfsQueue:
    """First come first served; preempted ones at the front."""

    def __init__(self) -> None:
        self._requests: deque[Request] = deque()

    def add(self, request: Request) -> None:
        # Most are the newest; one that waited for its grammar goes before those that came later.
        index = len(self._requests)
        while index and self._requests[index - 1].rank[1] > request.rank[1]:
            index -= 1
        self._requests.insert(index, request)

    def put_back(self, request: Request) -> None:
        self._requests.appendleft(request)

    def peek(self) -> Request | None:
        requests = self._requests
        while requests and requests[0].status.is_finished:
            requests.popleft()
        return requests[0] if requests else None

    def pop(self) -> Request:
        return self._requests.popleft()


class PriorityQueue:
    """By (priority, arrival): the smallest first. A preempted one keeps its arrival."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], int, Request]] = []
        self._counter = itertools.count()

    def add(self, request: Request) -> None:
        heapq.heappush(self._heap, (request.rank, next(self._counter), request))

    def put_back(self, request: Request) -> None:
        self.add(request)

    def peek(self) -> Request | None:
        while self._heap and self._heap[0][2].status.is_finished:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def pop(self) -> Request:
        return heapq.heappop(self._heap)[2]


WAITING_QUEUES: dict[str, Callable[[], WaitingQueue]] = {
    "fcfs": FcfsQueue,
    "priority": PriorityQueue,
}


def make_waiting_queue(policy: str) -> WaitingQueue:
    """The queue of a scheduling policy; raises ConfigError for an unknown name."""
    if policy not in WAITING_QUEUES:
        known = ", ".join(WAITING_QUEUES)
        raise ConfigError(f"scheduling_policy: must be one of {known}, got {policy!r}")
    return WAITING_QUEUES[policy]()
