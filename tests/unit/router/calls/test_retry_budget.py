"""Tests of the retry budget and of silent nodes: which calls wait, how long, and which end."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest

from baton.api.errors import NodeUnavailableError, RequestCancelledError
from baton.link.words import NodeBeat
from router.calls.recovery.retry_budget import RetryBudget
from router.fleet.node import SILENT_BEATS
from tests.fakes.router.nodes import HandNode, failure
from tests.fakes.router.router_scene import Scene, asynchronous
from tests.unit.router.calls.test_retries import OPTIONS, last, scene_of, until_attempt


def make_silent(hand: HandNode) -> None:
    hand.node.num_missed_beats = SILENT_BEATS + 2


@asynchronous
async def test_what_fails_with_a_silent_node_is_a_loss_and_goes_elsewhere() -> None:
    scene = scene_of(1, 5, RetryBudget(ratio=0, floor=0))
    await scene.call()
    for number in (1, 2, 3, 4):  # one more than may fail
        prefill, decode, command = await until_attempt(scene, number)
        assert not decode.node.is_silent
        make_silent(decode)  # stopped; its peers noticed a little earlier than the router
        prefill.say(failure("a", "UNAVAILABLE", "cannot be reached", epoch=command.epoch))
    _, decode, _ = await until_attempt(scene, 5)
    assert not decode.node.is_silent
    assert decode.node.health._partners == []  # nobody is blamed


@asynchronous
async def test_what_a_silent_node_had_begun_waits_until_it_is_lost_and_is_a_suspect_then() -> None:
    scene = scene_of(2, 1)
    await scene.call()
    prefill, decode, command = last(scene)  # the prompt is being computed
    make_silent(prefill)
    decode.say(failure("a", "UNAVAILABLE", "its prefill node is silent", epoch=command.epoch))
    await scene.pause()
    assert last(scene)[2] is command
    prefill.leave()
    other, _, _ = await until_attempt(scene, 2)
    assert other is not prefill
    # The other node is kept for this request alone.
    assert scene.dispatcher.recoveries.suspects.rooms


@asynchronous
async def test_a_silent_node_that_is_heard_again_is_no_suspect() -> None:
    scene = scene_of(1, 1)
    await scene.call()
    prefill, decode, command = last(scene)
    make_silent(prefill)
    decode.say(failure("a", "UNAVAILABLE", "its prefill node is silent", epoch=command.epoch))
    await scene.pause()
    scene.pool.on_event(prefill.node, NodeBeat(num_free_blocks=10))
    await until_attempt(scene, 2)
    assert not scene.dispatcher.recoveries.suspects.rooms


@asynchronous
async def test_a_call_waits_for_the_budget_and_ends_with_its_deadline() -> None:
    now = 100.0
    budget = RetryBudget(ratio=0, floor=2, clock=lambda: now)
    scene = scene_of(1, 3, budget)
    assert [budget.acquire_retry() for _ in range(3)] == [True, True, False]
    await scene.call(timeout_s=30)
    _, decode, command = last(scene)
    decode.say(failure("a", "UNAVAILABLE", "refused", epoch=command.epoch))
    await scene.pause()
    assert budget.num_waiting == 1
    assert last(scene)[2] is command
    now = 110.0
    _, decode, command = await until_attempt(scene, 2)
    assert budget.num_waiting == 0
    assert [budget.acquire_retry(), budget.acquire_retry()] == [True, False]
    decode.say(failure("a", "UNAVAILABLE", "refused", epoch=command.epoch))
    await scene.pause()
    assert budget.num_waiting == 1
    scene.dispatcher.abort("a", "enough")
    with pytest.raises(RequestCancelledError):
        await scene.end()
    assert budget.num_waiting == 0


@asynchronous
async def test_a_call_that_waits_for_the_budget_goes_on_when_it_was_a_loss_after_all() -> None:
    budget = RetryBudget(ratio=0, floor=1, clock=lambda: 100.0)
    scene = scene_of(2, 1, budget)
    assert budget.acquire_retry()
    await scene.call()
    prefill, decode, command = last(scene)
    decode.say(failure("a", "UNAVAILABLE", "cannot be reached", epoch=command.epoch))
    await scene.pause()
    assert budget.num_waiting == 1
    prefill.leave()
    await until_attempt(scene, 2)


def test_it_is_a_storm_when_the_next_turn_would_be_too_late() -> None:
    budget = RetryBudget(ratio=0, floor=10, clock=lambda: 100.0)  # one per second
    with contextlib.ExitStack() as waiting:
        for num_waiting in range(60):
            assert budget.is_storm(5.0) is (num_waiting >= 5)
            assert not budget.is_storm(600.0)
            waiting.enter_context(budget.waiting())
        assert budget.is_storm(600.0)  # nobody waits longer than a minute for a turn
    assert not budget.is_storm(5.0)


@asynchronous
async def test_nodes_that_do_not_reach_each_other_for_a_while_are_tried_again_for_so_long() -> None:
    now = 100.0
    options = dataclasses.replace(OPTIONS, failing_for_s=10.0)
    budget = RetryBudget(clock=lambda: now)
    scene = Scene(options=options, num_decode=2, budget=budget)
    await scene.call()
    for number in range(1, 6):  # more than may fail otherwise
        _, decode, command = await until_attempt(scene, number)
        decode.say(failure("a", "UNAVAILABLE", "no beat", epoch=command.epoch))
        now += 1.0
    _, decode, command = await until_attempt(scene, 6)
    now = 120.0
    decode.say(failure("a", "UNAVAILABLE", "no beat", epoch=command.epoch))
    with pytest.raises(NodeUnavailableError, match=r"no beat \(attempt 6 of 3\)"):
        await scene.end()
