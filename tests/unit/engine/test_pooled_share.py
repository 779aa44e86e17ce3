"""Unit tests of pooled requests beside requests that sample: who starts, with how many tokens."""

from __future__ import annotations

from itertools import count

import pytest

from baton.api.pooling import PoolingParams
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.core.waiting_room import POOLED_PART, SHORT_STEPS
from tests.fakes.engine.engine_parts import FakeRunner, make_request, make_scheduler

MOST = 64  # tokens in a step
PART = MOST // POOLED_PART


def pooled(name: str, num_tokens: int = 8, priority: int = 0) -> Request:
    return make_request(name, num_tokens, 1, pooling=PoolingParams(), priority=priority)


def prompt(name: str, num_tokens: int = 8, priority: int = 0) -> Request:
    return make_request(name, num_tokens, 1, priority=priority)


def scheduler_of(*requests: Request, **options: object) -> Scheduler:
    scheduler = make_scheduler(num_blocks=1000, **{"max_num_batched_tokens": MOST, **options})  # type: ignore[arg-type]
    for request in requests:
        scheduler.add_request(request)
    return scheduler


def step(scheduler: Scheduler) -> dict[str, int]:
    """Run a step; return the number of tokens of each of its requests."""
    scheduled = scheduler.schedule()
    scheduler.check()
    scheduler.update(scheduled, FakeRunner().execute(scheduled))
    return {item.request.request_id: item.num_scheduled_tokens for item in scheduled.scheduled}


def test_a_prompt_goes_before_pooled_requests_that_came_earlier() -> None:
    scheduler = scheduler_of(*(pooled(f"p{n}") for n in range(20)), max_num_requests=4)
    assert list(step(scheduler)) == ["p0", "p1", "p2", "p3"]
    scheduler.add_request(prompt("chat"))
    assert step(scheduler) == {"chat": 8, "p4": 1}


def test_a_long_pooled_request_leaves_most_of_the_step_to_a_prompt() -> None:
    scheduler = scheduler_of(pooled("p0", 1000), pooled("p1", 1000))
    assert step(scheduler) == {"p0": MOST}
    scheduler.add_request(prompt("chat", 200))
    left = MOST - PART
    assert step(scheduler) == {"p0": 1, "chat": MOST - 1}
    assert [step(scheduler) for _ in range(2)] == [{"p0": PART, "chat": left}] * 2


def test_steps_stay_short_for_a_while_after_a_prompt() -> None:
    scheduler = scheduler_of(pooled("p", 3000))
    assert step(scheduler) == {"p": MOST}
    scheduler.add_request(prompt("chat"))
    step(scheduler)
    assert [step(scheduler) for _ in range(SHORT_STEPS)] == [{"p": PART}] * SHORT_STEPS
    assert step(scheduler) == {"p": MOST}


def test_pooled_requests_use_the_whole_allowance_beside_decodes() -> None:
    decoding = make_request("decodes", 4, 50)
    scheduler = scheduler_of(decoding, prefill_tokens_beside_decodes=PART)
    step(scheduler)
    scheduler.add_request(pooled("p", 100))
    assert step(scheduler) == {"decodes": 1, "p": PART}
    scheduler.add_request(prompt("chat", 20))
    assert [step(scheduler) for _ in range(2)] == [{"decodes": 1, "p": 1, "chat": PART - 1}] * 2


@pytest.mark.parametrize("max_num_requests", [1, 2, 8])
@pytest.mark.parametrize("lengths", [(8, 8), (500, 8), (8, 500), (1, 1), (30, 30)])
def test_a_flood_of_prompts_starves_no_pooled_request(
    lengths: tuple[int, int], max_num_requests: int
) -> None:
    of_prompts, of_pooled = lengths
    pools = [pooled(f"p{n}", of_pooled) for n in range(20)]
    scheduler = scheduler_of(*pools, max_num_requests=max_num_requests)
    names, passed = count(), 0
    while pools:
        prompts = [r for r in scheduler.requests.values() if r.pooling is None]
        for _ in range(sum(r.started_at is None for r in prompts), 3):  # three always wait
            prompts.append(prompt(f"chat{next(names)}", of_prompts))
            scheduler.add_request(prompts[-1])
        waited = [r for r in prompts if r.started_at is None]
        computed = step(scheduler)
        of_pools = [num for name, num in computed.items() if name.startswith("p")]
        assert sum(of_pools) <= PART  # beside the prompts that still had to be computed
        passed += of_prompts * sum(r.started_at is not None for r in waited)
        started = [r for r in pools if r.started_at is not None]
        assert started == pools[: len(started)]  # in the order of arrival
        if started:
            del pools[: len(started)]
            passed = 0
        # The prompts of the step in which its turn comes may pass a pooled request, too
        assert passed <= (POOLED_PART - 1) * of_pooled + MOST + 3 * of_prompts


def test_requests_of_each_kind_start_in_the_order_of_arrival() -> None:
    kinds = [pooled, prompt, pooled, prompt, prompt, pooled]
    scheduler = scheduler_of(*(kind(f"r{n}") for n, kind in enumerate(kinds)), max_num_requests=1)
    order: dict[str, None] = {}
    while scheduler.has_work:
        order |= dict.fromkeys(step(scheduler))
    assert list(order) == ["r1", "r3", "r4", "r0", "r2", "r5"]


def test_a_better_priority_goes_before_the_kind_of_request() -> None:
    requests = [
        prompt("late", priority=1),
        pooled("low", priority=2),
        pooled("p", priority=0),
        prompt("chat", priority=0),
        pooled("urgent", priority=-1),
    ]
    scheduler = scheduler_of(*requests, by_priority=True, max_num_requests=1)
    order: dict[str, None] = {}  # a set in order: pooled requests need several steps
    while scheduler.has_work:
        order |= dict.fromkeys(step(scheduler))
    assert list(order) == ["urgent", "chat", "p", "late", "low"]


def test_an_ended_pooled_request_is_never_started() -> None:
    scheduler = scheduler_of(pooled("p0"), pooled("p1"), prompt("chat"), max_num_requests=1)
    scheduler.abort("p0")
    assert [list(step(scheduler)) for _ in range(2)] == [["chat"], ["p1"]]
    assert not scheduler.has_work
