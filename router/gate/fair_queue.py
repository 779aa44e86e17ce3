"""FairQueue: picks the next request when several tenants wait.

    virtual time: 40
    tenant a  [ 9 5 5 0 ]   start 52     its requests by priority, then by arrival
    tenant b  [ 3 ]         start 40     <- next: it used least, relative to its weight

Start-time fair queueing (Goyal, Vin and Cheng, 1996). When a request begins, its tenant's start
rises by the request's cost in tokens divided by the tenant's weight; the tenant with the smallest
start is next. Virtual time is the start of the request that began last. So waiting tenants get
tokens in proportion to their weights, and a lone tenant gets all tokens. A tenant that returns
starts at the current virtual time, so it cannot save up. The cost is corrected when the request
ends. Requests with negative priority begin before other tenants' requests, and are charged, too.

Pooled requests of a tenant hardly delay the tenant's other requests, by the same method: of the
prompt tokens that begin while both kinds wait, one in `POOLED_PART` belongs to pooled requests.

Each request is pushed, begun and ended once.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from router.gate.ticket import Ticket, charge_of

# Other tenants leave no room for a tenant that sent no request for this many seconds.
ACTIVE_S = 60.0
# As in the scheduler of a prefill node
POOLED_PART = 8
_MAX_STALE = 64  # a heap with more entries than twice its live entries plus this is rebuilt


class Waiting(NamedTuple):
    """Sums over waiting requests; a request may count in part, so the number may be a fraction."""

    num_requests: float = 0
    num_prompt_tokens: float = 0
    num_kv_tokens: float = 0
    num_prompt_pairs: float = 0


@dataclass(slots=True, eq=False)
class _Flow:
    """The queue of one tenant.

    Attributes:
        start: virtual time at which the tenant's next request begins.
        heads: heap of waiting requests, the first one to begin on top; entries whose ``turn`` is
            None are stale.
        tails: heap of the same requests, the last one to begin on top.
        places: place of the request that began last, by the sign of the priority; never falls.
        ends: smallest place of the next request, by the sign of the priority and `needs_decode`.
        charge: sum of the waiting requests' charges.
        outstanding: sum of the charges of begun requests without a first token.
        num_open: number of requests that wait, or have begun and not ended.
        entry: sort key among the tenants; None while no request waits.
        seen_at: time of the tenant's last request.
    """

    tenant: str
    start: int
    seen_at: float
    heads: list[Ticket] = field(default_factory=list)
    tails: list[tuple[int, int, int, Ticket]] = field(default_factory=list)
    places: Counter[int] = field(default_factory=Counter)
    ends: Counter[tuple[int, bool]] = field(default_factory=Counter)
    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_kv_tokens: int = 0
    num_prompt_pairs: int = 0
    charge: int = 0
    outstanding: int = 0
    num_open: int = 0
    entry: tuple[int, int, int] | None = None

    @property
    def end_time(self) -> int:
        """Virtual time at which all of the tenant's waiting requests have begun."""
        return self.start + self.charge

    @property
    def is_active(self) -> bool:
        return self.num_requests > 0 or self.outstanding > 0

    def head(self) -> Ticket | None:
        while self.heads and self.heads[0].turn is None:
            heapq.heappop(self.heads)
        return self.heads[0] if self.heads else None

    def tail(self) -> Ticket | None:
        while self.tails and self.tails[0][-1].turn is None:
            heapq.heappop(self.tails)
        return self.tails[0][-1] if self.tails else None


