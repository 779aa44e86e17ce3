"""Unit tests of Admission: limits, order of the queue, refusals; nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable

import pytest

from baton.access.identity import ANYBODY, Limits, Principal
from baton.api.errors import ConfigError, DeadlineExceededError, OverloadedError
from router.gate.admission import Admission
from router.gate.admission_options import AdmissionOptions
from router.gate.capacity import Capacity
from router.gate.ticket import Ticket
from tests.fakes.router.fleets import FleetBook
from tests.fakes.router.router_scene import asynchronous

PROMPT = 1000


def key(tenant: str, **limits: float) -> Principal:
    return Principal(name=f"{tenant}'s", tenant=tenant, limits=Limits(**limits))  # type: ignore[arg-type]


class Gate:
    """An admission before one pair of nodes, of which a prompt occupies the prefill node."""

    def __init__(self, options: AdmissionOptions | None = None, num_nodes: int = 1) -> None:
        self.book = FleetBook(num_nodes, num_nodes)
        fleet = self.book.fleet()
        for _ in range(50):  # a token takes a millisecond
            for node in self.book.prefills:
                node.prefill.measure(PROMPT, 1.0)
                node.prefill.refresh()
        options = options or AdmissionOptions()
        self.admission = Admission(
            Capacity(
                lambda: fleet,
                options.prefill_window_s,
                shared_prefill_window_s=options.shared_prefill_window_s,
                clock=lambda: self.book.now,
            ),
            options,
        )
        self.order: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}

    @contextlib.asynccontextmanager
    async def enter(
        self,
        *,
        num_prompt_tokens: int = PROMPT,
        max_tokens: int = 10,
        timeout_s: float = 600.0,
        priority: int = 0,
        principal: Principal = ANYBODY,
        find_cached_tokens: Callable[[], int] = int,
    ) -> AsyncIterator[Ticket]:
        async with self.admission.enter(
            num_prompt_tokens=num_prompt_tokens,
            max_tokens=max_tokens,
            timeout_s=timeout_s,
            priority=priority,
            principal=principal,
            find_cached_tokens=find_cached_tokens,
        ) as ticket:
            yield ticket

    def begin(
        self,
        name: str,
        *,
        priority: int = 0,
        timeout_s: float = 600.0,
        tenant: str = "",
        principal: Principal | None = None,
    ) -> None:
        """A request that computes until it is told to end."""
        who = principal or (key(tenant) if tenant else ANYBODY)

        async def run() -> None:
            async with self.enter(priority=priority, timeout_s=timeout_s, principal=who):
                self.order.append(name)
                node = min(self.book.prefills, key=lambda node: node.num_open_tokens)
                account = node.note_opened(PROMPT, num_uncomputed=PROMPT)
                try:
                    await asyncio.Event().wait()
                finally:
                    node.note_closed(account)

        self.tasks[name] = asyncio.create_task(run())

    async def end(self, name: str) -> None:
        self.tasks[name].cancel()
        await asyncio.gather(self.tasks[name], return_exceptions=True)
        await self.pause()

    def error(self, name: str) -> BaseException | None:
        return self.tasks[name].exception()

    async def pause(self) -> None:
        """Let every task run as far as it can, and timers that are due."""
        await asyncio.sleep(0.03)
        for _ in range(10):  # a machine that stood still has one turn of the loop behind it
            await asyncio.sleep(0)

    async def close(self) -> None:
        for name in list(self.tasks):
            await self.end(name)
        state = self.admission.state()
        assert (state.num_queued, state.num_queued_tokens, state.num_begun) == (0, 0, 0)
        assert state.expected_wait_s == 0
        await self.pause()
        assert self.admission._pump is None
        assert list(self.admission._queue.tickets()) == []
        assert self.admission._of_key == {}


@asynchronous
async def test_requests_wait_while_the_nodes_have_enough_and_begin_by_priority_and_arrival() -> (
    None
):
    gate = Gate()
    gate.begin("first")
    await gate.pause()
    gate.begin("later")
    gate.begin("urgent", priority=-1)
    gate.begin("last", priority=5)
    gate.begin("latest")
    await gate.pause()
    assert gate.order == ["first"]
    assert gate.admission.state().num_queued == 4
    for name in ("first", "urgent", "later", "latest", "last"):
        await gate.end(name)
    assert gate.order == ["first", "urgent", "later", "latest", "last"]
    await gate.close()


@asynchronous
async def test_one_that_leaves_the_queue_holds_nobody_up() -> None:
    gate = Gate()
    for name in ("first", "leaves", "next"):
        gate.begin(name)
        await gate.pause()
    await gate.end("leaves")
    assert gate.admission.state().num_queued == 1
    await gate.end("first")
    assert gate.order == ["first", "next"]
    await gate.close()


@asynchronous
async def test_room_is_found_on_any_of_many_nodes() -> None:
    gate = Gate(num_nodes=3)
    for name in "abcd":
        gate.begin(name)
    await gate.pause()
    assert gate.order == ["a", "b", "c"]
    await gate.close()


@asynchronous
async def test_a_full_queue_refuses_the_least_urgent_one() -> None:
    gate = Gate(AdmissionOptions(max_queued_requests=2))
    gate.begin("first")
    await gate.pause()
    gate.begin("a")
    gate.begin("b", priority=3)
    await gate.pause()
    with pytest.raises(OverloadedError, match="2 requests wait, the limit") as refused:
        async with gate.enter(priority=3):
            pass
    assert refused.value.retry_delay_s is not None
    assert 2 < refused.value.retry_delay_s < 5  # three prompts of a second each
    gate.begin("c")
    await gate.pause()
    assert "more urgent ones came" in str(gate.tasks["b"].exception())
    assert gate.admission.state().num_refused == {"queue": 2}
    await gate.close()


@asynchronous
async def test_what_would_come_too_late_is_refused_at_once() -> None:
    gate = Gate(AdmissionOptions(max_ttft_s=3.9))
    gate.begin("first")
    await gate.pause()
    gate.begin("a")
    gate.begin("b")
    await gate.pause()
    with pytest.raises(
        OverloadedError, match=r"first token would come in 4\.\d s, the limit is 3.9"
    ):
        async with gate.enter():
            pass
    with pytest.raises(OverloadedError, match=r"its deadline is in 3\.3 s"):
        async with gate.enter(priority=-1, max_tokens=1000, timeout_s=3.3):
            pass
    gate.begin("urgent", priority=-1)  # before "a" and "b"
    await gate.pause()
    assert gate.admission.state().num_queued == 3
    assert gate.admission.state().num_refused == {"ttft": 1, "deadline": 1}
    await gate.close()


@asynchronous
async def test_a_deadline_ends_the_wait() -> None:
    gate = Gate()
    gate.begin("first")
    await gate.pause()
    for node in gate.book.prefills:  # the estimate knows of nothing, so that it is not refused
        node.prefill_queue_s = 0.6
        node.prefill.base = node.prefill.per_unit = 0.0
    gate.book.shared.residence_s = 0.0
    with pytest.raises(DeadlineExceededError, match="waited for its turn"):
        async with gate.enter(num_prompt_tokens=0, timeout_s=0.7):
            pass
    await gate.close()


@asynchronous
async def test_open_requests_are_limited_for_all_and_for_each_client() -> None:
    gate = Gate(AdmissionOptions(max_open_requests=3, max_open_requests_per_client=1))
    async with gate.enter(principal=key("a")):
        with pytest.raises(OverloadedError, match="1 requests of this client are open, the limit"):
            async with gate.enter(principal=key("a")):
                pass
        async with gate.enter(principal=key("b")), gate.enter():
            with pytest.raises(OverloadedError, match="3 requests are open, the limit"):
                async with gate.enter():
                    pass
    async with gate.enter(principal=key("a")):
        pass
    await gate.close()


@asynchronous
async def test_it_waits_for_kv_memory_too_but_not_for_an_empty_node() -> None:
    gate = Gate()
    node = gate.book["d0"]
    room = node.num_blocks * node.block_size
    async with gate.enter(num_prompt_tokens=2 * room):  # its node will say what is wrong with it
        pass
    account = node.note_opened(room, num_arriving=room)
    gate.begin("waits")
    await gate.pause()
    assert gate.order == []
    assert gate.admission.state().expected_wait_s > 0
    node.note_closed(account)
    await gate.pause()
    assert gate.order == ["waits"]
    await gate.close()


@asynchronous
async def test_estimates_that_were_too_short_count_at_once_and_those_too_long_slowly() -> None:
    gate = Gate()
    capacity = gate.admission._capacity
    before = capacity.wait_s(1, PROMPT, 0)
    for _ in range(50):
        capacity.note_wait(0.01, 5.0)  # of what hardly waits nothing is learnt
    assert capacity.wait_s(1, PROMPT, 0) == before
    for _ in range(50):  # the same estimate every time: what is learnt must not be learnt twice
        capacity.note_wait(1.0, 2.0)
    assert capacity.wait_s(1, PROMPT, 0) == pytest.approx(2 * before, rel=0.01)
    for _ in range(10):
        capacity.note_wait(1.0, 1.0)
    assert 1.7 * before < capacity.wait_s(1, PROMPT, 0) < 2 * before
    await gate.close()


@asynchronous
async def test_it_learns_from_first_tokens_what_the_estimate_was_without_its_correction() -> None:
    gate = Gate()
    capacity = gate.admission._capacity
    capacity.bias = 2.0
    gate.begin("first")
    await gate.pause()
    gate.begin("waits")
    await gate.pause()
    (ticket,) = gate.admission._queue.tickets()
    assert ticket.expected_wait_s == pytest.approx(4, rel=0.1)  # two prompts of a second, twice
    ticket.arrived_at -= 4  # as long ago as it was expected to take
    gate.admission.note_first_token(ticket)
    assert capacity.bias == pytest.approx(2.0, rel=0.01)
    await gate.close()


@asynchronous
async def test_a_prompt_is_one_nodes_work_and_those_before_it_are_all_nodes() -> None:
    gate = Gate(num_nodes=4)
    capacity = gate.admission._capacity
    assert capacity.wait_s(8, 8 * PROMPT, 0) == pytest.approx(2, rel=0.1)
    assert capacity.wait_s(8, 8 * PROMPT, 0, last=PROMPT) == pytest.approx(3, rel=0.1)
    await gate.close()


@asynchronous
async def test_an_answer_is_expected_to_take_as_long_as_long_ones_and_no_longer_than_it_may() -> (
    None
):
    gate = Gate()
    capacity, node = gate.admission._capacity, gate.book["d0"]
    for num_tokens in (20, 60) * 200:  # 30 ms for each token
        node.note_decoded(num_tokens, 0.03 * (num_tokens - 2))
    assert 0.03 * 60 < capacity.decode_s(4000) < 0.03 * 70
    assert 0.03 * 20 < capacity.decode_s(20) < 0.03 * 25
    await gate.close()


@asynchronous
async def test_a_deadline_is_kept_with_some_time_to_spare() -> None:
    gate = Gate()
    gate.book.shared.residence_s = 0.0
    gate.begin("first")
    await gate.pause()
    with pytest.raises(OverloadedError, match=r"would take 2\.\d s, its deadline is in 2\.2 s"):
        async with gate.enter(timeout_s=2.2):
            pass
    gate.begin("waits", timeout_s=2.6)
    await gate.pause()
    assert gate.admission.state().num_queued == 1
    await gate.close()


@pytest.mark.parametrize("name", AdmissionOptions.__slots__)
def test_limits_below_zero_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: must be 0 or more, got -1"):
        AdmissionOptions(**{name: -1})


# ---------------------------------------------------------------- tenants


@asynchronous
async def test_tenants_that_wait_take_turns_and_each_orders_its_own() -> None:
    gate = Gate()
    gate.begin("running", tenant="a")
    await gate.pause()
    for name in ("a1", "a2", "a3"):
        gate.begin(name, tenant="a")
        await gate.pause()
    gate.begin("b1", tenant="b", priority=3)
    await gate.pause()
    gate.begin("b2", tenant="b")
    await gate.pause()
    for _ in range(5):
        await gate.end(gate.order[-1])
    assert gate.order == ["running", "b2", "a1", "b1", "a2", "a3"]
    await gate.close()


@asynchronous
async def test_what_a_key_may_call_urgent_goes_before_other_tenants() -> None:
    gate = Gate()
    gate.begin("running", tenant="a")
    await gate.pause()
    gate.begin("b", tenant="b")
    gate.begin("a", tenant="a", priority=-1)
    await gate.pause()
    await gate.end("running")
    assert gate.order == ["running", "a"]
    await gate.close()


@asynchronous
async def test_a_full_queue_refuses_who_waits_for_most_and_nobody_else() -> None:
    gate = Gate(AdmissionOptions(max_queued_requests=3))
    gate.begin("running", tenant="greedy")
    await gate.pause()
    for name in ("g1", "g2", "g3"):
        gate.begin(name, tenant="greedy")
        await gate.pause()
    with pytest.raises(OverloadedError, match=r"3 requests wait, the limit$"):
        async with gate.enter(principal=key("greedy")):
            pass
    gate.begin("modest", tenant="modest", priority=9)
    await gate.pause()
    assert "3 requests wait, the limit; others waited for less" in str(gate.error("g3"))
    gate.begin("urgent", tenant="greedy", priority=-9)  # at the cost of its own
    await gate.pause()
    assert "3 requests wait, the limit; more urgent ones came" in str(gate.error("g2"))
    assert gate.admission.state().num_refused == {"queue": 3}
    await gate.close()


@asynchronous
async def test_who_has_much_before_the_nodes_leaves_room_to_others_but_only_if_there_are_any() -> (
    None
):
    gate = Gate(AdmissionOptions(prefill_window_s=10.0, shared_prefill_window_s=0.0))
    for name in ("a1", "a2", "a3"):  # alone it gets all
        gate.begin(name, tenant="a")
        await gate.pause()
    assert gate.order == ["a1", "a2", "a3"]
    gate.begin("b1", tenant="b")  # and another one its part at once
    await gate.pause()
    gate.begin("a4", tenant="a")
    await gate.pause()
    assert gate.order == ["a1", "a2", "a3", "b1"]
    for name in ("a1", "a2", "a3", "b1"):
        await gate.end(name)
    assert gate.order[-1] == "a4"
    await gate.close()


@asynchronous
async def test_who_should_leave_room_is_told_to_whoever_places_it() -> None:
    gate = Gate(AdmissionOptions(prefill_window_s=10.0, shared_prefill_window_s=10.0))
    enter = functools.partial(
        gate.admission.enter, num_prompt_tokens=PROMPT, max_tokens=1, timeout_s=60.0
    )
    async with contextlib.AsyncExitStack() as stack:
        tickets = [
            await stack.enter_async_context(enter(principal=Principal(name=name, tenant=name)))
            for name in ("a", "b", "a")
        ]
    assert [ticket.leaves_room for ticket in tickets] == [False, False, True]
    await gate.close()


@asynchronous
async def test_it_keeps_some_kv_memory_for_others_too() -> None:
    gate = Gate()
    node = gate.book["d0"]
    room = node.num_blocks * node.block_size
    account = node.note_opened(
        room, num_arriving=int(0.93 * room)
    )  # 7 % are free: 5 % are nobody's
    assert gate.admission._capacity.has_room(PROMPT, 0)
    assert not gate.admission._capacity.has_room(int(0.01 * room), 0, shares=True)
    node.note_closed(account)
    await gate.close()


@asynchronous
async def test_what_a_request_cost_is_charged_when_it_is_known() -> None:
    gate = Gate(num_nodes=2)
    flows = gate.admission._queue._flows
    async with gate.enter(principal=key("a"), find_cached_tokens=lambda: 900) as ticket:
        assert ticket.num_tokens == 100 + 10
        assert flows["a"].start == 110_000  # thousandths
        ticket.num_tokens_used = 1010
    assert flows["a"].start == 1_010_000
    async with gate.enter(principal=key("b", weight=2.0)):
        pass  # nobody knows
    async with gate.enter(find_cached_tokens=lambda: 1 // 0):
        pass  # of who competes with nobody nothing is looked up
    assert flows["b"].start == (PROMPT + 10) * 1000 / 2
    await gate.close()


@asynchronous
async def test_a_key_has_so_many_open_requests_as_it_says_or_else_as_all() -> None:
    gate = Gate(AdmissionOptions(max_open_requests_per_client=1))
    allowed = key("a", max_open_requests=2)
    async with gate.enter(principal=allowed), gate.enter(principal=allowed):
        with pytest.raises(OverloadedError, match="2 requests of this client are open, the limit"):
            gate.admission.check_key(allowed)
    await gate.close()


@asynchronous
async def test_a_request_that_does_not_begin_costs_a_key_nothing() -> None:
    gate = Gate(AdmissionOptions(max_queued_requests=1))
    gate.begin("running")
    await gate.pause()
    limited = key("a", requests_per_minute=2, tokens_per_minute=10_000)
    gate.begin("waits", tenant="a", principal=limited)
    await gate.pause()
    requests, tokens = gate.admission.rates_of(limited).values()  # (they fill again meanwhile)
    assert 1 <= requests.remaining < 1.5
    assert 10_000 - PROMPT - 10 <= tokens.remaining < 10_000 - PROMPT + 200
    await gate.end("waits")
    with pytest.raises(OverloadedError):
        async with gate.enter(principal=limited, timeout_s=0.1):
            pass
    requests, tokens = gate.admission.rates_of(limited).values()
    assert (requests.remaining, tokens.remaining) == (2, 10_000)
    await gate.close()


@asynchronous
async def test_a_key_that_had_its_part_is_refused_before_anything_is_looked_up() -> None:
    gate = Gate(num_nodes=2)
    limited = key("a", requests_per_minute=60)
    for _ in range(60):
        async with gate.enter(principal=limited):
            pass
    with pytest.raises(OverloadedError, match="has used its 60 requests per minute") as refused:
        async with gate.enter(principal=limited, find_cached_tokens=lambda: 1 // 0):
            pass
    assert refused.value.retry_delay_s is not None
    assert 0 < refused.value.retry_delay_s <= 1
    assert gate.admission.state().num_refused == {"rate": 1}
    async with gate.enter(principal=key("b", requests_per_minute=60)):
        pass
    await gate.close()
