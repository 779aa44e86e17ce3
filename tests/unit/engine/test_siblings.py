"""`n` outputs of one prompt: computed once, its full blocks shared, each output its own."""

from __future__ import annotations

import random

import pytest

from baton.api.errors import InvalidRequestError
from baton.api.sampling_params import SamplingParams
from baton.wire.types import sampling_params_to_proto
from engine import LLM
from engine.core.request import Request, RequestStatus
from engine.core.scheduler import Scheduler
from tests.fakes.checkpoints.demo_model import DEMO_MODEL
from tests.fakes.engine.engine_parts import make_request, make_scheduler, step

pytestmark = pytest.mark.medium

MODEL = str(DEMO_MODEL)


def add_family(scheduler: Scheduler, num_prompt_tokens: int, names: str = "abc") -> list[Request]:
    family = [make_request(name, num_prompt_tokens) for name in names]
    family[0].siblings = family[1:]
    scheduler.add_request(family[0])
    return family


def test_siblings_wait_for_the_prompt_and_go_on_from_its_full_blocks() -> None:
    scheduler = make_scheduler(block_size=4, long_prefill_token_threshold=6)
    first, *rest = add_family(scheduler, 10)
    assert {r.status for r in rest} == {RequestStatus.WAITING_FOR_SHARED_KVS}
    assert step(scheduler)[0] == {"a": 6}
    assert step(scheduler)[0] == {"a": 4}
    assert step(scheduler)[0] == {"a": 1, "b": 2, "c": 2}  # the tail of the prompt only
    for sibling in rest:
        assert sibling.block_ids[:2] == first.block_ids[:2]
        assert sibling.block_ids[2] != first.block_ids[2]
        assert sibling.num_hit_tokens == 8
    assert scheduler.kv_cache_manager.block_pool.num_free == 100 - 5


def test_a_prompt_shorter_than_a_block_has_nothing_to_share() -> None:
    scheduler = make_scheduler(block_size=4)
    add_family(scheduler, 3)
    assert step(scheduler)[0] == {"a": 3}
    assert step(scheduler)[0] == {"a": 1, "b": 3, "c": 3}


def test_when_the_first_one_is_aborted_the_next_computes_the_prompt() -> None:
    scheduler = make_scheduler(block_size=4, long_prefill_token_threshold=6)
    add_family(scheduler, 10)
    step(scheduler)
    scheduler.abort("b")
    scheduler.abort("a")
    assert step(scheduler)[0] == {"c": 6}
    scheduler.abort("c")
    assert not scheduler.has_work
    assert scheduler.kv_cache_manager.block_pool.num_free == 100


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_output_i_is_that_of_seed_plus_i(prefix_cache: bool, asynchronous: bool) -> None:
    draw = random.Random(0)
    llm = LLM(
        MODEL,
        block_size=8,
        num_blocks=40,
        max_num_requests=6,
        max_num_batched_tokens=64,
        prefix_cache=prefix_cache,
        async_scheduling=asynchronous,
    )
    prompts = [draw.choices(range(10, 4000), k=draw.randint(1, 100)) for _ in range(6)]
    many = SamplingParams(n=3, max_tokens=30, temperature=0.5, seed=7)
    shared = llm.generate(prompts, many)
    assert [c.choice_index for c in shared] == [0, 1, 2] * len(prompts)
    alone = LLM(MODEL, prefix_cache=False).generate(
        [prompt for prompt in prompts for _ in range(3)],
        [SamplingParams(max_tokens=30, temperature=0.5, seed=7 + i) for i in range(3)] * 6,
    )
    assert [c.token_ids for c in shared] == [c.token_ids for c in alone]
    assert llm.engine.block_pool.num_free == 40


def test_a_stream_gives_the_pieces_of_all_outputs() -> None:
    llm = LLM(MODEL)
    params = SamplingParams(n=3, max_tokens=8, temperature=0.8, seed=1)
    texts = ["", "", ""]
    for delta in llm.stream("def main():", params):
        texts[delta.choice_index] += delta.text
    assert texts == [c.text for c in llm.generate("def main():", params)]


def test_through_a_router_there_is_one_output() -> None:
    with pytest.raises(InvalidRequestError, match=r"^n: must be 1 for a single stream, got 2$"):
        sampling_params_to_proto(SamplingParams(n=2))


@pytest.mark.parametrize("n", [0, 129, 1.5])
def test_n_has_limits(n: int) -> None:
    with pytest.raises(InvalidRequestError, match=r"^n: "):
        SamplingParams(n=n)
