"""Property tests of the fair queue: the next request, shares of tenants, and no starvation."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router.gate.fair_queue import FairQueue
from router.gate.ticket import Ticket, charge_of
from tests.property.num_examples import num_examples

WEIGHTS = {"a": 1.0, "b": 2.0, "c": 0.5, "d": 1.0}
tenants = st.sampled_from(sorted(WEIGHTS))
sizes = st.integers(1, 50)


def make_ticket(tenant: str, number: int, num_tokens: int, priority: int = 0) -> Ticket:
    return Ticket(
        request_id=f"r{number}",
        tenant=tenant,
        weight=WEIGHTS[tenant],
        order=(priority, number),
        num_prompt_tokens=num_tokens,
        num_kv_tokens=num_tokens,
        num_uncached_tokens=num_tokens,
        arrived_at=float(number),
        expires_at=1e9,
    )


class FairQueueMachine(RuleBasedStateMachine):
    """Compare with the same rules in their plainest form: a list, and a start for each tenant."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.queue = FairQueue()
        self.numbers = itertools.count()
        self.waiting: list[Ticket] = []
        self.begun: list[Ticket] = []
        self.starts = dict.fromkeys(WEIGHTS, 0)
        self.virtual_time = 0

    def teardown(self) -> None:
        self.loop.close()

    def waiting_of(self, tenant: str) -> list[Ticket]:
        return sorted(ticket for ticket in self.waiting if ticket.tenant == tenant)

    def heads(self) -> list[tuple[tuple[int, int, int], Ticket]]:
        firsts = [mine[0] for tenant in WEIGHTS if (mine := self.waiting_of(tenant))]
        return sorted(((min(t.order[0], 0), self.starts[t.tenant], t.order[1]), t) for t in firsts)

    def note_begun(self, ticket: Ticket, num_others: int) -> None:
        if ticket.order[0] >= 0 or not num_others:
            self.virtual_time = max(self.virtual_time, self.starts[ticket.tenant])
        self.starts[ticket.tenant] += ticket.charge
        self.begun.append(ticket)

    @rule(tenant=tenants, num_tokens=sizes, priority=st.sampled_from([0, 0, 1, 5, -1]))
    def come(self, tenant: str, num_tokens: int, priority: int) -> None:
        """Admit a request as admission does: at once if none is before it and there is room."""
        ticket = make_ticket(tenant, next(self.numbers), num_tokens, priority)
        mine = self.waiting_of(tenant)
        start = self.starts[tenant] if mine else max(self.starts[tenant], self.virtual_time)
        is_first = not mine or ticket < mine[0]
        key = (min(priority, 0), start, ticket.order[1])
        heads = self.heads()
        assert self.queue.is_next(ticket) == (is_first and (not heads or key < heads[0][0]))
        ahead = self.queue.ahead_of(ticket)
        others = sum(other.num_prompt_tokens for other in self.waiting if other.tenant != tenant)
        own = sum(other.num_prompt_tokens for other in mine if other < ticket)
        assert own <= ahead.num_prompt_tokens <= own + others + 1e-6
        if self.queue.is_next(ticket) and num_tokens % 2:
            num_others = len(self.waiting) - len(mine)
            if not mine:
                self.starts[tenant] = start
            self.queue.charge(ticket)
            self.note_begun(ticket, num_others)
            return
        self.starts[tenant] = start
        ticket.turn = self.loop.create_future()
        self.queue.push(ticket)
        self.waiting.append(ticket)

    @precondition(lambda self: self.waiting)
    @rule()
    def begin(self) -> None:
        """Something waits, so something is next; and it is the right one."""
        ticket = self.queue.head()
        assert ticket is not None
        assert ticket is self.heads()[0][1]
        num_others = len(self.waiting) - len(self.waiting_of(ticket.tenant))
        self.queue.charge(ticket)
        self.waiting.remove(ticket)
        self.note_begun(ticket, num_others)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.waiting))
        self.queue.remove(ticket)
        self.queue.remove(ticket)  # once more is harmless
        self.waiting.remove(ticket)

    @precondition(lambda self: self.begun)
    @rule(data=st.data(), used=st.none() | st.integers(0, 80), has_token=st.booleans())
    def end(self, data: st.DataObject, used: int | None, has_token: bool) -> None:
        ticket = data.draw(st.sampled_from(self.begun))
        if has_token:
            self.queue.note_first_token(ticket)
        ticket.num_tokens_used = used
        self.queue.settle(ticket)
        self.begun.remove(ticket)
        if used is not None:
            self.starts[ticket.tenant] += charge_of(used, ticket.weight) - ticket.charge

    @precondition(lambda self: self.waiting)
    @rule(tenant=tenants, num_tokens=sizes, priority=st.sampled_from([0, 1, -1]))
    def is_full(self, tenant: str, num_tokens: int, priority: int) -> None:
        """Drop the least urgent request of the tenant that waits for most, or the newcomer."""
        newcomer = make_ticket(tenant, next(self.numbers), num_tokens, priority)
        last = self.queue.last(newcomer)
        assert last is newcomer or last in self.waiting
        everybody = [*self.waiting, newcomer]
        assert last is max(ticket for ticket in everybody if ticket.tenant == last.tenant)
        ends = {}
        for one in {ticket.tenant for ticket in everybody}:
            start = self.starts[one]
            if not self.waiting_of(one):
                start = max(start, self.virtual_time)
            ends[one] = start + sum(t.charge for t in everybody if t.tenant == one)
        assert ends[last.tenant] == max(ends.values())

    @invariant()
    def it_counts_what_waits(self) -> None:
        queue = self.queue
        assert sorted(queue.tickets()) == sorted(self.waiting)
        num_tokens = sum(ticket.num_prompt_tokens for ticket in self.waiting)
        assert (queue.num_requests, queue.num_prompt_tokens) == (len(self.waiting), num_tokens)
        assert queue.virtual_time == self.virtual_time
        outstanding = [ticket for ticket in self.begun if not ticket.has_first_token]
        assert queue._outstanding == sum(ticket.charge for ticket in outstanding)
        active = {ticket.tenant for ticket in [*outstanding, *self.waiting]}
        assert queue._num_active == len(active)
        for flow in queue._flows.values():  # what is gone does not pile up
            assert len(flow.heads) + len(flow.tails) <= 4 * flow.num_requests + 130


