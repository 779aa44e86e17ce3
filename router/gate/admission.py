"""Admission: which requests begin now, which wait, and which are refused at once.

    request -> refused: over a limit, or the answer would come too late
            -> waits while the nodes are full: tenants take turns by their usage, and one tenant's
               requests go by (priority, arrival)
            -> begins

When the nodes are full, requests wait or are refused here, where their order is known, instead of
on a node or in a hand-off. `Capacity` tells how much work the nodes can take, and `FairQueue`
chooses the next request. The routing policy later chooses the request's nodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from baton.access.identity import ANYBODY, Principal
from baton.api.errors import BatonError, DeadlineExceededError, OverloadedError
from router.fleet.node_pool import NodePool
from router.gate.admission_options import AdmissionOptions
from router.gate.capacity import Capacity
from router.gate.fair_queue import FairQueue
from router.gate.rate_limits import Rate, RateLimits
from router.gate.ticket import Ticket

# While requests wait, this many seconds pass between two checks whether the nodes have room.
_PUMP_INTERVAL_S = 0.005
# A request is refused if its expected time, multiplied by this factor, exceeds its deadline.
# Without a margin, half of the requests would finish late.
_MARGIN = 1.15
_RETRY_DELAY_LIMITS_S = (0.1, 60.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionState:
    """The state of the gate as operators see it.

    Attributes:
        expected_wait_s: expected time to first token of a request that arrives now.
        num_refused: number of refused requests since the start, by reason.
    """

    num_queued: int
    num_queued_tokens: int
    num_begun: int
    expected_wait_s: float
    num_refused: dict[str, int]


class Admission:
    """The gate of one base model: lets requests begin when the nodes have room for them.

    Args:
        capacity: estimates the load that the nodes can take.
        options: limits for all requests together.
        rates: limits per minute of each API key.
    """

    def __init__(
        self,
        capacity: Capacity,
        options: AdmissionOptions | None = None,
        rates: RateLimits | None = None,
    ) -> None:
        self.options = options or AdmissionOptions()
        self._capacity = capacity
        self._rates = rates or RateLimits()
        self._queue = FairQueue()
        self._num_begun = 0
        self._arrivals = itertools.count()
        self._of_key: Counter[str] = Counter()
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
        principal: Principal = ANYBODY,
        find_cached_tokens: Callable[[], int] = int,
        needs_decode: bool = True,
    ) -> AsyncIterator[Ticket]:
        """Wait for the request's turn; while the context lasts, the request counts as begun.

        Args:
            request_id: id by which `withdraw` finds the waiting request.
            timeout_s: seconds until the request's deadline.
            priority: order among the tenant's requests; smaller numbers begin first.
            principal: the caller.
            find_cached_tokens: returns how many of the prompt's tokens are cached on some node;
                called only if needed.
            needs_decode: whether a decode node continues after the prefill node.

        Raises:
            OverloadedError: the request is refused; the error says when to retry.
            DeadlineExceededError: the deadline passed during the wait.
        """
        if priority > self._least_urgent:
            raise self._refusal("overload", "the router is overloaded: urgent requests only")
        now = asyncio.get_running_loop().time()
        self.check_key(principal)
        self._check_open()
        num_kv_tokens = num_prompt_tokens
        if needs_decode:
            num_kv_tokens = self._capacity.kv_tokens(num_prompt_tokens, max_tokens)
        # The cost only decides between tenants. Without tenants, nobody needs to know which tokens
        # are cached.
        num_cached_tokens = find_cached_tokens() if principal.tenant else 0
        ticket = Ticket(
            request_id=request_id,
            tenant=principal.tenant,
            weight=principal.limits.weight,
            order=(priority, next(self._arrivals)),
            num_prompt_tokens=num_prompt_tokens,
            num_kv_tokens=num_kv_tokens,
            num_uncached_tokens=max(num_prompt_tokens - num_cached_tokens, 1),
            needs_decode=needs_decode,
            arrived_at=now,
            expires_at=now + timeout_s,
        )
        self._check_rates(principal, ticket.num_tokens)
        self._queue.give_place(ticket)
        begins = self._queue.is_next(ticket) and self._has_room(ticket)
        if not begins:
            self._check_times(ticket, max_tokens, timeout_s)
            self._check_queue(ticket)
        self._of_key[principal.name] += 1
        self._rates.charge_limits(principal, ticket.num_tokens)
        try:
            if begins:
                self._queue.charge(ticket)
            else:
                await self._wait(ticket, max_tokens)
            ticket.began_at = asyncio.get_running_loop().time()
            self._num_begun += 1
            yield ticket
        finally:
            self._leave(ticket, principal)

    def _leave(self, ticket: Ticket, principal: Principal) -> None:
        begun = ticket.began_at is not None
        if not begun:
            ticket.num_tokens_used = 0
        self._num_begun -= begun
        if ticket.is_charged:
            self._queue.settle(ticket)
        used = ticket.num_tokens if ticket.num_tokens_used is None else ticket.num_tokens_used
        self._rates.give_back(principal, ticket.num_tokens - used, begun=begun)
        self._of_key[principal.name] -= 1
        if not self._of_key[principal.name]:
            del self._of_key[principal.name]

    def withdraw(self, request_id: str, error: BatonError) -> bool:
        """End a waiting request with an error; return whether the request waited."""
        for ticket in self._queue.tickets():
            if ticket.request_id == request_id:
                self._turn_away(ticket, error)
                return True
        return False

    def shed(self, least_urgent: float) -> None:
        """Refuse requests whose priority number is larger than this from now on.

        Infinity: refuse none.
        """
        self._least_urgent = least_urgent

    def note_first_token(self, ticket: Ticket) -> None:
        """Note a request's first token; call it once per request.

        The request's actual wait improves the estimates of later waits.
        """
        now = asyncio.get_running_loop().time()
        self._capacity.note_wait(ticket.expected_wait_s / ticket.bias, now - ticket.arrived_at)
        self._queue.note_first_token(ticket)

    def check_key(self, principal: Principal) -> None:
        """Raise OverloadedError if the caller's limits allow no request now.

        Counts no request.
        """
        limit = principal.limits.max_open_requests or self.options.max_open_requests_per_client
        num_open = self._of_key[principal.name]
        if principal.name and limit and num_open >= limit:
            raise self._refusal("client", f"{num_open} requests of this client are open, the limit")
        self._check_rates(principal, 1)

    def charge(self, principal: Principal) -> None:
        """Count a request that needs no node, such as tokenization, as one token.

        Raises OverloadedError if the caller's limits allow no request now.
        """
        self._check_rates(principal, 1)
        self._rates.charge_limits(principal, 1)

    def charge_hint(self, principal: Principal) -> None:
        """Count a hint about a session like `charge`, and against the limit of hints."""
        self._check_rates(principal, 1)
        if self.options.max_hints_per_minute:
            try:
                self._rates.charge_hint(principal, self.options.max_hints_per_minute)
            except OverloadedError:
                self._refused["rate"] += 1
                raise
        self._rates.charge_limits(principal, 1)

    def charge_tokens(self, principal: Principal, num_tokens: int) -> None:
        """Count further tokens of a request, once they are known, against its caller's limits."""
        self._rates.give_back(principal, -num_tokens, begun=True)

    def rates_of(self, principal: Principal) -> dict[str, Rate]:
        """Return what is left of each limit of a caller; empty if the caller has no limits."""
        return self._rates.state(principal)

    @property
    def num_queued(self) -> int:
        """Number of requests that wait."""
        return self._queue.num_requests

    def state(self) -> AdmissionState:
        return AdmissionState(
            num_queued=self._queue.num_requests,
            num_queued_tokens=self._queue.num_prompt_tokens,
            num_begun=self._num_begun,
            expected_wait_s=self._wait_s(),
            num_refused=dict(self._refused),
        )

    # ------------------------------------------------------------------ refusing

    def _check_open(self) -> None:
        options, num_open = self.options, self._queue.num_requests + self._num_begun
        if options.max_open_requests and num_open >= options.max_open_requests:
            raise self._refusal("open_requests", f"{num_open} requests are open, the limit")

    def _check_rates(self, principal: Principal, num_tokens: int) -> None:
        try:
            self._rates.check(principal, num_tokens)
        except OverloadedError:
            self._refused["rate"] += 1
            raise

    def _check_times(self, ticket: Ticket, max_tokens: int, timeout_s: float) -> None:
        """Refuse a request that would be late; called only if the request must wait first."""
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
        """If the queue is full, refuse one request: the new one, or a waiting one in its place.

        `FairQueue.last` chooses the refused request.
        """
        limit = self.options.max_queued_requests
        if not limit or self._queue.num_requests < limit:
            return
        problem = f"{self._queue.num_requests} requests wait, the limit"
        last = self._queue.last(ticket)
        if last is ticket:
            raise self._refusal("queue", problem)
        why = "more urgent ones came" if last.tenant == ticket.tenant else "others waited for less"
        self._turn_away(last, self._refusal("queue", f"{problem}; {why}"))

    def _refusal(self, reason: str, problem: str) -> OverloadedError:
        self._refused[reason] += 1
        least_s, most_s = _RETRY_DELAY_LIMITS_S
        error = OverloadedError(problem)
        error.retry_delay_s = min(max(self._wait_s(), least_s), most_s)
        return error

    def _wait_s(self) -> float:
        """Return the expected seconds until all waiting requests have their first tokens."""
        queue = self._queue
        return self._capacity.wait_s(
            queue.num_requests,
            queue.num_prompt_tokens,
            queue.num_kv_tokens,
            num_prompt_pairs=queue.num_prompt_pairs,
        )

    def _wait_ahead_s(self, ticket: Ticket) -> float:
        """Return the expected seconds until a request that must wait has its first token."""
        ahead = self._queue.ahead_of(ticket)
        return self._capacity.wait_s(
            ahead.num_requests,
            ahead.num_prompt_tokens,
            ahead.num_kv_tokens + ticket.num_kv_tokens,
            num_prompt_pairs=ahead.num_prompt_pairs,
            last=ticket.num_prompt_tokens,
        )

    # ------------------------------------------------------------------ waiting

    async def _wait(self, ticket: Ticket, max_tokens: int) -> None:
        turn = ticket.turn = asyncio.get_running_loop().create_future()
        self._queue.push(ticket)
        if self._pump is None:
            self._pump = asyncio.create_task(self._begin_all())
        # A request waits only as long as it could still finish in time.
        needed_s = self._capacity.prefill_s(ticket.num_prompt_tokens)
        needed_s += self._capacity.decode_s(max_tokens)
        begin_by = ticket.expires_at - needed_s
        try:
            async with asyncio.timeout_at(max(begin_by, ticket.arrived_at)):
                await turn
        except TimeoutError:
            raise DeadlineExceededError(
                "the request waited for its turn until its deadline could not be kept"
            ) from None
        finally:
            self._queue.remove(ticket)
        if ticket.refusal is not None:
            raise ticket.refusal

    def _turn_away(self, ticket: Ticket, error: BatonError) -> None:
        """End a waiting request with an error."""
        turn, ticket.refusal = ticket.turn, error
        self._queue.remove(ticket)
        if turn is not None and not turn.done():
            turn.set_result(None)

    async def _begin_all(self) -> None:
        """Let waiting requests begin, one after another, whenever the nodes have room."""
        try:
            while self._queue.num_requests:  # noqa: ASYNC110  # nodes do not announce room
                # Only one request begins per round, because the nodes' loads must include it before
                # the next request is judged.
                await asyncio.sleep(0 if self._begin_next() else _PUMP_INTERVAL_S)
        finally:
            self._pump = None

    def _begin_next(self) -> bool:
        ticket = self._queue.head()
        if ticket is None or ticket.turn is None or not self._has_room(ticket):
            return False
        turn = ticket.turn
        self._queue.charge(ticket)
        if not turn.done():
            turn.set_result(None)
        return True

    def _has_room(self, ticket: Ticket) -> bool:
        num_output_tokens = ticket.num_kv_tokens - ticket.num_prompt_tokens
        ticket.leaves_room = self._queue.leaves_room(ticket, asyncio.get_running_loop().time())
        if not ticket.needs_decode:
            return self._capacity.has_time(shares=ticket.leaves_room)
        return self._capacity.has_room(
            ticket.num_prompt_tokens, num_output_tokens, shares=ticket.leaves_room
        )


def make_admission(
    pool: NodePool, options: AdmissionOptions | None = None, rates: RateLimits | None = None
) -> Admission:
    """Make the gate of a pool's nodes; options that are not given have their defaults."""
    options = options or AdmissionOptions()
    capacity = Capacity(
        lambda: pool.fleet,
        options.prefill_window_s,
        prompt_fleet=lambda: pool.prompt_fleet,
        shared_prefill_window_s=options.shared_prefill_window_s,
        clock=pool.clock,
        awaits_newcomers=lambda: pool.lost_nodes.expects_newcomers,
    )
    return Admission(capacity, options, rates)
