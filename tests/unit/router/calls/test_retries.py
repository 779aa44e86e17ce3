"""Unit tests of retries: the next attempt's command and nodes, and calls that are not retried."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses

import msgspec
import pytest

from baton.api.errors import (
    ConfigError,
    DeadlineExceededError,
    InvalidRequestError,
    NodeUnavailableError,
    OverloadedError,
)
from baton.api.outputs import FinishReason
from baton.api.sampling_params import SamplingParams
from baton.link.words import (
    ADAPTER_MISSING,
    CancelCommand,
    DecodeCommand,
    PrefillCommand,
    RequestDelta,
)
from router.calls.placing import MAX_EXPECTING
from router.calls.recovery.retry_budget import RetryBudget, RetryOptions
from router.fleet.adapter_places import AdapterSource
from tests.fakes.router.nodes import HandNode, failure, token, token_1
from tests.fakes.router.router_scene import Scene, asynchronous

LENGTH = FinishReason.LENGTH
OPTIONS = RetryOptions(
    trial_pause_s=0,
    pair_timeout_s=0.05,
    return_timeout_s=0.05,
    first_pause_s=0.001,
    longest_pause_s=0.002,
    failing_for_s=0,
)
PARAMS = SamplingParams(max_tokens=5, seed=1, prompt_logprobs=0)


def scene_of(num_prefill: int, num_decode: int, budget: RetryBudget | None = None) -> Scene:
    return Scene(options=OPTIONS, num_prefill=num_prefill, num_decode=num_decode, budget=budget)


def last(scene: Scene) -> tuple[HandNode, HandNode, PrefillCommand]:
    """The nodes and the prefill command of the newest attempt."""
    attempts = [(c.epoch, c, p) for p in scene.prefills for c in p.of(PrefillCommand)]
    epoch, command, prefill = max(attempts, key=lambda item: item[0])
    (decode,) = [d for d in scene.decodes if any(c.epoch == epoch for c in d.of(DecodeCommand))]
    return prefill, decode, command


async def until_attempt(scene: Scene, number: int) -> tuple[HandNode, HandNode, PrefillCommand]:
    """The ``number``-th attempt, which may have to pause first."""
    async with asyncio.timeout(5):
        while sum(len(p.of(PrefillCommand)) for p in scene.prefills) < number:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    return last(scene)


# ---------------------------------------------------------------- the stream goes on


@asynchronous
async def test_a_lost_decode_node_costs_no_token_and_no_doubles() -> None:
    scene = scene_of(1, 2)
    await scene.call(params=PARAMS)
    prefill, decode, first = last(scene)
    prefill.say(token_1("a", 10, epoch=first.epoch))
    decode.say(token("a", 1, 11, epoch=first.epoch), token("a", 3, 13, epoch=first.epoch))
    await scene.pause()
    decode.leave()
    await scene.pause()
    prefill, other, second = last(scene)
    assert other is not decode
    [command] = other.of(DecodeCommand)
    assert command.output_token_ids == second.output_token_ids == (10, 11)  # 13 is in no stream
    assert command.epoch == second.epoch > first.epoch
    assert command.sampling_params.prompt_logprobs is None  # the client has them
    assert CancelCommand("a", first.epoch) in prefill.of(CancelCommand)
    prefill.say(token_1("a", 98, epoch=first.epoch))  # of before: for nobody
    prefill.say(token("a", 2, 12, epoch=second.epoch))
    await scene.pause()
    other.say(token("a", 3, 13, epoch=second.epoch), token("a", 4, 14, epoch=second.epoch,
              finish=LENGTH))  # fmt: skip
    await scene.end()
    assert [item.token_ids for item in scene.outputs] == [(10, 11), (12,), (13, 14)]
    assert [item.output_index for item in scene.outputs] == [0, 2, 3]
    receipt = scene.outputs[-1].receipt
    assert receipt is not None
    assert (receipt.num_attempts, receipt.decode_node) == (2, other.node.name)
    assert receipt.num_output_tokens == 5
    scene.assert_no_leg_is_left()


@asynchronous
async def test_a_lost_prefill_node_leaves_the_decode_node_as_it_was() -> None:
    scene = scene_of(2, 2)
    await scene.call()
    prefill, decode, first = last(scene)
    prefill.leave()
    await scene.pause()
    other, same, second = last(scene)
    assert other is not prefill
    assert same is decode  # its prefix cache has what had arrived
    assert CancelCommand("a", first.epoch) in decode.of(CancelCommand)
    other.say(token_1("a", 10, epoch=second.epoch, finish=FinishReason.STOP))
    await scene.end()
    assert scene.token_ids == [10]


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_failed_transfer_keeps_the_decode_node_and_leaves_the_prefill_node(side: str) -> None:
    async def run() -> None:
        scene = scene_of(2, 2)
        await scene.call()
        prefill, decode, command = last(scene)
        hand = prefill if side == "prefill" else decode
        hand.say(failure("a", "UNAVAILABLE", "KV did not arrive", epoch=command.epoch))
        other, same, command = await until_attempt(scene, 2)
        assert other is not prefill
        assert same is decode
        other.say(token_1("a", 10, epoch=command.epoch, finish=FinishReason.STOP))
        await scene.end()

    asyncio.run(run())


@asynchronous
async def test_the_last_token_needs_no_decode_node() -> None:
    scene = scene_of(1, 2)
    await scene.call(params=SamplingParams(max_tokens=2, seed=1))
    prefill, decode, first = last(scene)
    prefill.say(token_1("a", 10, epoch=first.epoch))
    await scene.pause()
    decode.leave()
    await scene.pause()
    second = prefill.of(PrefillCommand)[-1]
    assert (second.decode_engine_id, second.output_token_ids) == ("", (10,))
    prefill.say(token("a", 1, 11, epoch=second.epoch, finish=LENGTH))
    await scene.end()
    assert scene.token_ids == [10, 11]
    scene.assert_no_leg_is_left()


@asynchronous
async def test_a_decode_node_that_computes_the_rest_itself_ends_the_prefill_leg() -> None:
    scene = scene_of(1, 1)
    await scene.call()
    prefill, decode, command = last(scene)
    decode.say(token("a", 0, 10, epoch=command.epoch))
    await scene.pause()
    assert prefill.of(CancelCommand) == [CancelCommand("a", command.epoch)]
    assert prefill.node.legs == {}
    prefill.say(token_1("a", 10, epoch=command.epoch))  # it was on its way
    prefill.leave()
    decode.say(token("a", 1, 11, epoch=command.epoch, finish=LENGTH))
    await scene.end()
    assert scene.token_ids == [10, 11]
    receipt = scene.outputs[-1].receipt
    assert receipt is not None
    assert (receipt.prefill, receipt.num_attempts) == (None, 1)
    assert receipt.decode is not None


@asynchronous
async def test_a_delta_that_overlaps_what_was_told_is_cut() -> None:
    scene = scene_of(1, 1)
    await scene.call()
    prefill, decode, command = last(scene)
    prefill.say(token_1("a", 10, epoch=command.epoch))
    await scene.pause()
    delta = token("a", 0, 10, epoch=command.epoch, finish=LENGTH)
    decode.say(_wider(delta, (10, 11, 12)))
    await scene.end()
    assert [item.token_ids for item in scene.outputs] == [(10,), (11, 12)]


def _wider(delta: RequestDelta, token_ids: tuple[int, ...]) -> RequestDelta:
    return msgspec.structs.replace(delta, token_ids=token_ids)


# ---------------------------------------------------------------- preemption


@asynchronous
async def test_a_preempted_request_goes_to_another_decode_node() -> None:
    scene = scene_of(1, 2)
    await scene.call()
    prefill, decode, command = last(scene)
    prefill.say(token_1("a", 10, epoch=command.epoch))
    decode.say(failure("a", "PREEMPTED", "decode: short of memory", epoch=command.epoch))
    _, other, command = await until_attempt(scene, 2)
    assert other is not decode
    assert command.output_token_ids == (10,)


@asynchronous
async def test_preemptions_are_no_failures_but_have_an_end() -> None:
    scene = scene_of(1, 1)
    await scene.call()
    for number in range(1, OPTIONS.max_preemptions + 2):
        _, decode, command = await until_attempt(scene, number)
        decode.say(failure("a", "PREEMPTED", "decode: short of memory", epoch=command.epoch))
    with pytest.raises(OverloadedError, match=r"short of memory \(preempted 21 times\)"):
        await scene.end()
    scene.assert_no_leg_is_left()


# ---------------------------------------------------------------- no more attempts


@asynchronous
async def test_after_three_attempts_the_last_failure_is_told() -> None:
    scene = scene_of(1, 1)
    await scene.call()
    for number in (1, 2, 3):
        _, decode, command = await until_attempt(scene, number)
        decode.say(failure("a", "UNAVAILABLE", f"no {number}", epoch=command.epoch))
    with pytest.raises(NodeUnavailableError, match=r"no 3 \(attempt 3 of 3\)"):
        await scene.end()
    scene.assert_no_leg_is_left()


@pytest.mark.parametrize("code", ["INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "CANCELLED", "?"])
def test_what_the_request_itself_is_at_fault_for_is_not_tried_again(code: str) -> None:
    async def run() -> None:
        scene = scene_of(2, 2)
        await scene.call()
        _, decode, command = last(scene)
        decode.say(failure("a", code, "field: problem", epoch=command.epoch))
        with pytest.raises(Exception, match="problem"):
            await scene.end()
        assert sum(len(p.of(PrefillCommand)) for p in scene.prefills) == 1

    asyncio.run(run())


@asynchronous
async def test_a_dead_engine_is_tried_elsewhere() -> None:
    scene = scene_of(1, 2)
    await scene.call()
    _, decode, command = last(scene)
    decode.say(failure("a", "INTERNAL", "engine", epoch=command.epoch))
    _, other, command = await until_attempt(scene, 2)
    assert other is not decode


@asynchronous
async def test_a_spent_budget_ends_retries_of_failures_but_not_of_lost_nodes() -> None:
    scene = scene_of(1, 3, RetryBudget(ratio=0, floor=0))
    await scene.call()
    _, decode, _ = last(scene)
    decode.leave()
    _, decode, command = await until_attempt(scene, 2)
    decode.say(failure("a", "UNAVAILABLE", "refused", epoch=command.epoch))
    with pytest.raises(NodeUnavailableError, match=r"refused \(too many retries"):
        await scene.end()


@asynchronous
async def test_losing_nodes_is_no_failure_needs_no_budget_and_has_an_end() -> None:
    scene = scene_of(1, 1, RetryBudget(ratio=0, floor=0))
    await scene.call()
    for number in range(1, OPTIONS.max_losses + 2):
        _, decode, _ = await until_attempt(scene, number)
        scene.join("d", 7, incarnation=number).leave()  # others die, too: it is not the call
        decode.leave()
        scene.decodes[0] = scene.join("d", 0, incarnation=number)
        scene.connect()
    with pytest.raises(NodeUnavailableError, match=r"went away \(lost 11 nodes\)"):
        await scene.end()
    scene.assert_no_leg_is_left()


@asynchronous
async def test_what_the_other_node_says_of_a_loss_is_the_same_loss() -> None:
    scene = scene_of(4, 1, RetryBudget(ratio=0, floor=0))
    await scene.call()
    for number in (1, 2):
        prefill, decode, command = await until_attempt(scene, number)
        if number == 1:
            prefill.say(token_1("a", 10, epoch=command.epoch))
        prefill.leave()  # it had said its part: only the decode node knows that it is missed
        await scene.pause()
        decode.say(failure("a", "UNAVAILABLE", "its prefill node is gone", epoch=command.epoch))
    _, decode, _ = await until_attempt(scene, 3)
    assert decode.node.health._partners == []  # nobody is blamed


@asynchronous
async def test_a_failure_becomes_a_loss_when_the_node_turns_out_to_be_gone() -> None:
    scene = scene_of(5, 1)
    await scene.call()
    for number in (1, 2, 3, 4):  # one failure more than the limit
        prefill, decode, command = await until_attempt(scene, number)
        decode.say(failure("a", "UNAVAILABLE", "cannot be reached", epoch=command.epoch))
        await until_attempt(scene, number + 1)
        prefill.leave()  # the router hears of it later than the decode node
        await scene.pause()
    assert scene.task is not None
    assert not scene.task.done()


@asynchronous
async def test_an_engine_that_dies_of_a_request_counts_also_when_its_node_is_gone() -> None:
    scene = scene_of(1, 4)
    await scene.call()
    for number in (1, 2, 3):
        _, decode, command = await until_attempt(scene, number)
        decode.say(failure("a", "INTERNAL", "engine", epoch=command.epoch))
        await scene.pause()
        decode.leave()
    with pytest.raises(NodeUnavailableError, match=r"engine \(attempt 3 of 3\)"):
        await scene.end()


def test_the_budget_grows_with_calls_and_comes_back_with_time() -> None:
    now = 100.0
    budget = RetryBudget(clock=lambda: now)
    assert [budget.acquire_retry() for _ in range(11)] == [True] * 10 + [False]
    for _ in range(10):
        budget.note_call()
    assert [budget.acquire_retry() for _ in range(3)] == [True, True, False]
    now = 109.9
    assert not budget.acquire_retry()
    now = 110.0
    assert [budget.acquire_retry() for _ in range(11)] == [True] * 10 + [False]


def test_options_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_attempts: must be 1 or more, got 0"):
        RetryOptions(max_attempts=0)
    with pytest.raises(ConfigError, match="pair_timeout_s: must be 0 or more"):
        RetryOptions(pair_timeout_s=-1)
    with pytest.raises(ConfigError, match="return_timeout_s: must be 0 or more"):
        RetryOptions(return_timeout_s=-1)


# ---------------------------------------------------------------- waiting for a pair


@asynchronous
async def test_the_only_decode_node_may_take_a_moment_to_restart() -> None:
    scene = scene_of(1, 1)
    scene.dispatcher.recoveries.options = RetryOptions(pair_timeout_s=5)
    await scene.call()
    scene.decode.leave()
    await scene.pause()
    assert scene.task is not None
    assert not scene.task.done()
    again = scene.join("d", 0, incarnation=1)
    await scene.pause()
    assert again.of(DecodeCommand) == []  # not connected yet
    scene.prefill.reach(again)
    await scene.pause()
    [command] = again.of(DecodeCommand)
    again.say(token("a", 0, 10, epoch=command.epoch, finish=LENGTH))
    await scene.end()
    assert scene.token_ids == [10]


@asynchronous
async def test_without_a_pair_in_time_the_call_fails_and_says_why_twice() -> None:
    scene = scene_of(1, 1)
    await scene.call()
    scene.decode.leave()
    with pytest.raises(NodeUnavailableError, match="d0 went away; no decode node has joined"):
        await scene.end()
    scene.assert_no_leg_is_left()


@asynchronous
async def test_the_only_decode_node_is_waited_for_longer_when_it_went_away_by_itself() -> None:
    """Cut the node's link for a while: requests before and during the cut all succeed."""
    scene = scene_of(1, 1)
    scene.dispatcher.recoveries.options = dataclasses.replace(OPTIONS, return_timeout_s=5)
    await scene.call()
    scene.decode.leave()
    await asyncio.sleep(10 * OPTIONS.pair_timeout_s)
    assert scene.task is not None
    assert not scene.task.done()
    again = HandNode(scene.pool, scene.decode.node.registration)
    scene.prefill.reach(again)
    async with asyncio.timeout(5):  # regression: the request failed
        while not again.of(DecodeCommand):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    [command] = again.of(DecodeCommand)
    again.say(token("a", 0, 10, epoch=command.epoch, finish=LENGTH))
    await scene.end()
    assert scene.token_ids == [10]


