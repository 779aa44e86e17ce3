"""WaitingRoom: requests that are not running: in line for a step, or parked.

    arrived    in line with blocks: the prompt's KV has arrived, or a sibling has computed it
    waiting    in line without blocks, in order of arrival; preempted ones first
               (by priority: all lines are in order of rank)
    pooled     in line without blocks, to be pooled; they let requests that sample go first, as far
               as `POOLED_PART` allows
    parked     not in line until an event; parked requests do not add any work per step:
                 WAITING_FOR_REMOTE_KVS    a remote node writes their prompt's KV
                 WAITING_FOR_SHARED_KVS    a sibling computes their prompt
                 WAITING_FOR_GRAMMAR       their grammar is being compiled
                 WAITING_FOR_PIXELS        their images are being decoded
                 WAITING_FOR_PREFIX        another node sends a cached part of their prompt's KV

PooledShare limits the tokens that pooled requests compute in a step.

Refuses to know: blocks.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain

from engine.core.drafts import ALL
from engine.core.request import Request, RequestStatus
from engine.core.steps_in_flight import is_decoding

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


# While requests that sample wait, too, one of this many prompt tokens belongs to pooled requests.
POOLED_PART = 8
# Steps of pooled requests stay short for this many steps after a prompt competed with them: the
# next prompt probably comes soon, and must wait until the step in progress has ended.
SHORT_STEPS = 64

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
        self._pooled = RankedQueue() if by_priority else WaitingQueue()
        self._num_passed_tokens = 0  # prompt tokens that went before the next pooled request
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
            self._line_of(request).add_new(request)
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
        self._line_of(request).put_back(request)
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
            self._line_of(request).leave(request)
            self.num_without_blocks -= 1

    def _line_of(self, request: Request) -> WaitingQueue:
        """Return the line in which a request without blocks waits."""
        return self._waiting if request.pooling is None else self._pooled

    def _count_remote(self, request: Request, status: RequestStatus | None) -> None:
        """Update ``num_remote`` for a request whose status changes to ``status``.

        ``status`` is None if the request ends.
        """
        self.num_remote -= request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        self.num_remote += status is RequestStatus.WAITING_FOR_REMOTE_KVS

    # ------------------------------------------------------------------ whose turn it is

    def waiting_before(self, request: Request) -> Iterator[Request]:
        """Iterate over the requests in line without blocks that need theirs before ``request``.

        By priority, requests of worse rank do not; otherwise, all requests in line do.
        """
        for waiting in chain(self._waiting, self._pooled):
            if not self._by_priority or waiting.rank < request.rank:
                yield waiting

    @property
    def has_prompt(self) -> bool:
        """Return whether a request that samples waits for blocks."""
        return self._waiting.peek() is not None

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

    def peek(self, *, with_pooled: bool = True) -> Request | None:
        """Return the next request that needs blocks, or None.

        A pooled request lets requests of its priority that sample go first, until their prompts
        have `POOLED_PART` - 1 times as many tokens as the pooled request.

        Args:
            with_pooled: whether the next request may be a pooled one.
        """
        request, pooled = self._waiting.peek(), self._pooled.peek() if with_pooled else None
        if request is None or pooled is None:
            return request or pooled
        if self._by_priority and request.priority != pooled.priority:
            return min(request, pooled, key=lambda one: one.priority)
        return pooled if self._num_passed_tokens >= _num_to_pass(pooled) else request

    def pop(self, request: Request) -> None:
        """Remove the request that `peek` returned."""
        self.num_without_blocks -= 1
        self._line_of(request).pop()
        if request.pooling is not None:
            self._num_passed_tokens -= min(self._num_passed_tokens, _num_to_pass(request))
        elif self._pooled.peek() is not None:
            self._num_passed_tokens += request.num_tokens
        else:
            self._num_passed_tokens = 0

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


def _num_to_pass(pooled: Request) -> int:
    """Return how many prompt tokens of other requests go before a pooled request."""
    return (POOLED_PART - 1) * pooled.num_tokens


class PooledShare:
    """Limits the tokens that pooled requests compute in a step.

    While a request that samples has prompt tokens to compute, pooled requests compute one of
    `POOLED_PART` prompt tokens; in the first of such steps they compute one token, because most
    prompts need a single step. For some steps afterwards, steps have at most this part of the usual
    number of tokens, so that the next prompt soon starts.

    Args:
        room: holds the waiting requests.
        max_num_tokens: maximum number of tokens in a step.

    Attributes:
        num_open: number of open pooled requests; the scheduler counts them.
        num_left: number of tokens of pooled requests that the next step may still compute.
    """

    def __init__(self, room: WaitingRoom, max_num_tokens: int) -> None:
        self.num_open = 0
        self.num_left = ALL
        self._room = room
        self._max_num_tokens = max_num_tokens
        self._num_short_steps = 0
        self._competed = False  # whether a prompt competed with pooled requests in the last step

    def plan_step(self, running: Iterable[Request], num_prompt_tokens: int) -> None:
        """Set ``num_left`` for a step that may compute ``num_prompt_tokens`` prompt tokens."""
        self.num_left = ALL
        if not self.num_open:
            return
        competed, self._competed = self._competed, False
        if self._room.has_prompt or any(map(_is_in_prompt, running)):
            self._num_short_steps, self._competed = SHORT_STEPS, True
            # One token, and not none: the prompt may wait for blocks of running pooled requests
            num_shared = min(num_prompt_tokens, self._max_num_tokens)
            self.num_left = _part_of(num_shared) if competed else 1
        elif self._num_short_steps:
            self._num_short_steps -= 1
            self.num_left = _part_of(self._max_num_tokens)


def _part_of(num_tokens: int) -> int:
    return max(num_tokens // POOLED_PART, 1)


def _is_in_prompt(request: Request) -> bool:
    """Return whether a running request that samples has prompt tokens to compute."""
    return request.pooling is None and not is_decoding(request)
