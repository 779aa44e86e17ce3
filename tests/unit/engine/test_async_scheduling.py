"""Asynchronous scheduling: a step is scheduled while another runs, and no token changes."""

from __future__ import annotations

import random

import pytest

from baton.api.outputs import FinishReason
from baton.api.sampling_params import SamplingParams
from engine import LLM
from engine.core.outputs import ModelRunnerOutput
from engine.core.request import RequestStatus
from tests.fakes.checkpoints.demo_model import DEMO_MODEL
from tests.fakes.engine.engine_parts import EOS, FakeRunner, make_request, make_scheduler, shares

pytestmark = pytest.mark.medium

MODEL = str(DEMO_MODEL)
SMALL = {
    "block_size": 8,
    "num_blocks": 40,
    "max_num_requests": 6,
    "max_num_batched_tokens": 64,
    "long_prefill_token_threshold": 32,
}


def draw_requests(seed: int, num: int) -> tuple[list[list[int]], list[SamplingParams]]:
    draw = random.Random(seed)
    prompts = [draw.choices(range(10, 4000), k=draw.randint(1, 150)) for _ in range(num)]
    params = [
        SamplingParams(
            max_tokens=draw.randint(1, 60),
            temperature=draw.choice([0.0, 0.5]),
            seed=index,
            presence_penalty=draw.choice([0.0, 0.5]),
            stop_token_ids=tuple(draw.sample(range(4096), 200)),
        )
        for index in range(num)
    ]
    return prompts, params


@pytest.mark.parametrize("seed", range(3))
def test_tokens_are_the_same_with_it_and_without(seed: int) -> None:
    prompts, params = draw_requests(seed, 24)
    runs = {}
    for asynchronous in (False, True):
        llm = LLM(MODEL, async_scheduling=asynchronous, **SMALL)
        completions = llm.generate(prompts, params)
        runs[asynchronous] = [(c.token_ids, c.finish_reason) for c in completions]
        assert llm.engine.block_pool.num_free == SMALL["num_blocks"]
        assert not llm.engine.step_in_flight
    assert runs[True] == runs[False]
    assert {reason for _, reason in runs[True]} == {FinishReason.STOP, FinishReason.LENGTH}


def test_a_stream_that_is_left_leaves_nothing_in_flight() -> None:
    llm = LLM(MODEL, async_scheduling=True, **SMALL)
    stream = llm.stream("import os", SamplingParams(temperature=0, max_tokens=50))
    for _ in range(3):
        next(stream)
    del stream
    assert not llm.engine.step_in_flight
    assert not llm.engine.has_work
    assert llm.engine.block_pool.num_free == SMALL["num_blocks"]


def test_a_step_in_flight_gives_each_request_one_token_more() -> None:
    scheduler, runner = make_scheduler(long_prefill_token_threshold=3), FakeRunner()
    scheduler.add_request(make_request("a", 5, 10))
    first = scheduler.schedule()
    scheduler.in_flight.begin_step(first)
    assert shares(first) == {"a": 3}
    second = scheduler.schedule()  # the rest of the prompt
    assert shares(second) == {"a": 2}
    scheduler.update(first, runner.execute(first))
    scheduler.in_flight.begin_step(second)
    third = scheduler.schedule()  # a token that nobody knows yet
    assert shares(third) == {"a": 1}
    result = scheduler.update(second, runner.execute(second))
    assert [output.output_index for output in result.outputs] == [0]
    assert third.without_finished() == third


def test_nothing_is_scheduled_behind_the_last_token() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 5, max_tokens=1))
    first = scheduler.schedule()
    scheduler.in_flight.begin_step(first)
    assert not scheduler.schedule().scheduled
    assert scheduler.has_work
    result = scheduler.update(first, FakeRunner().execute(first))
    assert result.outputs[0].finish_reason is FinishReason.LENGTH
    assert not scheduler.has_work


def test_who_ends_meanwhile_is_not_computed_again() -> None:
    scheduler, runner = make_scheduler(), FakeRunner(lambda request: EOS)
    scheduler.add_request(make_request("a", 5))
    first = scheduler.schedule()
    scheduler.in_flight.begin_step(first)
    second = scheduler.schedule()
    assert shares(second) == {"a": 1}
    scheduler.update(first, runner.execute(first))
    left = second.without_finished()
    assert (left.scheduled, left.num_scheduled_tokens) == ((), 0)


def test_blocks_of_an_aborted_request_are_free_when_the_step_has_ended() -> None:
    scheduler = make_scheduler(num_blocks=4)
    pool = scheduler.kv_cache_manager.block_pool
    scheduler.add_request(make_request("a", 5))
    first = scheduler.schedule()
    scheduler.in_flight.begin_step(first)
    output = FakeRunner().execute(first)
    scheduler.abort("a")
    assert pool.num_free == 2
    assert not scheduler.schedule().scheduled
    assert scheduler.update(first, output).outputs == ()
    assert pool.num_free == 4
    assert not scheduler.has_work


def test_who_ends_holds_its_blocks_until_the_step_behind_has_written_into_them() -> None:
    scheduler, runner = make_scheduler(num_blocks=4), FakeRunner(lambda request: EOS)
    pool = scheduler.kv_cache_manager.block_pool
    scheduler.add_request(make_request("a", 4))
    first = scheduler.schedule()
    output = runner.execute(first)
    scheduler.in_flight.begin_step(first)
    second = scheduler.schedule()
    assert second.may_run_ahead
    scheduler.in_flight.begin_step(second)
    assert scheduler.update(first, output).outputs[0].finish_reason is FinishReason.STOP
    assert pool.num_free == 2  # the surplus step writes token 5, into the second block
    assert scheduler.has_work
    assert scheduler.update(second, ModelRunnerOutput({"a": (7,)})).outputs == ()
    assert pool.num_free == 4
    assert not scheduler.has_work


@pytest.mark.parametrize(
    ("params", "ahead"),
    [
        (SamplingParams(temperature=0.5, logprobs=1), True),
        (SamplingParams(presence_penalty=0.5), False),
        (SamplingParams(min_tokens=3), False),
    ],
)
def test_a_step_waits_for_tokens_that_the_host_must_know(
    params: SamplingParams, ahead: bool
) -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 5, params=params))
    first = scheduler.schedule()
    scheduler.in_flight.begin_step(first)
    assert scheduler.schedule().may_run_ahead is ahead


def test_nobody_is_preempted_while_a_step_runs() -> None:
    scheduler, runner = make_scheduler(num_blocks=4, block_size=4), FakeRunner()
    for name in "ab":
        scheduler.add_request(make_request(name, 7, 6))  # two blocks; token 2 needs a third
    first = scheduler.schedule()
    assert shares(first) == {"a": 7, "b": 7}
    scheduler.in_flight.begin_step(first)
    second = scheduler.schedule()  # position 7 still has room
    assert shares(second) == {"a": 1, "b": 1}
    scheduler.update(first, runner.execute(first))
    scheduler.in_flight.begin_step(second)
    assert not scheduler.schedule().scheduled  # position 8 has not
    assert scheduler.num_preemptions == 0
    scheduler.update(second, runner.execute(second))
    assert shares(scheduler.schedule()) == {"a": 1}
    assert scheduler.requests["b"].status is RequestStatus.PREEMPTED
