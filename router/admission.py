"""Admission: which requests begin now, which wait, and which are refused at once.

    request -> refused (a limit, or it would come too late)
            -> waits, by (priority, arrival), while the nodes have all that they can take
            -> begins

So overload waits or is refused here, in one place that knows the order, and never inside a node or
a hand-off. How much the nodes can take is `Capacity`'s; which of them takes what, the policy's.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import math
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass

from baton.errors import BatonError, ConfigError, DeadlineExceededError, OverloadedError
from router.capacity import PREFILL_WINDOW_S, Capacity

# How soon it is seen that nodes have room again while requests wait.
_PUMP_INTERVAL_S = 0.005
_MAX_GONE = 64  # tickets that are in the heap and out of the queue, and as many as wait
# What is expected just in time comes too late as often as not.
_MARGIN = 1.15
_RETRY_DELAY_LIMITS_S = (0.1, 60.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionOptions:
    """Limits of a router; 0 is no limit.

    Attributes:
        max_queued_requests: that wait; then the least urgent one is refused.
        max_open_requests: that wait or are in progress.
        max_open_requests_per_client: the same, of one client.
        max_ttft_s: a request whose first token is expected later is refused.
        prefill_window_s: seconds of work that each prefill node may have before it. More hides
            longer pauses of the router; less leaves more to the order of the queue.
    """

    max_queued_requests: int = 4096
    max_open_requests: int = 0
    max_open_requests_per_client: int = 0
    max_ttft_s: float = 0.0
    prefill_window_s: float = PREFILL_WINDOW_S

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name}: must be 0 or more, got {getattr(self, name):g}")


@dataclass(slots=True, eq=False, kw_only=True)
class Ticket:
    """One request's way through admission. Its `Admission` writes, all others read.

    Attributes:
        request_id: of the request.
        order: priority, smaller first, and arrival.
        num_prompt_tokens: of the request.
        num_kv_tokens: that it will come to hold, as far as one can tell.
        expires_at: the request's deadline, by the loop's clock.
        began_at: None while it waits.
        expected_wait_s: until its first token, when it came; 0 of one that begins at once.
        bias: that this was corrected by.
        turn: done when the wait is over; None when there is none.
        refusal: why it was taken out of the queue.
    """

    request_id: str
    order: tuple[int, int]
    num_prompt_tokens: int
    num_kv_tokens: int
    arrived_at: float
    expires_at: float
    expected_wait_s: float = 0.0
    bias: float = 1.0
    began_at: float | None = None
    turn: asyncio.Future[None] | None = None
    refusal: BatonError | None = None

    def __lt__(self, other: Ticket) -> bool:
        return self.order < other.order

    @property
    def waited_s(self) -> float:
        return 0.0 if self.began_at is None else self.began_at - self.arrived_at


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionState:
    """What operators see.

    Attributes:
        expected_wait_s: of a request that comes now.
        num_refused: since the start, by reason.
    """

    num_queued: int
    num_queued_tokens: int
    num_begun: int
    expected_wait_s: float
    num_refused: dict[str, int]


class Admission:
    """The gate of one router, on its event loop.

    Args:
        capacity: of the nodes.
        options: limits.
    """

    def __init__(self, capacity: Capacity, options: AdmissionOptions | None = None) -> None:
        self.options = options or AdmissionOptions()
        self._capacity = capacity
        self._queue: list[Ticket] = []  # a heap; those without a turn are gone
        self._num_queued = 0
        self._num_queued_tokens = 0
        self._num_queued_kv_tokens = 0
        self._num_begun = 0
        self._arrivals = itertools.count()
        self._of_client: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._pump: asyncio.Task[None] | None = None
        self._least_urgent = math.inf

    @contextlib.asynccontextmanager
    async def enter(
        self,
        *,
        request_id: str = "",
        num_prompt_tokens: int,
        max_tokens: int,
        timeout_s: float,
        priority: int = 0,
        client: str = "",
    ) -> AsyncIterator[Ticket]:
        """Wait for the request's turn; leaving the context ends its account.

        Args:
            request_id: by which `withdraw` finds it.
            timeout_s: until the request's deadline.
            priority: smaller begins first.
            client: whose request it is; empty: nobody's in particular.

        Raises:
            OverloadedError: it is refused; says when to come again.
            DeadlineExceededError: its deadline passed while it waited.
        """
        if priority > self._least_urgent:
            raise self._refusal("overload", "the router is overloaded and takes urgent ones only")
        now = asyncio.get_running_loop().time()
        ticket = Ticket(
            request_id=request_id,
            order=(priority, next(self._arrivals)),
            num_prompt_tokens=num_prompt_tokens,
            num_kv_tokens=self._capacity.kv_tokens(num_prompt_tokens, max_tokens),
            arrived_at=now,
            expires_at=now + timeout_s,
        )
        self._check_counts(client)
        has_room = not self._num_queued and self._capacity.has_room(num_prompt_tokens, max_tokens)
        if not has_room:
            self._check_times(ticket, max_tokens, timeout_s)
            self._check_queue(ticket)
        self._of_client[client] += 1
        try:
            if not has_room:
                await self._wait(ticket, max_tokens)
            ticket.began_at = asyncio.get_running_loop().time()
            self._num_begun += 1
            yield ticket
        finally:
            self._num_begun -= ticket.began_at is not None
            self._of_client[client] -= 1
            if not self._of_client[client]:
                del self._of_client[client]

    def withdraw(self, request_id: str, error: BatonError) -> bool:
        """End the wait of a request with an error; returns whether it waited."""
        for ticket in self._queue:
            if ticket.request_id == request_id and ticket.turn is not None:
                ticket.refusal = error
                self._unqueue(ticket)
                return True
        return False

    def shed(self, least_urgent: float) -> None:
        """From now on refuse what comes with a larger priority than this; infinity: nothing."""
        self._least_urgent = least_urgent

    def note_first_token(self, ticket: Ticket) -> None:
        """It came; to be called once, so that the next ones are expected better."""
        now = asyncio.get_running_loop().time()
        self._capacity.note_wait(ticket.expected_wait_s / ticket.bias, now - ticket.arrived_at)

    @property
    def num_queued(self) -> int:
        """Requests that wait."""
        return self._num_queued

    def state(self) -> AdmissionState:
        return AdmissionState(
            num_queued=self._num_queued,
            num_queued_tokens=self._num_queued_tokens,
            num_begun=self._num_begun,
            expected_wait_s=self._wait_s(0, 0, 0),
            num_refused=dict(self._refused),
        )

    # ------------------------------------------------------------------ refusing

    def _check_counts(self, client: str) -> None:
        options, num_open = self.options, self._num_queued + self._num_begun
        if options.max_open_requests and num_open >= options.max_open_requests:
            raise self._refusal("open_requests", f"{num_open} requests are open, the limit")
        limit, of_client = options.max_open_requests_per_client, self._of_client[client]
        if client and limit and of_client >= limit:
            raise self._refusal(
                "client", f"{of_client} requests of this client are open, the limit"
            )

    def _check_times(self, ticket: Ticket, max_tokens: int, timeout_s: float) -> None:
        """Refuse what would come too late; asked only of what has to wait."""
        ticket.expected_wait_s, ticket.bias = self._wait_ahead_s(ticket), self._capacity.bias
        limit_s = self.options.max_ttft_s
        if limit_s and ticket.expected_wait_s > limit_s:
            raise self._refusal(
                "ttft",
                f"the first token would come in {ticket.expected_wait_s:.1f} s, "
                f"the limit is {limit_s:g} s",
            )
        needed_s = ticket.expected_wait_s + self._capacity.decode_s(max_tokens)
        if needed_s * _MARGIN > timeout_s:
            raise self._refusal(
                "deadline",
                f"the answer would take {needed_s:.1f} s, its deadline is in {timeout_s:.1f} s",
            )

    def _check_queue(self, ticket: Ticket) -> None:
        """When the queue is full, refuse the least urgent one: one that waits, or this one."""
        if not self.options.max_queued_requests:
            return
        if self._num_queued < self.options.max_queued_requests:
            return
        problem = f"{self._num_queued} requests wait, the limit"
        last = max((other for other in self._queue if other.turn is not None), default=ticket)
        if not ticket < last:
            raise self._refusal("queue", problem)
        last.refusal = self._refusal("queue", f"{problem}; more urgent ones came")
        self._unqueue(last)

    def _refusal(self, reason: str, problem: str) -> OverloadedError:
        self._refused[reason] += 1
        least_s, most_s = _RETRY_DELAY_LIMITS_S
        delay_s = min(max(self._wait_s(0, 0, 0), least_s), most_s)
        error = OverloadedError(problem)
        error.retry_delay_s = delay_s
        return error

    def _wait_s(
        self, num_requests: int, num_prompt_tokens: int, num_kv_tokens: int, *, last: int = 0
    ) -> float:
        """Until all that wait, and this much more or less, have their first tokens."""
        return self._capacity.wait_s(
            self._num_queued + num_requests,
            self._num_queued_tokens + num_prompt_tokens,
            self._num_queued_kv_tokens + num_kv_tokens,
            last=last,
        )

    def _wait_ahead_s(self, ticket: Ticket) -> float:
        """Until its first token; those that wait and are less urgent come behind it."""
        behind: list[Ticket] = []
        if self._num_queued and ticket.order[0] < max(other.order[0] for other in self._queue):
            behind = [o for o in self._queue if o.turn is not None and ticket < o]
        return self._wait_s(
            -len(behind),
            -sum(other.num_prompt_tokens for other in behind),
            ticket.num_kv_tokens - sum(other.num_kv_tokens for other in behind),
            last=ticket.num_prompt_tokens,
        )

    # ------------------------------------------------------------------ waiting

    async def _wait(self, ticket: Ticket, max_tokens: int) -> None:
        loop = asyncio.get_running_loop()
        ticket.turn = loop.create_future()
        heapq.heappush(self._queue, ticket)
        self._num_queued += 1
        self._num_queued_tokens += ticket.num_prompt_tokens
        self._num_queued_kv_tokens += ticket.num_kv_tokens
        if self._pump is None:
            self._pump = asyncio.create_task(self._begin_all())
        # What cannot be done any more is not begun.
        needed_s = self._capacity.prefill_s(ticket.num_prompt_tokens)
        needed_s += self._capacity.decode_s(max_tokens)
        begin_by = ticket.expires_at - needed_s
        try:
            async with asyncio.timeout_at(max(begin_by, ticket.arrived_at)):
                await ticket.turn
        except TimeoutError:
            raise DeadlineExceededError(
                "the request waited for its turn until its deadline could not be kept"
            ) from None
        finally:
            self._unqueue(ticket)
        if ticket.refusal is not None:
            raise ticket.refusal

    def _unqueue(self, ticket: Ticket) -> None:
        """Take a ticket out of the queue's account; harmless when it is out."""
        turn, ticket.turn = ticket.turn, None
        if turn is None:
            return
        self._num_queued -= 1
        self._num_queued_tokens -= ticket.num_prompt_tokens
        self._num_queued_kv_tokens -= ticket.num_kv_tokens
        if not turn.done():
            turn.set_result(None)
        if len(self._queue) > 2 * self._num_queued + _MAX_GONE:
            self._queue = [other for other in self._queue if other.turn is not None]
            heapq.heapify(self._queue)

    async def _begin_all(self) -> None:
        """Begin what there is room for, most urgent first, as long as anything waits."""
        try:
            while self._num_queued:  # noqa: ASYNC110  # nodes tell nobody that they have room
                # One at a time: it is in the nodes' ledgers before the next one is looked at.
                await asyncio.sleep(0 if self._begin_next() else _PUMP_INTERVAL_S)
        finally:
            self._pump = None
            self._queue.clear()

    def _begin_next(self) -> bool:
        while self._queue and self._queue[0].turn is None:
            heapq.heappop(self._queue)
        if not self._queue:
            return False
        ticket = self._queue[0]
        num_output_tokens = ticket.num_kv_tokens - ticket.num_prompt_tokens
        if not self._capacity.has_room(ticket.num_prompt_tokens, num_output_tokens):
            return False
        heapq.heappop(self._queue)
        self._unqueue(ticket)
        return True
