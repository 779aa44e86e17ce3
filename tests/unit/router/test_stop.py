"""Unit tests of a dispatcher that stops: calls end wherever they are, and no new ones begin."""

from __future__ import annotations

import asyncio

import pytest

from baton.api.errors import NodeUnavailableError
from router.calls.recovery.retry_budget import RetryOptions
from tests.fakes.router.nodes import token_1
from tests.fakes.router.router_scene import Scene, asynchronous

RETRIES = RetryOptions(max_attempts=3, pair_timeout_s=60)


@asynchronous
async def test_a_call_in_progress_ends_without_another_try() -> None:
    scene = Scene(options=RETRIES)
    await scene.call("a")
    scene.prefill.say(token_1("a", 7, epoch=scene.epoch))
    await scene.pause()
    scene.dispatcher.stop("the end")
    with pytest.raises(NodeUnavailableError, match=r"^the end$"):
        await scene.end()
    assert scene.token_ids == [7]
    with pytest.raises(NodeUnavailableError, match=r"^the end$"):
        await anext(scene.dispatcher.run(scene.make("b")))
    scene.assert_no_leg_is_left()


@asynchronous
async def test_calls_that_wait_for_nodes_or_for_their_turn_end_too() -> None:
    scene = Scene(options=RETRIES)
    scene.pool.remove(scene.decode.node)
    await scene.call("waits for nodes")
    admission = scene.dispatcher.admission
    admission._capacity.has_room = lambda *_, **__: False  # type: ignore[method-assign]
    first, scene.task = scene.task, None
    await scene.call("waits for its turn")
    assert admission.state().num_queued == 1
    scene.dispatcher.stop("the end")
    assert first is not None and scene.task is not None  # noqa: PT018
    for task in (first, scene.task):
        with pytest.raises(NodeUnavailableError, match=r"^the end$"):
            await asyncio.wait_for(task, 5)
    assert scene.dispatcher.num_open == 0
