"""Unit tests of choices: n outputs of a prompt are n calls with parallel streams."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator

import pytest

from baton.access.identity import Principal
from baton.api.errors import InvalidRequestError, NodeUnavailableError
from baton.api.outputs import FinishReason, TextDelta, join_deltas
from baton.api.prompt import choice_seed
from baton.api.sampling_params import MAX_SEED, SamplingParams
from router.calls.call import Call, Terms
from router.calls.dispatcher import Dispatcher
from router.fleet.prefix.prompt_hashes import HashKind
from router.intake.choices import accept_choices, check_num_outputs, merge_streams
from router.intake.prompt_reader import Prompt
from router.policies.least_tokens import LeastTokens
from tests.fakes.router.intakes import make_intake
from tests.fakes.router.nodes import make_pool
from tests.fakes.router.router_scene import asynchronous


def accept(params: SamplingParams, request_id: str = "a", *more_prompts: Prompt) -> list[Call]:
    return asyncio.run(accept_async(params, request_id, *more_prompts))


async def accept_async(
    params: SamplingParams, request_id: str, *more_prompts: Prompt
) -> list[Call]:
    intake = make_intake(
        Dispatcher(make_pool(), LeastTokens()), None, vocab_size=100, default_timeout_s=60.0
    )
    terms = Terms(received_at=0.0, session_id="s", priority=3, principal=Principal(name="alice"))
    return await accept_choices(intake, [[1, 2], *more_prompts], params, terms, request_id)


def test_one_output_has_the_requests_id_and_seed() -> None:
    [call] = accept(SamplingParams(seed=7))
    assert (call.request_id, call.sampling_params) == ("a", SamplingParams(seed=7))


def test_each_output_has_its_own_id_and_the_next_seed_of_its_prompt() -> None:
    calls = accept(SamplingParams(n=2, seed=7, top_k=5), "a", [3], [4])
    assert [call.request_id for call in calls] == ["a", "a-1", "a-2", "a-3", "a-4", "a-5"]
    assert [call.prompt_token_ids for call in calls] == [[1, 2], [1, 2], [3], [3], [4], [4]]
    assert [call.sampling_params for call in calls] == [
        SamplingParams(seed=seed, top_k=5) for seed in (7, 8) * 3
    ]
    assert {
        (call.terms.session_id, call.terms.priority, call.terms.principal.name) for call in calls
    } == {("s", 3, "alice")}


def test_without_id_and_seed_they_are_drawn_once_for_all_of_a_prompt() -> None:
    first, second, third, _ = accept(SamplingParams(n=2), "", [3])
    assert first.request_id
    assert second.request_id == f"{first.request_id}-1"
    assert first.sampling_params.seed is not None
    assert second.sampling_params.seed == choice_seed(first.sampling_params.seed, 1)
    assert third.sampling_params.seed != first.sampling_params.seed


def test_many_prompts_do_not_hold_up_the_router_until_all_are_checked() -> None:
    turns = 0

    async def run() -> None:
        nonlocal turns
        task = asyncio.create_task(accept_async(SamplingParams(n=4), "a", *[[3]] * 99))
        while not task.done():
            turns += 1
            await asyncio.sleep(0)
        assert len(task.result()) == 400
        # One prompt's outputs share its tokens, however many they are.
        assert task.result()[0].prompt_token_ids is task.result()[3].prompt_token_ids

    asyncio.run(run())
    assert turns >= 100


def test_outputs_have_a_limit_and_prompts_must_be_there() -> None:
    check_num_outputs("prompts", 1024)
    for num in (0, 1025):
        with pytest.raises(InvalidRequestError, match=f"^prompt: must make 1 to 1024 .* got {num}"):
            check_num_outputs("prompt", num)


def test_seeds_wrap_around_and_stay_seeds() -> None:
    assert choice_seed(MAX_SEED, 1) == -MAX_SEED - 1
    assert choice_seed(-1, 1) == 0
    SamplingParams(seed=choice_seed(MAX_SEED, 127))


class Source:
    """Streams that know how far they were read and that they were closed."""

    def __init__(self, num_streams: int, num_deltas: int = 5) -> None:
        self.num_read = [0] * num_streams
        self.closed = [False] * num_streams
        self.fails: set[int] = set()
        self.waits: set[int] = set()
        self._num_deltas = num_deltas
        self.streams = [self._stream(index) for index in range(num_streams)]

    async def _stream(self, number: int) -> AsyncGenerator[TextDelta, None]:
        try:
            for index in range(self._num_deltas):
                if number in self.waits:
                    await asyncio.Event().wait()
                if number in self.fails and index == 1:
                    raise NodeUnavailableError("gone")
                self.num_read[number] += 1
                yield TextDelta(str(number), index, (index,), f"{index} ")
                await asyncio.sleep(0)
        finally:
            self.closed[number] = True


@pytest.mark.parametrize("num_streams", [1, 2, 5])
def test_every_delta_arrives_once_and_in_its_streams_order(num_streams: int) -> None:
    async def run() -> None:
        source = Source(num_streams)
        merged = [item async for item in merge_streams(source.streams)]
        assert len(merged) == 5 * num_streams
        for number in range(num_streams):
            found = [delta.output_index for index, delta in merged if index == number]
            assert found == list(range(5))
        assert all(source.closed)

    asyncio.run(run())


@asynchronous
async def test_a_slow_reader_holds_the_streams_up() -> None:
    source = Source(2, num_deltas=1000)
    async with contextlib.aclosing(merge_streams(source.streams)) as merged:
        for _ in range(5):
            await anext(merged)
            for _ in range(50):
                await asyncio.sleep(0)
        # Those that were taken, those that wait, and one in the hands of each stream.
        assert sum(source.num_read) <= 5 + 2 + 2
    assert all(source.closed)


@asynchronous
async def test_who_stops_reading_ends_all_streams() -> None:
    source = Source(3)
    source.waits = {1}
    async with contextlib.aclosing(merge_streams(source.streams)) as merged:
        await anext(merged)
    assert all(source.closed)


@pytest.mark.parametrize("num_streams", [1, 3])
def test_the_error_of_one_ends_all(num_streams: int) -> None:
    async def run() -> None:
        source = Source(num_streams)
        source.fails, source.waits = {0}, {2}
        with pytest.raises(NodeUnavailableError, match=r"^gone$"):
            assert [item async for item in merge_streams(source.streams)] == []
        assert all(source.closed)

    asyncio.run(asyncio.wait_for(run(), 10))


def test_joined_deltas_are_one_output() -> None:
    parts = [TextDelta("a", 0, (1,), "x"), TextDelta("a", 1, (2, 3), "yz", FinishReason.STOP)]
    assert join_deltas(parts) == TextDelta("a", 0, (1, 2, 3), "xyz", FinishReason.STOP)


def test_outputs_of_one_prompt_name_its_blocks_once() -> None:
    calls = accept(SamplingParams(n=2), "a", [3])
    assert calls[0].hashes is calls[1].hashes
    assert calls[1].hashes is not calls[2].hashes
    other = dataclasses.replace(calls[0], prompt_token_ids=[5] * 32)
    assert other.hashes.of(HashKind(16, "sha256")) != calls[0].hashes.of(HashKind(16, "sha256"))


@asynchronous
async def test_streams_begin_one_at_a_time_so_that_others_are_served_in_between() -> None:
    begun: list[int] = []
    most_at_once = 0

    async def stream(number: int) -> AsyncGenerator[TextDelta, None]:
        begun.append(number)  # here a call looks at its whole prompt
        yield TextDelta("r", number, (), "")

    async def watch() -> None:
        nonlocal most_at_once
        while len(begun) < 50:
            before = len(begun)
            await asyncio.sleep(0)
            most_at_once = max(most_at_once, len(begun) - before)

    watching = asyncio.create_task(watch())
    merged = [item async for item in merge_streams([stream(number) for number in range(50)])]
    await watching
    assert len(merged) == 50
    assert most_at_once <= 2