class FairQueue:
    """The waiting requests of one base model, by tenant.

    Attributes:
        num_requests, num_prompt_tokens, num_kv_tokens, num_prompt_pairs: sums over all waiting
            requests.
        virtual_time: start of the request that began last; never falls.
    """

    def __init__(self) -> None:
        self.num_requests = self.num_prompt_tokens = self.num_kv_tokens = 0
        self.num_prompt_pairs = 0
        self.virtual_time = 0
        # Queue of each tenant; the tenant whose last request is oldest comes first.
        self._flows: OrderedDict[str, _Flow] = OrderedDict()
        # Heap of (sort key, tenant); a tuple whose key is not the tenant's current one is stale.
        self._order: list[tuple[tuple[int, int, int], str]] = []
        self._outstanding = 0
        self._num_active = 0

    def tickets(self) -> Iterator[Ticket]:
        """Yield all waiting requests, in any order."""
        for flow in self._flows.values():
            yield from (ticket for ticket in flow.heads if ticket.turn is not None)

    # ------------------------------------------------------------------ one request

    def give_place(self, ticket: Ticket) -> None:
        """Give a new request its place among its tenant's; call before other methods."""
        flow = self._flows.get(ticket.tenant)
        if flow is not None:
            sign = ticket.sign
            ticket.place = max(flow.places[sign], flow.ends[sign, ticket.needs_decode])

    def push(self, ticket: Ticket) -> None:
        """Add a waiting request, whose ``turn`` must be set. Takes O(log n)."""
        flow = self._seen(ticket)
        was_active = flow.is_active
        flow.start = self._start_of(flow)
        flow.num_open += 1
        heapq.heappush(flow.heads, ticket)
        priority, place, arrival = ticket.key
        heapq.heappush(flow.tails, (-priority, -place, -arrival, ticket))
        self._count(flow, ticket, 1)
        self._num_active += flow.is_active - was_active
        self._reorder(flow)

    def head(self) -> Ticket | None:
        """Return the waiting request that begins next, or None. Takes O(log n) on average."""
        while self._order:
            entry, tenant = self._order[0]
            flow = self._flows.get(tenant)
            if flow is not None and flow.entry == entry:
                return flow.head()
            heapq.heappop(self._order)
        return None

    def is_next(self, newcomer: Ticket) -> bool:
        """Return whether a new request would begin before all waiting requests."""
        head = self.head()
        if head is None:
            return True
        own = self._flows.get(newcomer.tenant)
        own_head = own.head() if own is not None else None
        if own_head is not None and own_head < newcomer:
            return False
        entry = self._flows[head.tenant].entry
        assert entry is not None
        return (min(newcomer.order[0], 0), self._start_of(own), newcomer.order[1]) < entry

    def charge(self, ticket: Ticket) -> None:
        """Charge a request to its tenant, because it begins now, after a wait or at once."""
        flow = self._flows[ticket.tenant] if ticket.turn is not None else self._seen(ticket)
        was_active = flow.is_active
        if ticket.turn is None:
            flow.num_open += 1
            flow.start = self._start_of(flow)
        # An urgent request begins out of turn, so it must not advance the virtual time of other
        # tenants.
        is_alone = not self.num_requests or self.num_requests == flow.num_requests
        if is_alone or not ticket.is_urgent:
            self.virtual_time = max(self.virtual_time, flow.start)
        if ticket.turn is not None:
            ticket.turn = None
            self._count(flow, ticket, -1)
        ticket.is_charged = True
        flow.places[ticket.sign] = max(flow.places[ticket.sign], ticket.place)
        flow.start += ticket.charge
        flow.outstanding += ticket.charge
        self._outstanding += ticket.charge
        self._num_active += flow.is_active - was_active
        self._reorder(flow)

    def note_first_token(self, ticket: Ticket) -> None:
        """Note that a begun request needs no prefill node any more; safe to repeat."""
        if not ticket.has_first_token:
            ticket.has_first_token = True
            flow = self._flows[ticket.tenant]
            was_active = flow.is_active
            flow.outstanding -= ticket.charge
            self._outstanding -= ticket.charge
            self._num_active += flow.is_active - was_active

    def settle(self, ticket: Ticket) -> None:
        """End a begun request, and correct its tenant's charge by the actual cost."""
        self.note_first_token(ticket)
        flow = self._flows[ticket.tenant]
        flow.num_open -= 1
        if ticket.num_tokens_used is not None:
            flow.start += charge_of(ticket.num_tokens_used, ticket.weight) - ticket.charge
            self._reorder(flow)

    def remove(self, ticket: Ticket) -> None:
        """Remove a waiting request; do nothing if it does not wait."""
        if ticket.turn is None:
            return
        ticket.turn = None
        flow = self._flows[ticket.tenant]
        was_active = flow.is_active
        flow.num_open -= 1
        self._count(flow, ticket, -1)
        self._num_active += flow.is_active - was_active
        self._reorder(flow)

    # ------------------------------------------------------------------ among tenants

    def last(self, newcomer: Ticket) -> Ticket:
        """Return the request that a full queue drops: the last one of the tenant with most work.

        May return the new request.
        """
        own = self._flows.get(newcomer.tenant)
        own_end = self._start_of(own) + newcomer.charge + (own.charge if own else 0)
        waiting = [flow for flow in self._flows.values() if flow.num_requests and flow is not own]
        most = max(waiting, key=lambda flow: flow.end_time, default=None)
        if most is None or most.end_time <= own_end:
            most = own
        last = most.tail() if most is not None else None
        if last is None or (most is own and last < newcomer):
            return newcomer
        return last

    def ahead_of(self, newcomer: Ticket) -> Waiting:
        """Return the sums over the waiting requests that would begin before a new request."""
        own = self._flows.get(newcomer.tenant)
        mine = _all(own)
        charge = newcomer.charge
        if own is not None and own.num_requests:
            last = own.tail()
            charge += own.charge
            if last is not None and newcomer < last:
                behind = [t for t in own.heads if t.turn is not None and newcomer < t]
                mine = Waiting(
                    mine.num_requests - len(behind),
                    mine.num_prompt_tokens - sum(t.num_prompt_tokens for t in behind),
                    mine.num_kv_tokens - sum(t.num_kv_tokens for t in behind),
                    mine.num_prompt_pairs - sum(t.num_prompt_pairs for t in behind),
                )
                charge -= sum(t.charge for t in behind)
        begins_at = self._start_of(own) + charge
        total = mine
        for flow in self._flows.values():
            head = flow.head() if flow is not own else None
            if head is None or (newcomer.is_urgent and not head.is_urgent):
                continue
            share = min(max(begins_at - flow.start, 0) / flow.charge, 1.0)
            total = Waiting(*(a + share * b for a, b in zip(total, _all(flow), strict=True)))
        return total

    def leaves_room(self, ticket: Ticket, now: float) -> bool:
        """Return whether a request's tenant must leave room to others before the request begins.

        The tenant must leave room if another tenant sent a request lately, and if the tenant has at
        least its fair share of the work that waits for a prefill node's first token.
        """
        flow = self._flows.get(ticket.tenant)
        if flow is None or not flow.outstanding:
            return False
        latest = next((one for one in reversed(self._flows.values()) if one is not flow), None)
        if latest is None or now - latest.seen_at > ACTIVE_S:
            return False
        return flow.outstanding * self._num_active >= self._outstanding

    # ------------------------------------------------------------------ inside

    def _start_of(self, flow: _Flow | None) -> int:
        """Return the virtual time at which a new request of this tenant would begin."""
        if flow is None:
            return self.virtual_time
        return flow.start if flow.num_requests else max(flow.start, self.virtual_time)

    def _seen(self, ticket: Ticket) -> _Flow:
        """Return the queue of a request's tenant; drop the queue of a tenant inactive for long."""
        now = ticket.arrived_at
        flow = self._flows.get(ticket.tenant)
        if flow is None:
            flow = self._flows[ticket.tenant] = _Flow(ticket.tenant, self.virtual_time, now)
        flow.seen_at = now
        part = 1 if ticket.needs_decode else POOLED_PART - 1
        flow.ends[ticket.sign, ticket.needs_decode] = ticket.place + part * ticket.num_prompt_tokens
        self._flows.move_to_end(ticket.tenant)
        oldest = next(iter(self._flows.values()))
        if now - oldest.seen_at > ACTIVE_S and not oldest.num_open:
            del self._flows[oldest.tenant]
        return flow

    def _count(self, flow: _Flow, ticket: Ticket, sign: int) -> None:
        for one in (self, flow):
            one.num_requests += sign
            one.num_prompt_tokens += sign * ticket.num_prompt_tokens
            one.num_kv_tokens += sign * ticket.num_kv_tokens
            one.num_prompt_pairs += sign * ticket.num_prompt_pairs
        flow.charge += sign * ticket.charge
        if len(flow.heads) > 2 * flow.num_requests + _MAX_STALE:
            flow.heads = [one for one in flow.heads if one.turn is not None]
            heapq.heapify(flow.heads)
        if len(flow.tails) > 2 * flow.num_requests + _MAX_STALE:
            flow.tails = [entry for entry in flow.tails if entry[-1].turn is not None]
            heapq.heapify(flow.tails)

    def _reorder(self, flow: _Flow) -> None:
        """Give a tenant its new place among the tenants, after its queue or its start changed."""
        head = flow.head()
        entry = None
        if head is not None:
            entry = (min(head.order[0], 0), flow.start, head.order[1])
        if entry == flow.entry:
            return
        flow.entry = entry
        if entry is not None:
            heapq.heappush(self._order, (entry, flow.tenant))
        if len(self._order) > 2 * len(self._flows) + _MAX_STALE:
            self._order = [
                (one.entry, one.tenant) for one in self._flows.values() if one.entry is not None
            ]
            heapq.heapify(self._order)


def _all(flow: _Flow | None) -> Waiting:
    if flow is None:
        return Waiting()
    return Waiting(
        flow.num_requests, flow.num_prompt_tokens, flow.num_kv_tokens, flow.num_prompt_pairs
    )