@asynchronous
async def test_a_node_that_an_operator_removed_is_not_waited_for() -> None:
    scene = scene_of(1, 1)
    scene.dispatcher.recoveries.options = dataclasses.replace(OPTIONS, return_timeout_s=60)
    await scene.call()
    scene.pool.expel("d0")
    with pytest.raises(NodeUnavailableError, match="no decode node has joined"):
        await scene.end()


@asynchronous
async def test_not_too_many_calls_wait_for_a_node_to_come_back() -> None:
    scene = scene_of(1, 1)
    scene.dispatcher.recoveries.options = dataclasses.replace(OPTIONS, return_timeout_s=60)
    scene.decode.leave()
    scene.dispatcher.placer.num_waiting = MAX_EXPECTING
    await scene.call()
    with pytest.raises(NodeUnavailableError, match="no decode node has joined"):
        await scene.end()


@asynchronous
async def test_a_call_waits_for_nodes_that_were_there_once_and_not_past_its_deadline() -> None:
    scene = scene_of(1, 1)
    scene.dispatcher.recoveries.options = RetryOptions(pair_timeout_s=60)
    scene.decode.leave()
    await scene.call(timeout_s=0.02)
    with pytest.raises(DeadlineExceededError):
        await scene.end()
    assert scene.prefill.of(PrefillCommand) == []


