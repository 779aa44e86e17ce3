"""Unit tests of OutputBuffer: unread tokens form one piece, no larger than the output."""

from __future__ import annotations

import asyncio
import tracemalloc

import msgspec
import pytest

from baton.api.outputs import FinishReason, TextDelta, TokenLogprobs
from baton.api.sampling_params import SamplingParams
from baton.link.words import NodeRole
from router.calls.output_buffer import MAX_TAKEN, OutputBuffer
from router.calls.wake_ups import WakeUps
from router.fleet.node import LegDelta
from tests.fakes.router.http_scene import until
from tests.fakes.router.nodes import DECODE_RECEIPT, failure, token, token_1
from tests.fakes.router.router_scene import Scene, asynchronous

LOST = LegDelta(NodeRole.DECODE, failure("a", "UNAVAILABLE", "gone", epoch=1))


def test_all_that_came_since_the_last_time_is_one_piece() -> None:
    buffer = OutputBuffer("a", WakeUps())
    assert buffer.pop_delta() is None
    buffer.add_delta(token_1("a", 10, epoch=1))
    buffer.add_token(11)
    assert buffer.pop_delta() == TextDelta("a", 0, (10, 11))
    assert buffer.pop_delta() is None
    buffer.add_token(12)
    buffer.add_delta(token("a", 3, 13, epoch=1, finish=FinishReason.STOP))
    assert buffer.pop_delta() == TextDelta("a", 2, (12, 13), finish_reason=FinishReason.STOP)
    assert buffer.decode_receipt == DECODE_RECEIPT
    assert list(buffer.token_ids) == [10, 11, 12, 13]


def test_logprobs_stay_with_their_tokens_and_those_of_the_prompt_come_once() -> None:
    buffer = OutputBuffer("a", WakeUps())
    one, two, three = (TokenLogprobs(-float(number)) for number in (1, 2, 3))
    replace = msgspec.structs.replace
    first = token_1("a", 10, epoch=1)
    buffer.add_delta(replace(first, logprobs=(one,), prompt_logprobs=(None, two)))
    second = token("a", 1, 11, epoch=1)
    buffer.add_delta(replace(second, logprobs=(two,)))
    assert buffer.pop_delta() == TextDelta(
        "a", 0, (10, 11), logprobs=(one, two), prompt_logprobs=(None, two)
    )
    third = token("a", 2, 12, epoch=1)
    buffer.add_delta(replace(third, logprobs=(three,)))
    assert buffer.pop_delta() == TextDelta("a", 2, (12,), logprobs=(three,))


@asynchronous
async def test_a_reader_sleeps_until_something_comes() -> None:
    buffer = OutputBuffer("a", WakeUps())
    reader = asyncio.create_task(buffer.wait())
    await asyncio.sleep(0)
    assert not reader.done()
    buffer.add_token(1)
    buffer.add_token(2)
    await reader
    await buffer.wait()  # there still is
    buffer.pop_delta()
    reader = asyncio.create_task(buffer.wait())
    await asyncio.sleep(0)
    assert not reader.done()
    buffer.fail(LOST)
    await reader
    assert buffer.failure == LOST
    assert buffer.pop_delta() is None


@asynchronous
async def test_a_long_piece_comes_in_parts_and_others_have_their_turn_between_them() -> None:
    """Regression: a client that had read nothing for long held up the loop for its whole text."""
    buffer, num_tokens = OutputBuffer("a", WakeUps()), 2 * MAX_TAKEN + 5
    one = TokenLogprobs(-1.0)
    for index in range(num_tokens):
        finish = FinishReason.LENGTH if index == num_tokens - 1 else None
        delta = token("a", index, index, epoch=1, finish=finish)
        buffer.add_delta(msgspec.structs.replace(delta, logprobs=(one,)))
    pieces, num_rounds = list[TextDelta](), [0]

    async def count() -> None:
        while True:
            num_rounds[0] += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    while not pieces or pieces[-1].finish_reason is None:
        await buffer.wait()
        piece = buffer.pop_delta()
        assert piece is not None
        pieces.append(piece)
    counting.cancel()
    assert [len(piece.token_ids) for piece in pieces] == [MAX_TAKEN, MAX_TAKEN, 5]
    assert [len(piece.logprobs) for piece in pieces] == [MAX_TAKEN, MAX_TAKEN, 5]
    assert [piece.output_index for piece in pieces] == [0, MAX_TAKEN, 2 * MAX_TAKEN]
    assert [piece.finish_reason for piece in pieces[:2]] == [None, None]
    assert num_rounds[0] >= 2
    assert buffer.pop_delta() == TextDelta("a", num_tokens, (), finish_reason=FinishReason.LENGTH)


@asynchronous
async def test_a_reader_that_left_is_nobody_to_wake() -> None:
    buffer = OutputBuffer("a", WakeUps())
    reader = asyncio.create_task(buffer.wait())
    await asyncio.sleep(0)
    reader.cancel()
    buffer.add_token(1)
    await asyncio.gather(reader, return_exceptions=True)
    await buffer.wait()


@pytest.mark.medium
def test_a_client_that_does_not_read_costs_four_bytes_a_token_and_holds_up_nobody() -> None:
    num_tokens = 20_000

    async def run() -> None:
        scene = Scene(max_model_len=2**30)
        scene.reads.clear()
        await scene.call("slow", SamplingParams(max_tokens=num_tokens + 1, seed=1))
        scene.prefill.say(token_1("slow", 0, epoch=scene.epoch))
        await scene.pause()
        tracemalloc.start()
        for index in range(1, num_tokens):
            scene.decode.say(token("slow", index, index, epoch=scene.epoch))
            if index % 100 == 0:
                await asyncio.sleep(0)
        used_bytes, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert used_bytes < 8 * num_tokens  # an array grows by more than it needs
        scene.reads.set()
        await until(lambda: len(scene.token_ids) == num_tokens)
        assert max(len(item.token_ids) for item in scene.outputs) == MAX_TAKEN
        scene.decode.say(token("slow", num_tokens, 1, epoch=scene.epoch, finish=FinishReason.STOP))
        await scene.end()
        assert len(scene.token_ids) == num_tokens + 1

    asyncio.run(run())
