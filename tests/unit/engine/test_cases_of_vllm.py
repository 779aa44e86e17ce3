"""vLLM's test cases of priorities and beam searches, as data (vLLM at commit 01065c02).

In vLLM, the cases of priorities are in `tests/v1/core/test_scheduler.py`, and the cases of beam
searches in `tests/samplers`. Two cases are in other files here, because they need `transformers`:
`numerics/test_beam_search_equals_transformers.py` (4 beams, 64 tokens) and
`numerics/test_beams_with_images.py`. Baton has no beam searches with structured outputs.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from baton.api.beam_search import BeamSearch, BeamSearchParams
from engine import LLM
from engine.core.request import RequestStatus
from engine.core.scheduler import Scheduler
from tests.fakes.checkpoints.demo_model import DEMO_MODEL
from tests.fakes.engine.engine_parts import FakeRunner, make_request, make_scheduler

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Case:
    """Requests that wait together, and the order in which they start.

    Attributes:
        arrivals: time of arrival of each request; equal priorities start in this order.
        slots: number of requests that run together.
        order: numbers of the requests in the order in which they start.
    """

    priorities: tuple[int, ...]
    arrivals: tuple[int, ...]
    order: tuple[int, ...]
    slots: int = 16


CASES = {
    "basic_ordering": Case((2, 0, 1), (1, 2, 3), (1, 2, 0)),
    "arrival_time_tiebreaker": Case((1, 1, 1), (3, 1, 2), (1, 2, 0)),
    "mixed_priority_and_arrival": Case((2, 1, 1, 0), (1, 3, 2, 4), (3, 2, 1, 0)),
    "fcfs_fallback": Case((1, 1, 1, 1), (4, 1, 3, 2), (1, 3, 2, 0)),
    "preemption_victim_selection": Case((3, 2, 0), (1, 2, 3), (2, 1, 0), slots=1),
    "equal_priority_preemption": Case((2, 2, 2), (3, 1, 2), (1, 2, 0), slots=1),
    "waiting_queue_order": Case((3, 1, 2, 0), (1, 2, 3, 4), (3, 1, 2, 0), slots=1),
    "with_limited_slots": Case((3, 1, 2, 0), (1, 2, 3, 4), (3, 1, 2, 0), slots=2),
    "heap_property": Case(
        (5, 1, 8, 3, 2, 7, 4, 6), tuple(range(8)), (1, 4, 3, 6, 0, 7, 5, 2), slots=1
    ),
}


def scheduler_of(slots: int, num_blocks: int = 10_000) -> Scheduler:
    return make_scheduler(
        num_blocks, BLOCK_SIZE, max_num_requests=slots, max_num_batched_tokens=200, by_priority=True
    )


def step(scheduler: Scheduler) -> list[str]:
    """Run a step; return the ids of its requests."""
    scheduled = scheduler.schedule()
    scheduler.check()
    scheduler.update(scheduled, FakeRunner(lambda request: 100).execute(scheduled))
    return [item.request.request_id for item in scheduled.scheduled]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_requests_start_by_priority_and_then_by_arrival(case: Case) -> None:
    scheduler, started = scheduler_of(case.slots), list[str]()
    requests = [
        make_request(str(number), 10, max_tokens=1, priority=priority)
        for number, priority in enumerate(case.priorities)
    ]
    for number in sorted(range(len(requests)), key=lambda number: case.arrivals[number]):
        scheduler.add_request(requests[number])
    while scheduler.has_work:
        names = step(scheduler)
        assert len(names) == min(case.slots, len(requests) - len(started))
        started += names
    assert started == [str(number) for number in case.order]


def test_nobody_is_preempted_while_there_is_room() -> None:
    scheduler = scheduler_of(slots=3)
    for name in ("low 1", "low 2"):
        scheduler.add_request(make_request(name, 30, priority=5))
    assert len(step(scheduler)) == 2
    scheduler.add_request(make_request("high", 30, priority=0))
    assert sorted(step(scheduler)) == ["high", "low 1", "low 2"]
    assert scheduler.num_waiting == 0


def test_without_room_the_less_important_request_waits_and_comes_back() -> None:
    low, high = (make_request(name, size, 9, priority=place) for name, size, place in
                 (("low", 30, 1), ("high", 32, 0)))  # fmt: skip
    scheduler = scheduler_of(slots=2, num_blocks=4)  # room for 64 tokens
    scheduler.add_request(low)
    assert step(scheduler) == ["low"]
    scheduler.add_request(high)
    assert sorted(step(scheduler)) == ["high", "low"]
    assert scheduler.kv_cache_manager.block_pool.num_free == 0
    assert step(scheduler) == ["high"]  # its 33rd token needs a third block
    assert low.status is RequestStatus.PREEMPTED
    scheduler.abort("high")
    assert step(scheduler) == ["low"]
    assert list(low.output_token_ids) == [100] * 3  # the preemption lost no token


def test_an_output_that_ends_at_once_is_the_best_of_two_beams() -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=1, end_token_ids=frozenset({0}))
    search = BeamSearch(params, max_tokens=1)
    search.advance([[(0, -0.1), (11, -1.0), (12, -2.0), (13, -3.0), (14, -4.0)]])
    assert search.done
    assert (search.finished[0].token_ids, search.finished[0].logprob) == ((0,), -0.1)
    assert len(search.finished) == 2


@pytest.mark.parametrize("max_tokens", [6, pytest.param(64, marks=pytest.mark.large)])
def test_beams_of_eight_prompts_are_those_of_two_at_a_time(max_tokens: int) -> None:
    draw = random.Random(0)
    prompts = [draw.choices(range(10, 4000), k=draw.randint(4, 30)) for _ in range(8)]
    llm = LLM(str(DEMO_MODEL), dtype="float32", num_threads=1, num_blocks=2000)
    together = llm.beam_search(prompts, beam_width=4, max_tokens=max_tokens)
    by_twos = [
        llm.beam_search(prompts[place : place + 2], beam_width=4, max_tokens=max_tokens)
        for place in range(0, 8, 2)
    ]
    assert together == [beams for pair in by_twos for beams in pair]
