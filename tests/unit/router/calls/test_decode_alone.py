"""Unit tests of calls that a decode node serves alone: one leg, all tokens from there."""

from __future__ import annotations

import pytest

from baton.api.errors import NodeUnavailableError
from baton.api.outputs import FinishReason
from baton.api.sampling_params import SamplingParams
from baton.link.words import CancelCommand, DecodeCommand, PrefillCommand
from router.calls.recovery.retry_budget import RetryOptions
from tests.fakes.router.nodes import failure, token
from tests.fakes.router.router_scene import Scene, asynchronous

LENGTH = FinishReason.LENGTH
OPTIONS = RetryOptions(
    trial_pause_s=0,
    pair_timeout_s=0.05,
    return_timeout_s=0.05,
    first_pause_s=0.001,
    longest_pause_s=0.002,
)


def scene_of(num_decode: int, *, may_self_prefill: bool = True) -> Scene:
    """A router with the cost policy, and decode nodes that compute prompts."""
    scene = Scene(options=OPTIONS, num_decode=num_decode, may_self_prefill=may_self_prefill)
    scene.prefills.pop().leave()
    return scene


@asynchronous
async def test_without_a_prefill_node_one_leg_is_sent_and_its_tokens_are_forwarded() -> None:
    scene = scene_of(1)
    await scene.call()
    [command] = scene.decode.of(DecodeCommand)
    assert command.prefill_engine_id == ""
    assert scene.decode.node.load.prefill_queue_s > 0  # it has a prompt to compute
    for index in range(3):
        finish = LENGTH if index == 2 else None
        scene.decode.say(token("a", index, 10 + index, epoch=command.epoch, finish=finish))
    await scene.end()
    assert scene.token_ids == [10, 11, 12]
    receipt = scene.outputs[-1].receipt
    assert receipt is not None
    assert (receipt.prefill_node, receipt.decode_node, receipt.prefill) == ("", "d0", None)
    assert scene.decode.of(CancelCommand) == []
    assert scene.decode.node.load.prefill_queue_s == 0
    scene.assert_no_leg_is_left()


@asynchronous
async def test_a_call_of_one_token_is_the_decode_nodes_too() -> None:
    scene = scene_of(1)
    await scene.call(params=SamplingParams(max_tokens=1, seed=1))
    [command] = scene.decode.of(DecodeCommand)
    scene.decode.say(token("a", 0, 10, epoch=command.epoch, finish=LENGTH))
    await scene.end()
    assert scene.token_ids == [10]
    scene.assert_no_leg_is_left()


@asynchronous
async def test_where_it_is_not_allowed_there_is_no_place() -> None:
    scene = scene_of(1, may_self_prefill=False)
    await scene.call()
    with pytest.raises(NodeUnavailableError, match="no prefill node has joined"):
        await scene.end()


@asynchronous
async def test_another_decode_node_goes_on_when_it_is_lost() -> None:
    scene = scene_of(2)
    await scene.call()
    first = next(d for d in scene.decodes if d.of(DecodeCommand))
    epoch = first.of(DecodeCommand)[0].epoch
    first.say(token("a", 0, 10, epoch=epoch), token("a", 1, 11, epoch=epoch))
    await scene.pause()
    first.leave()
    await scene.pause()
    [other] = [d for d in scene.decodes if d is not first]
    [command] = other.of(DecodeCommand)
    assert (command.output_token_ids, command.prefill_engine_id) == ((10, 11), "")
    other.say(token("a", 2, 12, epoch=command.epoch, finish=LENGTH))
    await scene.end()
    assert scene.token_ids == [10, 11, 12]
    scene.assert_no_leg_is_left()


@asynchronous
async def test_a_lost_prefill_node_leaves_the_prompt_to_the_decode_node() -> None:
    scene = scene_of(1)
    prefill = scene.join("p", 0)
    prefill.reach(scene.decode)
    scene.prefills.append(prefill)
    await scene.call()
    [command] = prefill.of(PrefillCommand)
    prefill.leave()
    await scene.pause()
    command_alone = scene.decode.of(DecodeCommand)[-1]
    assert command_alone.epoch != command.epoch
    assert command_alone.prefill_engine_id == ""
    scene.decode.say(token("a", 0, 10, epoch=command_alone.epoch, finish=LENGTH))
    await scene.end()
    scene.assert_no_leg_is_left()


@asynchronous
async def test_one_that_hands_it_back_is_tried_again_when_there_is_no_other() -> None:
    scene = scene_of(1)
    await scene.call()
    epoch = scene.decode.of(DecodeCommand)[0].epoch
    scene.decode.say(failure("a", "PREEMPTED", "decode: preempted", epoch=epoch))
    for _ in range(200):
        await scene.pause()
        if len(scene.decode.of(DecodeCommand)) == 2:
            break
    command = scene.decode.of(DecodeCommand)[-1]
    assert command.epoch != epoch
    scene.decode.say(token("a", 0, 10, epoch=command.epoch, finish=LENGTH))
    await scene.end()
    scene.assert_no_leg_is_left()
