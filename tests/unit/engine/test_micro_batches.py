"""Micro-batches: with pipeline stages, several steps are in flight, each with other requests."""

from __future__ import annotations

import random
from collections import deque

import pytest

from baton.api.errors import ConfigError
from baton.api.sampling_params import SamplingParams
from baton.engine_config import EngineConfig
from engine.core.outputs import SchedulerOutput
from engine.core.request import RequestStatus
from engine.core.scheduler import Scheduler
from models.parallel.shards import stage_layers
from tests.fakes.engine.engine_parts import FakeRunner, make_request, make_scheduler, shares


class Pipeline:
    """Steps of a scheduler in flight, as `Engine.execute` keeps them."""

    def __init__(self, scheduler: Scheduler, num_stages: int) -> None:
        scheduler.in_flight.num_stages = num_stages
        self.scheduler, self._num_stages = scheduler, num_stages
        self._in_flight = deque[SchedulerOutput]()

    def step(self) -> dict[str, int]:
        """Schedule a step, maybe end the oldest one; return the tokens of the scheduled one."""
        scheduled = self.scheduler.schedule()
        self.scheduler.check()
        if scheduled.scheduled:
            self.scheduler.in_flight.begin_step(scheduled)
            self._in_flight.append(scheduled)
        if self._in_flight and (
            not scheduled.scheduled or len(self._in_flight) == self._num_stages
        ):
            oldest = self._in_flight.popleft()
            self.scheduler.update(oldest, FakeRunner().execute(oldest))
        return shares(scheduled)

    def decoding(self, num_requests: int) -> None:
        """Add requests, and compute their prompts."""
        for index in range(num_requests):
            self.scheduler.add_request(make_request(f"r{index}", 4, 1000))
        assert len(self.step()) == num_requests
        assert self.step() == {}


def names(first: int, end: int) -> set[str]:
    return {f"r{index}" for index in range(first, end)}


@pytest.mark.parametrize("num_stages", [2, 4])
def test_requests_that_decode_are_divided_among_the_steps_in_flight(num_stages: int) -> None:
    pipeline = Pipeline(make_scheduler(max_num_requests=16), num_stages)
    pipeline.decoding(8)
    share = 8 // num_stages
    for _ in range(3):
        for first in range(0, 8, share):
            assert pipeline.step() == dict.fromkeys(names(first, first + share), 1)


def test_micro_batches_become_equal_again_when_requests_end() -> None:
    pipeline = Pipeline(make_scheduler(max_num_requests=16), 2)
    pipeline.decoding(8)
    pipeline.step()
    for name in names(0, 4):
        pipeline.scheduler.abort(name)
    assert [len(pipeline.step()) for _ in range(8)] == [2] * 8


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_no_request_is_left_out_for_long(num_stages: int) -> None:
    draw = random.Random(num_stages)
    scheduler = make_scheduler(2000, max_num_requests=64)
    pipeline = Pipeline(scheduler, num_stages)
    latest: dict[str, int] = {}
    for number in range(400):
        if len(scheduler.requests) < 40:
            for index in range(draw.randint(0, 3)):
                name = f"r{number}-{index}"
                scheduler.add_request(make_request(name, draw.randint(1, 9), draw.randint(1, 60)))
        if scheduler.requests and draw.random() < 0.2:
            scheduler.abort(draw.choice(sorted(scheduler.requests)))
        latest |= dict.fromkeys(pipeline.step(), number)
        for name, request in scheduler.requests.items():
            if request.status is RequestStatus.RUNNING:
                assert number - latest.setdefault(name, number) < 3 * num_stages


def test_chunks_of_one_prompt_are_in_flight_together_but_no_token_that_is_not_known() -> None:
    scheduler = make_scheduler(long_prefill_token_threshold=3)
    pipeline = Pipeline(scheduler, 4)
    scheduler.add_request(make_request("a", 8, 10))
    assert [pipeline.step() for _ in range(3)] == [{"a": 3}, {"a": 3}, {"a": 2}]
    assert scheduler.requests["a"].num_tokens_pending == 1
    assert [pipeline.step() for _ in range(3)] == [{}, {}, {}]  # each ends a step
    assert pipeline.step() == {"a": 1}


@pytest.mark.parametrize(
    "params", [SamplingParams(presence_penalty=0.5), SamplingParams(prompt_logprobs=1)]
)
def test_chunks_wait_if_the_host_must_know_the_chunk_before(params: SamplingParams) -> None:
    scheduler = make_scheduler(long_prefill_token_threshold=3)
    pipeline = Pipeline(scheduler, 2)
    scheduler.add_request(make_request("a", 5, params=params))
    assert [pipeline.step() for _ in range(3)] == [{"a": 3}, {}, {"a": 2}]


def test_a_request_is_preempted_once_all_steps_have_ended() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    pipeline = Pipeline(scheduler, 2)
    for name in "ab":
        scheduler.add_request(make_request(name, 7, 6))  # two blocks; token 2 needs a third
    assert pipeline.step() == {"a": 7, "b": 7}
    assert pipeline.step() == {}
    assert [pipeline.step(), pipeline.step()] == [{"a": 1}, {"b": 1}]  # position 7 has room
    assert pipeline.step() == {}  # position 8 has not
    assert scheduler.num_preemptions == 0
    assert pipeline.step() == {"a": 1}
    assert scheduler.requests["b"].status is RequestStatus.PREEMPTED


def test_requests_whose_kv_has_arrived_start_in_several_steps() -> None:
    pipeline = Pipeline(make_scheduler(max_num_requests=16), 2)
    for name in names(0, 8):
        pipeline.scheduler.park(make_request(name, 4, 10))
        assert pipeline.scheduler.grant(name) is not None
        pipeline.scheduler.commit(name, 5)
    assert [len(pipeline.step()), len(pipeline.step())] == [4, 4]


def test_layers_of_stages() -> None:
    spans = [stage_layers(12, stage, 3, (5, 4, 3)) for stage in range(3)]
    assert spans == [(0, 5), (5, 9), (9, 12)]
    with pytest.raises(ConfigError, match=r"^pipeline_layers: must be 12 layers .*, got 11$"):
        stage_layers(12, 0, 2, (8, 3))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("8,4,1", "one number for each of the 2 stages"),
        ("8", "one number for each of the 2 stages"),
        ("8,x", "numbers above 0"),
        ("8,0", "numbers above 0"),
        ("8,", "numbers above 0"),
    ],
)
def test_wrong_numbers_of_layers_are_refused(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"^pipeline_layers: must .*{problem}"):
        EngineConfig(pipeline_parallel_size=2, pipeline_layers=text)
    assert EngineConfig(pipeline_parallel_size=2, pipeline_layers="8,4").stage_layers == (8, 4)
    assert EngineConfig(pipeline_layers="decodes").stage_layers == ()