@asynchronous
async def test_a_call_that_is_cancelled_while_it_waits_leaves_nothing() -> None:
    scene = scene_of(1, 1)
    scene.dispatcher.recoveries.options = RetryOptions(pair_timeout_s=60)
    scene.decode.leave()
    await scene.call()
    assert scene.task is not None
    scene.task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await scene.end()
    assert scene.dispatcher.num_open == 0


@asynchronous
async def test_an_id_in_use_stays_in_use_between_attempts() -> None:
    scene = scene_of(1, 1)
    scene.dispatcher.recoveries.options = RetryOptions(pair_timeout_s=60)
    await scene.call()
    scene.decode.leave()
    await scene.pause()
    with pytest.raises(InvalidRequestError, match="'a' is in use"):
        await anext(scene.dispatcher.run(scene.make()))
    assert scene.task is not None
    scene.task.cancel()


# ---------------------------------------------------------------- adapters

ADAPTER = "a" * 64


@asynchronous
async def test_nodes_that_cannot_load_an_adapter_are_passed_over_without_blame() -> None:
    scene = scene_of(6, 2)  # more nodes than attempts
    scene.pool.adapters.set_sources({ADAPTER: AdapterSource("folder", is_pinned=True)})
    for hand in (*scene.prefills, *scene.decodes):
        hand.node.load.loads_adapters = True
    await scene.call(adapter=ADAPTER)
    tried = set()
    for number in range(1, 6):
        prefill, decode, command = await until_attempt(scene, number)
        tried.add(prefill.node.name)
        for told in (command, decode.of(DecodeCommand)[-1]):
            assert (told.adapter, told.adapter_source) == (ADAPTER, "folder")
            assert told.pins_adapter
        prefill.say(failure("a", ADAPTER_MISSING, "no such folder", epoch=command.epoch))
    prefill, _, command = await until_attempt(scene, 6)
    assert len(tried | {prefill.node.name}) == 6, "none is asked twice"
    assert all(hand.node.health.why == "" for hand in scene.prefills)
    prefill.say(token_1("a", 10, epoch=command.epoch, finish=FinishReason.STOP))
    await scene.pause()
    assert scene.token_ids == [10]


@asynchronous
async def test_an_adapter_that_no_node_can_load_is_one_line_at_once() -> None:
    options = dataclasses.replace(OPTIONS, pair_timeout_s=60)
    scene = Scene(options=options, num_prefill=1, num_decode=1)
    scene.pool.adapters.set_sources({ADAPTER: AdapterSource("folder")})
    for hand in (scene.prefill, scene.decode):
        hand.node.load.loads_adapters = True
    await scene.call(adapter=ADAPTER)
    _, decode, command = last(scene)
    decode.say(failure("a", ADAPTER_MISSING, "no such folder", epoch=command.epoch))
    with pytest.raises(
        NodeUnavailableError, match=r"^no such folder; .* aaaaaaaaaaaa: d0: no such"
    ):
        await scene.end()
    assert scene.outputs == []
    assert len(scene.prefill.of(PrefillCommand)) == 1
