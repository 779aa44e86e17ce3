"""Pipeline stages with several steps in flight give the tokens and logprobs of one process.

Requests have penalties, grammars, priorities, several outputs and stop tokens; blocks are few, so
that requests are preempted. Large tests draw 2,000 requests for each way to divide the layers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from baton.api.outputs import Completion
from baton.api.sampling_params import SamplingParams
from baton.api.structured_output import StructuredOutput
from engine import LLM
from tests.fakes.checkpoints.demo_model import DEMO_MODEL
from tests.property.num_examples import num_requests

SMALL: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "block_size": 8}
NGRAM = {
    "speculative_method": "ngram",
    "ngram_min": 1,
    "num_speculative_tokens": 3,
    "adaptive_speculation": False,
}
REGEX = StructuredOutput(regex="[a-f]{2,9}( [0-9]+)?")
Drawn = tuple[list[list[int]], list[SamplingParams], list[int]]


def draw_requests(num: int, seed: int) -> Drawn:
    """Draw prompts, some with equal beginnings, their parameters and their priorities."""
    draw = random.Random(seed)
    beginnings = [draw.choices(range(10, 4000), k=60) for _ in range(3)]
    prompts = [
        draw.choice(beginnings)[: draw.choice([0, 0, 24, 60])]
        + draw.choices(range(10, 4000), k=draw.randint(1, 90))
        for _ in range(num)
    ]
    params = [
        SamplingParams(
            n=draw.choice([1, 1, 1, 2]),
            max_tokens=draw.randint(1, 40),
            temperature=draw.choice([0.0, 0.0, 0.7]),
            seed=index,
            repetition_penalty=draw.choice([1.0, 1.0, 1.2]),
            logprobs=draw.choice([None, 2]),
            prompt_logprobs=draw.choice([None, None, None, 1]),
            structured_output=draw.choice([None, None, None, REGEX]),
            stop_token_ids=tuple(draw.sample(range(4096), 50)),
        )
        for index in range(num)
    ]
    return prompts, params, [draw.randint(-2, 2) for _ in range(num)]


def complete(drawn: Drawn, **options: Any) -> list[Completion]:
    """Return the completions of an engine with these options, which must keep nothing."""
    llm = LLM(str(DEMO_MODEL), scheduling_policy="priority", **SMALL, **options)
    try:
        prompts, params, priorities = drawn
        found = llm.generate(prompts, params, priority=priorities)
        assert llm.engine.block_pool.num_free == llm.engine.num_blocks
        assert not llm.engine.step_in_flight
        llm.engine.check()
        if "num_blocks" in options:
            assert llm.metrics().preemptions_total > 0
    finally:
        llm.engine.close()
    return found


def assert_equal(found: list[Completion], expected: list[Completion]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.token_ids == theirs.token_ids
        assert mine.finish_reason == theirs.finish_reason
        assert mine.logprobs == theirs.logprobs
        assert mine.prompt_logprobs == theirs.prompt_logprobs


FEW_BLOCKS: dict[str, Any] = {
    "num_blocks": 75,
    "max_num_requests": 12,
    "max_num_batched_tokens": 64,
    "long_prefill_token_threshold": 32,
}


def test_two_stages() -> None:
    drawn = draw_requests(40, seed=0)
    found = complete(drawn, pipeline_parallel_size=2, **FEW_BLOCKS)
    assert_equal(found, complete(drawn))


@pytest.fixture(scope="module")
def many() -> tuple[Drawn, list[Completion]]:
    drawn = draw_requests(num_requests(2000), seed=1)
    return drawn, complete(drawn)


@pytest.mark.large
@pytest.mark.lengthy
@pytest.mark.timeout(0)
@pytest.mark.parametrize(
    "options",
    [
        {"pipeline_parallel_size": 2},
        {"pipeline_parallel_size": 2, "pipeline_layers": "4,2", **NGRAM},
        {"pipeline_parallel_size": 3, "pipeline_layers": "1,4,1"},
        {"pipeline_parallel_size": 4},
        {"pipeline_parallel_size": 4, **NGRAM},
        {"pipeline_parallel_size": 2, "async_scheduling": False},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_many_requests(
    options: dict[str, Any],
    many: tuple[Drawn, list[Completion]],
    record_property: Callable[[str, object], None],
) -> None:
    drawn, expected = many
    assert_equal(complete(drawn, **options, **FEW_BLOCKS), expected)
    record_property("requests", len(drawn[0]))


@pytest.mark.large
@pytest.mark.timeout(300)
def test_streams_that_are_left_leave_nothing_in_flight() -> None:
    draw = random.Random(2)
    prompts, params, _ = draw_requests(60, seed=2)
    options: dict[str, Any] = {**SMALL, "pipeline_parallel_size": 3, "max_num_requests": 8}
    llm = LLM(str(DEMO_MODEL), **options, num_blocks=200)
    try:
        open_streams: list[Iterator[Any]] = []
        for prompt, one in zip(prompts, params, strict=True):
            open_streams.append(llm.stream(prompt, one))
            for stream in list(open_streams):
                if next(stream, None) is None or draw.random() < 0.2:
                    stream.close()  # type: ignore[attr-defined]
                    open_streams.remove(stream)
            llm.engine.check()
        for stream in open_streams:
            stream.close()  # type: ignore[attr-defined]
        while llm.engine.has_work:
            llm.engine.step()
        assert not llm.engine.step_in_flight
        assert llm.engine.block_pool.num_free == llm.engine.num_blocks
    finally:
        llm.engine.close()
