"""Unit tests of pooled requests at the gate: other requests go before them, and none starves."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator

import pytest

from baton.link.words import NodeBeat
from router.gate.capacity import Capacity
from router.gate.fair_queue import POOLED_PART, FairQueue
from router.gate.ticket import Ticket
from tests.fakes.router.fleets import FleetBook

NUM_TOKENS = 10
numbers = itertools.count()


class Line:
    """A fair queue, from which requests begin one after another."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.queue = FairQueue()

    def push(
        self, name: str, num_tokens: int = NUM_TOKENS, tenant: str = "", priority: int = 0
    ) -> None:
        number = next(numbers)
        ticket = Ticket(
            request_id=name,
            tenant=tenant,
            order=(priority, number),
            num_prompt_tokens=num_tokens,
            num_kv_tokens=num_tokens,
            num_uncached_tokens=num_tokens,
            needs_decode=not name.startswith("p"),
            arrived_at=float(number),
            expires_at=1e9,
        )
        self.queue.give_place(ticket)
        ticket.turn = self.loop.create_future()
        self.queue.push(ticket)

    def begin(self, number: int = 1) -> list[str]:
        """Let requests begin; return their names."""
        names = []
        for _ in range(number):
            head = self.queue.head()
            assert head is not None
            self.queue.charge(head)
            names.append(head.request_id)
        return names


@pytest.fixture
def line() -> Iterator[Line]:
    line = Line()
    yield line
    line.loop.close()


def test_a_prompt_goes_before_the_pooled_requests_of_its_tenant(line: Line) -> None:
    for number in range(50):
        line.push(f"p{number}")
    assert line.begin(20) == [f"p{number}" for number in range(20)]
    line.push("chat0")
    line.push("chat1")
    assert line.begin(3) == ["chat0", "chat1", "p20"]
    assert line.begin(29) == [f"p{number}" for number in range(21, 50)]


@pytest.mark.parametrize("of_pooled", [1, 10, 300])
@pytest.mark.parametrize("of_prompts", [1, 10, 300])
def test_a_flood_of_prompts_starves_no_pooled_request(
    line: Line, of_prompts: int, of_pooled: int
) -> None:
    names, passed, pools = itertools.count(), 0, list[str]()
    for number in range(20):
        line.push(f"p{number}", of_pooled)
    for _ in range(3):
        line.push(f"chat{next(names)}", of_prompts)
    while len(pools) < 20:
        [name] = line.begin()
        if name.startswith("p"):
            pools.append(name)
            passed = 0
        else:
            passed += of_prompts
            line.push(f"chat{next(names)}", of_prompts)
        assert passed <= (POOLED_PART - 1) * of_pooled + of_prompts
    assert pools == [f"p{number}" for number in range(20)]


def test_prompts_of_low_priority_delay_no_prompt_of_another_priority(line: Line) -> None:
    line.push("p0")
    line.push("p1")
    assert line.begin() == ["p0"]
    for number in range(50):
        line.push(f"batch{number}", priority=5)
    line.push("p2")
    line.push("chat")
    assert line.begin(4) == ["chat", "p1", "p2", "batch0"]


def test_tenants_share_as_before(line: Line) -> None:
    for number in range(4):
        line.push(f"p{number}", tenant="a")
        line.push(f"chat{number}", tenant="b")
    tenants = [name[0] for name in line.begin(8)]
    assert tenants == ["p", "c"] * 4


def test_only_other_prompts_fill_a_prefill_node_for_a_prompt() -> None:
    """A prefill node that has pooled prompts of many seconds takes a chat, and no more of them."""
    book = FleetBook(1, 1)
    fleet, [node] = book.fleet(), book.prefills
    capacity = Capacity(lambda: fleet, 0.5)
    pooled = node.note_opened(10**6, num_uncomputed=10**6, is_pooled=True)
    assert node.prefill_queue_s > 0.5 > node.sampling_queue_s
    assert capacity.has_room(100, 10)
    assert not capacity.has_time()
    other = node.note_opened(10**6, num_uncomputed=10**6)
    assert not capacity.has_room(100, 10)
    for account in (pooled, other):
        node.note_closed(account)
    assert node.prefill_queue_s == node.sampling_queue_s == 0
    node.note_beat(NodeBeat(num_uncomputed_tokens=10**6))  # of other routers
    assert not capacity.has_room(100, 10)
