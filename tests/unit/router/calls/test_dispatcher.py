"""Unit tests of Dispatcher: one call over hand-driven nodes, with their events in every order."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator

import pytest

from baton.api.errors import (
    BatonError,
    DeadlineExceededError,
    EngineDeadError,
    InvalidRequestError,
    NodeUnavailableError,
    OverloadedError,
    RequestCancelledError,
)
from baton.api.outputs import FinishReason, TextDelta
from baton.api.sampling_params import SamplingParams
from baton.link.words import CancelCommand, DecodeCommand, PrefillCommand
from tests.fakes.router.nodes import (
    DECODE_RECEIPT,
    PREFILL_RECEIPT,
    failure,
    join_pair,
    token,
    token_1,
)
from tests.fakes.router.router_scene import PARAMS, Scene, asynchronous

LENGTH, STOP = FinishReason.LENGTH, FinishReason.STOP


# ---------------------------------------------------------------- the ordinary way


@asynchronous
async def test_both_legs_are_sent_at_once_and_name_each_other() -> None:
    scene = Scene()
    await scene.call()
    [prefill] = scene.prefill.of(PrefillCommand)
    [decode] = scene.decode.of(DecodeCommand)
    assert prefill.decode_engine_id == scene.decode.engine_id
    assert decode.prefill_engine_id == scene.prefill.engine_id
    assert prefill.epoch == decode.epoch
    assert prefill.prompt_token_ids == decode.prompt_token_ids == [1, 2, 3]
    assert prefill.sampling_params == decode.sampling_params == PARAMS
    assert scene.prefill.node.load.num_open_tokens == 3
    assert scene.decode.node.load.num_open_tokens == 6
    scene.prefill.say(token_1("a", 10, epoch=scene.epoch))
    await scene.pause()
    assert scene.prefill.node.load.num_open_tokens == 0  # its work is done: policies may know
    scene.decode.say(token("a", 1, 11, epoch=scene.epoch))
    scene.decode.say(token("a", 2, 12, epoch=scene.epoch, finish=LENGTH))
    await scene.end()
    assert scene.token_ids == [10, 11, 12]
    scene.assert_no_leg_is_left()


@asynchronous
async def test_the_last_output_and_no_other_carries_the_receipt_of_both_nodes() -> None:
    scene = Scene()
    await scene.call()
    scene.prefill.say(token_1("a", 10, epoch=scene.epoch))
    await scene.pause()
    scene.decode.say(token("a", 1, 11, epoch=scene.epoch, finish=STOP))
    await scene.end()
    assert [item.receipt is not None for item in scene.outputs] == [False, True]
    receipt = scene.outputs[-1].receipt
    assert receipt is not None
    assert (receipt.prefill, receipt.decode) == (PREFILL_RECEIPT, DECODE_RECEIPT)
    assert (receipt.prefill_node, receipt.decode_node) == ("p0", "d0")
    assert (receipt.num_prompt_tokens, receipt.num_output_tokens) == (3, 2)
    assert 0 < receipt.ttft_s <= receipt.total_s


@asynchronous
async def test_a_call_that_ended_on_the_decode_node_is_not_cancelled_anywhere() -> None:
    scene = Scene()
    await scene.call()
    scene.prefill.say(token_1("a", 10, epoch=scene.epoch))
    scene.decode.say(token("a", 1, 11, epoch=scene.epoch, finish=LENGTH))
    await scene.end()
    assert scene.prefill.of(CancelCommand) == scene.decode.of(CancelCommand) == []


# ---------------------------------------------------------------- order


@asynchronous
async def test_tokens_that_overtake_token_1_wait_for_it() -> None:
    scene = Scene()
    await scene.call()
    scene.decode.say(token("a", 2, 12, epoch=scene.epoch, finish=LENGTH))
    scene.decode.say(token("a", 1, 11, epoch=scene.epoch))
    await scene.pause()
    assert scene.token_ids == []
    scene.prefill.say(token_1("a", 10, epoch=scene.epoch))
    await scene.end()
    [output] = scene.outputs
    assert (output.output_index, output.token_ids) == (0, (10, 11, 12))
    assert output.receipt is not None


@asynchronous
async def test_duplicates_are_dropped() -> None:
    scene = Scene()
    await scene.call()
    for _ in range(2):
        scene.prefill.say(token_1("a", 10, epoch=scene.epoch))
        scene.decode.say(token("a", 1, 11, epoch=scene.epoch))
        await scene.pause()
    scene.decode.say(token("a", 1, 99, epoch=scene.epoch))
    scene.decode.say(token("a", 2, 12, epoch=scene.epoch, finish=LENGTH))
    await scene.end()
    assert scene.token_ids == [10, 11, 12]


@asynchronous
async def test_deltas_of_another_epoch_are_not_for_this_call() -> None:
    scene = Scene()
    await scene.call()
    scene.decode.say(failure("a", "UNAVAILABLE", "of before", epoch=scene.epoch + 1))
    scene.prefill.say(token_1("a", 99, epoch=scene.epoch - 1))
    scene.prefill.say(token_1("a", 10, epoch=scene.epoch, finish=STOP))
    await scene.end()
    assert scene.token_ids == [10]


# ---------------------------------------------------------------- calls that end with token 1


@asynchronous
async def test_with_one_token_to_make_the_decode_node_is_never_asked() -> None:
    scene = Scene()
    await scene.call(params=SamplingParams(max_tokens=1, seed=1))
    assert scene.prefill.of(PrefillCommand)[0].decode_engine_id == ""
    assert scene.decode.of(DecodeCommand) == []
    scene.prefill.say(token_1("a", 10, epoch=scene.epoch, finish=LENGTH))
    await scene.end()
    receipt = scene.outputs[-1].receipt
    assert receipt is not None
    assert (receipt.decode, receipt.decode_node) == (None, "")
    assert scene.decode.of(CancelCommand) == []
    scene.assert_no_leg_is_left()


@asynchronous
async def test_with_room_for_one_token_the_decode_node_is_never_asked() -> None:
    scene = Scene(max_model_len=4)
    await scene.call()
    assert scene.decode.of(DecodeCommand) == []
    scene.prefill.say(token_1("a", 10, epoch=scene.epoch, finish=LENGTH))
    await scene.end()


@asynchronous
async def test_when_token_1_is_an_end_token_the_decode_node_is_told() -> None:
    scene = Scene()
    await scene.call()
    scene.prefill.say(token_1("a", 10, epoch=scene.epoch, finish=STOP))
    await scene.end()
    assert scene.token_ids == [10]
    assert scene.decode.of(CancelCommand) == [CancelCommand("a", scene.epoch)]
    scene.assert_no_leg_is_left()


# ---------------------------------------------------------------- errors


ERRORS: list[tuple[str, type[BatonError]]] = [
    ("UNAVAILABLE", NodeUnavailableError),
    ("DEADLINE_EXCEEDED", DeadlineExceededError),
    ("RESOURCE_EXHAUSTED", OverloadedError),
    ("CANCELLED", RequestCancelledError),
    ("INTERNAL", NodeUnavailableError),
    ("A CODE OF A LATER VERSION", EngineDeadError),
]


@pytest.mark.parametrize(("code", "kind"), ERRORS)
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_what_a_node_says_becomes_our_error_and_both_nodes_are_told_to_stop(
    code: str, kind: type[BatonError], side: str
) -> None:
    async def run() -> None:
        scene = Scene()
        await scene.call()
        hand = scene.prefill if side == "prefill" else scene.decode
        hand.say(failure("a", code, "what went wrong", epoch=scene.epoch))
        with pytest.raises(kind, match="what went wrong") as caught:
            await scene.end()
        assert type(caught.value) is kind
        for node in (scene.prefill, scene.decode):
            assert node.of(CancelCommand) == [CancelCommand("a", scene.epoch)]
        scene.assert_no_leg_is_left()

    asyncio.run(run())


@asynchronous
async def test_an_invalid_argument_keeps_the_name_of_its_field() -> None:
    scene = Scene()
    await scene.call()
    scene.decode.say(failure("a", "INVALID_ARGUMENT", "prompt: too long: 9", epoch=scene.epoch))
    with pytest.raises(InvalidRequestError) as caught:
        await scene.end()
    assert (caught.value.field, caught.value.problem) == ("prompt", "too long: 9")


@asynchronous
async def test_when_the_time_is_up_the_call_fails_and_is_cancelled_on_both_nodes() -> None:
    scene = Scene()
    await scene.call(timeout_s=0.01)
    with pytest.raises(DeadlineExceededError):
        await scene.end()
    for node in (scene.prefill, scene.decode):
        assert node.of(CancelCommand) == [CancelCommand("a", scene.epoch)]
    scene.assert_no_leg_is_left()


@asynchronous
async def test_the_deadline_counts_after_token_1_too() -> None:
    scene = Scene()
    await scene.call(timeout_s=0.02)
    scene.prefill.say(token_1("a", 10, epoch=scene.epoch))
    with pytest.raises(DeadlineExceededError):
        await scene.end()
    assert scene.token_ids == [10]


@asynchronous
async def test_when_the_client_leaves_both_nodes_are_told_to_stop() -> None:
    scene = Scene()
    await scene.call()
    scene.prefill.say(token_1("a", 10, epoch=scene.epoch))
    await scene.pause()
    assert scene.task is not None
    scene.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await scene.end()
    for node in (scene.prefill, scene.decode):
        assert node.of(CancelCommand) == [CancelCommand("a", scene.epoch)]
    scene.assert_no_leg_is_left()


@asynchronous
async def test_without_a_pair_the_call_fails_at_once_and_says_why() -> None:
    scene = Scene()
    scene.decode.leave()
    await scene.call()
    with pytest.raises(NodeUnavailableError, match="no decode node has joined"):
        await scene.end()
    assert scene.dispatcher.num_open == 0


# ---------------------------------------------------------------- nodes that go away


@asynchronous
async def test_losing_the_prefill_node_before_token_1_fails_the_call() -> None:
    scene = Scene()
    await scene.call()
    scene.prefill.leave()
    with pytest.raises(NodeUnavailableError, match="prefill node p0 went away"):
        await scene.end()
    assert scene.decode.of(CancelCommand) == [CancelCommand("a", scene.epoch)]


@pytest.mark.parametrize("seen", [True, False], ids=["token 1 forwarded", "token 1 just come"])
def test_losing_the_prefill_node_after_token_1_does_not_hurt(seen: bool) -> None:
    async def run() -> None:
        scene = Scene()
        await scene.call()
        scene.prefill.say(token_1("a", 10, epoch=scene.epoch))
        if seen:
            await scene.pause()
        scene.prefill.leave()
        await scene.pause()
        scene.decode.say(token("a", 1, 11, epoch=scene.epoch, finish=LENGTH))
        await scene.end()
        assert scene.token_ids == [10, 11]

    asyncio.run(run())


@asynchronous
async def test_losing_the_decode_node_after_token_1_fails_the_call() -> None:
    scene = Scene()
    await scene.call()
    scene.prefill.say(token_1("a", 10, epoch=scene.epoch))
    await scene.pause()
    scene.decode.leave()
    with pytest.raises(NodeUnavailableError, match="decode node d0 went away"):
        await scene.end()
    assert scene.token_ids == [10]


# ---------------------------------------------------------------- request ids


@asynchronous
async def test_an_id_that_is_in_use_is_refused_and_the_first_call_goes_on() -> None:
    scene = Scene()
    await scene.call()
    with pytest.raises(InvalidRequestError, match="request_id: 'a' is in use"):
        await anext(scene.dispatcher.run(scene.make()))
    scene.prefill.say(token_1("a", 10, epoch=scene.epoch, finish=STOP))
    await scene.end()
    assert scene.token_ids == [10]


@asynchronous
async def test_an_id_that_is_used_again_is_another_epoch_so_that_nodes_tell_them_apart() -> None:
    scene = Scene()
    for _ in range(3):
        await scene.call(timeout_s=0.01)
        with pytest.raises(DeadlineExceededError):
            await scene.end()
    other = Scene()  # a router that was restarted
    await other.call()
    epochs = [command.epoch for command in scene.prefill.of(PrefillCommand)] + [other.epoch]
    assert len(set(epochs)) == 4
    assert all(0 <= epoch < 2**32 for epoch in epochs)


@asynchronous
async def test_calls_at_once_are_spread_and_do_not_mix() -> None:
    scene = Scene()
    p1, d1 = join_pair(scene.pool, 1)
    p1.reach(scene.decode)
    scene.prefill.reach(d1)
    streams: dict[str, AsyncIterator[TextDelta]] = {}
    firsts = {}
    for name in ("a", "b"):
        streams[name] = scene.dispatcher.run(scene.make(name))
        firsts[name] = asyncio.ensure_future(anext(streams[name]))
        await scene.pause()
    assert len(scene.prefill.of(PrefillCommand)) == len(p1.of(PrefillCommand)) == 1
    assert len(scene.decode.of(DecodeCommand)) == len(d1.of(DecodeCommand)) == 1
    for hand in (scene.prefill, p1):
        command = hand.of(PrefillCommand)[0]
        value = ord(command.request_id)
        hand.say(token_1(command.request_id, value, epoch=command.epoch, finish=STOP))
    for name, first in firsts.items():
        assert (await first).token_ids == (ord(name),)
        with pytest.raises(StopAsyncIteration):
            await anext(streams[name])
    assert scene.dispatcher.num_open == 0


@asynchronous
async def test_a_prompt_that_no_node_can_hold_is_told_so() -> None:
    scene = Scene()
    call = dataclasses.replace(scene.make(), prompt_token_ids=[1] * 160)  # as many as they have
    with pytest.raises(NodeUnavailableError, match="takes requests of 161 tokens"):
        await anext(scene.dispatcher.run(call))
