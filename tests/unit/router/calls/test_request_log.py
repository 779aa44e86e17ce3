"""Unit tests of the request log: a record agrees with what happened to its call."""

from __future__ import annotations

import asyncio

import pytest

from baton.api.errors import BatonError, EngineDeadError, RequestCancelledError
from baton.api.outputs import FinishReason
from baton.link.words import CancelCommand, DecodeCommand
from router.api.admin.request_stats import Percentiles, window_stats
from router.calls.call import Call, Terms
from router.calls.recovery.retry_budget import RetryOptions
from router.calls.request_log import MAX_CODE_CHARS, MAX_ERROR_CHARS, RequestLog
from tests.fakes.router.nodes import failure, token, token_1
from tests.fakes.router.router_scene import PARAMS, Scene, asynchronous

RETRIES = RetryOptions(
    max_attempts=3, pair_timeout_s=0.2, return_timeout_s=0.2, first_pause_s=0.001
)


@asynchronous
async def test_a_finished_request_is_told_from_its_arrival_to_its_receipt() -> None:
    scene = Scene()
    log = scene.dispatcher.log
    await scene.call()
    record = log.get("a")
    assert record is not None
    assert (record.state, record.first_token_s, len(log.open)) == ("running", None, 1)
    scene.prefill.say(token_1("a", 11, epoch=scene.epoch))
    await scene.pause()
    assert record.num_output_tokens == log.num_output_tokens == 1
    scene.decode.say(token("a", 1, 12, epoch=scene.epoch))
    scene.decode.say(token("a", 2, 13, epoch=scene.epoch, finish=FinishReason.LENGTH))
    await scene.end()
    assert (record.state, record.finish_reason) == ("finished", FinishReason.LENGTH)
    [attempt] = record.attempts
    assert (attempt.prefill_node, attempt.decode_node) == ("p0", "d0")
    assert record.first_token_s is not None
    assert record.ended_s is not None
    assert 0 <= record.accepted_s <= attempt.began_s <= record.first_token_s <= record.ended_s
    assert record.receipt == scene.outputs[-1].receipt
    assert (log.num_finished, log.num_prompt_tokens, log.num_output_tokens) == (1, 3, 3)
    assert (log.open, dict(log.num_failed)) == ([], {})


@asynchronous
async def test_every_attempt_is_told_with_its_error() -> None:
    scene = Scene(options=RETRIES, num_decode=2)
    await scene.call()
    first = next(hand for hand in scene.decodes if hand.of(DecodeCommand))
    first.say(failure("a", "UNAVAILABLE", "it broke", epoch=scene.epoch))
    await scene.pause()
    scene.prefill.say(token_1("a", 11, epoch=scene.epoch, finish=FinishReason.STOP))
    await scene.end()
    record = scene.dispatcher.log.get("a")
    assert record is not None
    assert [(one.error_code, one.error) for one in record.attempts] == [
        ("UNAVAILABLE", "it broke"),
        ("", ""),
    ]
    assert (record.state, scene.dispatcher.log.num_retried) == ("finished", 1)
    stats = window_stats([scene.dispatcher.log], 60.0)
    assert stats.nodes[first.node.name].num_failed_attempts == 1
    assert stats.num_finished == 1


@asynchronous
async def test_of_an_error_that_a_node_says_at_length_the_beginning_is_kept() -> None:
    scene = Scene(num_decode=2)
    await scene.call()
    node = next(hand for hand in scene.decodes if hand.of(DecodeCommand))
    node.say(failure("a", "c" * 100, "e" * 60_000, epoch=scene.epoch))
    with pytest.raises(EngineDeadError):
        await scene.end()
    record = scene.dispatcher.log.get("a")
    assert record is not None
    [attempt] = record.attempts
    assert len(attempt.error_code) == MAX_CODE_CHARS
    assert len(attempt.error) == len(record.error) == MAX_ERROR_CHARS


@asynchronous
async def test_a_failed_and_a_cancelled_request_are_counted_by_code() -> None:
    scene = Scene()
    log = scene.dispatcher.log
    await scene.call("a")
    scene.prefill.say(failure("a", "RESOURCE_EXHAUSTED", "full", epoch=scene.epoch))
    with pytest.raises(BatonError, match="full"):
        await scene.end()
    await scene.call("b")
    assert scene.task is not None
    scene.task.cancel()
    await asyncio.gather(scene.task, return_exceptions=True)
    assert dict(log.num_failed) == {"RESOURCE_EXHAUSTED": 1, "CANCELLED": 1}
    records = [log.get("a"), log.get("b")]
    assert [record.error for record in records if record] == ["full", "its client went away"]


@asynchronous
async def test_an_aborted_request_ends_on_both_nodes_and_its_client_is_told() -> None:
    scene = Scene()
    await scene.call()
    assert not scene.dispatcher.abort("b", "why")
    assert scene.dispatcher.abort("a", "an operator ended it")
    with pytest.raises(RequestCancelledError, match="an operator ended it"):
        await scene.end()
    for hand in (scene.prefill, scene.decode):
        assert [command.request_id for command in hand.of(CancelCommand)] == ["a"]
    scene.assert_no_leg_is_left()
    record = scene.dispatcher.log.get("a")
    assert record is not None
    assert (record.state, record.error_code) == ("failed", "CANCELLED")


@asynchronous
async def test_a_request_that_waits_for_nodes_can_be_aborted() -> None:
    scene = Scene(options=RetryOptions(max_attempts=3, pair_timeout_s=60))
    scene.prefill.leave()
    await scene.call()
    [record] = scene.dispatcher.log.open
    assert record.state == "queued"
    assert scene.dispatcher.abort("a", "why")
    with pytest.raises(RequestCancelledError):
        await scene.end()


def test_the_oldest_requests_are_forgotten_and_an_id_used_again_is_the_new_request() -> None:
    log = RequestLog(max_requests=2)
    for request_id in ("a", "b", "a", "c"):
        with log.follow(_call(request_id)):
            pass
    assert [record.request_id for record in log.latest()] == ["c", "a"]
    assert log.get("b") is None
    assert sum(log.num_failed.values()) == 4


def test_percentiles_are_nearest_ranks() -> None:
    assert Percentiles.of([]) == Percentiles()
    assert Percentiles.of([float(i) for i in range(100, 0, -1)]) == Percentiles(50, 90, 99, 100)
    assert Percentiles.of([7.0]) == Percentiles(7, 7, 7, 7)


def test_only_what_ended_in_the_window_counts() -> None:
    now = 1000.0
    log = RequestLog(clock=lambda: now)
    with log.follow(_call("a")):
        pass
    now = 1030.0
    with log.follow(_call("b")) as following:
        following.note_attempt("p0", "d0")
        following.note_failure("UNAVAILABLE", "x")
    assert window_stats([log], 60).nodes["p0"].num_failed_attempts == 1
    now = 1100.0
    assert window_stats([log], 60).nodes == {}
    assert window_stats([log], 100).nodes.keys() == {"p0", "d0"}


def _call(request_id: str) -> Call:
    return Call(
        request_id=request_id,
        prompt_token_ids=[1],
        sampling_params=PARAMS,
        terms=Terms(received_at=0.0),
        timeout_s=1,
    )
