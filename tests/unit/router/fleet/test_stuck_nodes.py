"""Tests of nodes that send beats while their engine stands still: others take over their work."""

from __future__ import annotations

import pytest

from baton.api.errors import NodeUnavailableError
from baton.api.sampling_params import SamplingParams
from baton.link.words import DecodeCommand, NodeBeat
from router.calls.recovery.retry_budget import RetryOptions
from tests.fakes.router.nodes import token, token_1
from tests.fakes.router.router_scene import Scene, asynchronous

STUCK = NodeBeat(num_free_blocks=10, stalled_s=10.0, stalled_thread="engine")
OPTIONS = RetryOptions(trial_pause_s=0, pair_timeout_s=0, return_timeout_s=0)


@asynchronous
async def test_requests_of_a_node_that_stands_still_go_on_elsewhere() -> None:
    scene = Scene(options=OPTIONS, num_decode=2)
    await scene.call(params=SamplingParams(max_tokens=4, seed=1))
    (stuck,) = (hand for hand in scene.decodes if hand.node.legs)
    (other,) = (hand for hand in scene.decodes if hand is not stuck)
    scene.prefill.say(token_1("a", 0, epoch=scene.epoch))
    stuck.say(token("a", 1, 1, epoch=scene.epoch))
    await scene.pause()
    scene.pool.on_event(stuck.node, STUCK)
    await scene.pause()
    (command,) = other.of(DecodeCommand)
    assert command.output_token_ids == (0, 1)
    assert stuck.node in scene.pool.nodes  # it may go on, and is asked nothing until then
    assert [node.node_name for node in scene.pool.fleet.decodes] == [other.node.name]
    assert not stuck.is_hung_up
    scene.pool.on_event(stuck.node, NodeBeat(num_free_blocks=10, longest_round_s=12.0))
    assert len(scene.pool.fleet.decodes) == 2
    # It has done such long steps before: this one may be one of these.
    scene.pool.on_event(stuck.node, NodeBeat(stalled_s=30.0, longest_round_s=12.0))
    assert len(scene.pool.fleet.decodes) == 2
    assert scene.task is not None
    scene.task.cancel()


@asynchronous
async def test_the_only_node_of_a_kind_keeps_its_requests() -> None:
    scene = Scene(options=OPTIONS)
    await scene.call()
    scene.pool.on_event(scene.decode.node, STUCK)
    await scene.pause()
    assert scene.decode.node.legs
    assert scene.pool.fleet
    scene.decode.leave()  # its process ended itself
    with pytest.raises(NodeUnavailableError, match="went away"):
        await scene.end()
