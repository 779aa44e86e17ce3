"""Unit tests of HeldCalls: the memory and streams that one caller may hold."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from baton.api.errors import DeadlineExceededError, InvalidRequestError, OverloadedError
from baton.serving import held_calls
from baton.serving.held_calls import HeldCalls
from tests.fakes.router.router_scene import asynchronous


class Message:
    """One message that comes when it is told to.

    Attributes:
        is_asked_for: somebody takes what comes of it.
    """

    def __init__(self) -> None:
        self.is_asked_for = False
        self.came = asyncio.Event()

    async def come(self) -> AsyncIterator[str]:
        self.is_asked_for = True
        await self.came.wait()
        yield "message"


@asynchronous
async def test_few_messages_of_one_caller_come_at_once_and_the_others_stay_where_they_are() -> None:
    """Regression: a hundred calls that never sent their last byte took 760 MiB for ever."""
    held, messages = HeldCalls(), [Message() for _ in range(held_calls.MAX_COMING + 2)]
    tasks = [asyncio.create_task(held.only_message("a", one.come())) for one in messages]
    other = Message()
    tasks.append(asyncio.create_task(held.only_message("b", other.come())))
    for _ in range(10):
        await asyncio.sleep(0)
    asked_for = [one.is_asked_for for one in messages]
    assert asked_for == [True] * held_calls.MAX_COMING + [False] * 2
    assert other.is_asked_for
    for one in (*messages, other):
        one.came.set()
    assert set(await asyncio.gather(*tasks)) == {"message"}
    assert not held._coming._callers


@asynchronous
async def test_a_message_that_does_not_come_gives_its_place_back() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(held_calls, "MAX_COMING", 1)
        patch.setattr(held_calls, "MESSAGE_TIMEOUT_S", 0.05)
        held = HeldCalls()
        first = asyncio.create_task(held.only_message("a", Message().come()))
        second = Message()
        second.came.set()
        assert await held.only_message("a", second.come()) == "message"
        with pytest.raises(DeadlineExceededError, match="did not come within"):
            await first


@asynchronous
async def test_calls_without_a_message_are_counted_by_caller() -> None:
    async def nothing() -> AsyncIterator[str]:
        return
        yield

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(held_calls, "MAX_WAITING", 2)
        held = HeldCalls()
        tasks = [asyncio.create_task(held.only_message("a", Message().come())) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError, match="one caller may have 2 at once"):
            await held.only_message("a", Message().come())
        with pytest.raises(InvalidRequestError, match="no message came"):
            await held.only_message("b", nothing())
        for task in tasks:
            task.cancel()