TestFairQueue = FairQueueMachine.TestCase
TestFairQueue.settings = settings(max_examples=num_examples(100), stateful_step_count=60)


def begin_in_turn(
    queue: FairQueue, loop: asyncio.AbstractEventLoop, sizes_of: dict[str, list[int]], rounds: int
) -> list[Ticket]:
    """Keep something of each tenant waiting, and begin so many."""
    numbers = itertools.count()
    order: list[Ticket] = []
    for number in range(rounds):
        for tenant, choices in sizes_of.items():
            if not any(ticket.tenant == tenant for ticket in queue.tickets()):
                size = choices[number % len(choices)]
                ticket = make_ticket(tenant, next(numbers), size)
                ticket.turn = loop.create_future()
                queue.push(ticket)
        ticket = queue.head() or order[-1]
        queue.charge(ticket)
        queue.settle(ticket)
        order.append(ticket)
    return order


@given(st.dictionaries(tenants, st.lists(sizes, min_size=1, max_size=5), min_size=2))
def test_tenants_that_always_wait_have_their_shares_in_every_stretch_of_time(
    sizes_of: dict[str, list[int]],
) -> None:
    """Check the paper's bound, one request of either tenant, so that no tenant starves."""
    loop = asyncio.new_event_loop()
    order = begin_in_turn(FairQueue(), loop, sizes_of, 60)
    loop.close()
    largest = {
        tenant: charge_of(max(choices), WEIGHTS[tenant]) for tenant, choices in sizes_of.items()
    }
    for first in range(0, 60, 7):
        got = Counter(dict.fromkeys(sizes_of, 0))
        for ticket in order[first:]:
            got[ticket.tenant] += ticket.charge
            for one, other in itertools.combinations(sizes_of, 2):
                assert abs(got[one] - got[other]) <= largest[one] + largest[other]


@given(alone=st.lists(sizes, min_size=1, max_size=20), then=st.lists(sizes, min_size=1, max_size=5))
def test_what_one_had_alone_costs_it_nothing_and_who_was_idle_saved_nothing_up(
    alone: list[int], then: list[int]
) -> None:
    loop, queue = asyncio.new_event_loop(), FairQueue()
    begin_in_turn(queue, loop, {"a": alone}, len(alone))
    order = begin_in_turn(queue, loop, {"a": then, "d": then}, 30)
    loop.close()
    charges = {t: sum(x.charge for x in order if x.tenant == t) for t in ("a", "d")}
    assert abs(charges["a"] - charges["d"]) <= 1000 * (2 * max(then) + max(alone))


@given(st.lists(sizes, min_size=4, max_size=12), st.integers(0, 3))
def test_estimates_that_are_wrong_change_no_share_in_the_long_run(
    actual: list[int], factor: int
) -> None:
    """Let one tenant's requests cost as estimated, and the other's several times as much."""
    loop, queue = asyncio.new_event_loop(), FairQueue()
    used: Counter[str] = Counter()
    numbers = itertools.count()
    for number in range(200):
        for tenant in ("a", "d"):
            if not any(ticket.tenant == tenant for ticket in queue.tickets()):
                ticket = make_ticket(tenant, next(numbers), actual[number % len(actual)])
                ticket.turn = loop.create_future()
                queue.push(ticket)
        ticket = queue.head() or ticket
        queue.charge(ticket)
        ticket.num_tokens_used = ticket.num_tokens * (factor if ticket.tenant == "d" else 1)
        queue.settle(ticket)
        used[ticket.tenant] += ticket.num_tokens_used
    loop.close()
    if factor:
        ratio = Fraction(used["d"], used["a"])
        slack = Fraction(max(actual) * (factor + 2), min(used.values()))
        assert abs(ratio - 1) <= slack + Fraction(1, 10)
