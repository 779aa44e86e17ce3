"""What one caller's calls may hold of a server before and beside requests.

    a call whose message has not come      its place, and what has come of up to 8 MiB
    a health watch, a reflection stream    its place, for as long as it likes

gRPC itself bounds both by connection only, and takes connections by the hundred.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

from baton.api.errors import DeadlineExceededError, InvalidRequestError, OverloadedError

# 8 MiB each. Beyond that, a call's message stays with its client until another one has come.
MAX_COMING = 32
# How many calls may wait for their turn. Each takes 25 KiB and several times its headers.
MAX_WAITING = 1024
# 8 MiB in it: 64 KiB/s, as over HTTP.
MESSAGE_TIMEOUT_S = 138.0
MAX_STREAMS = 512  # watches, of each caller
MAX_MESSAGE_STREAMS = 32  # that go on to bring messages, such as reflection's


class _Caller:
    """The places that one caller holds."""

    __slots__ = ("num_held", "turns")

    def __init__(self) -> None:
        self.num_held = 0
        self.turns = asyncio.Semaphore(MAX_COMING)


class _Places:
    """Counts what each caller holds; forgets who holds nothing."""

    def __init__(self, limit: int, what: str) -> None:
        self._limit, self._what = limit, what
        self._callers: dict[str, _Caller] = {}

    @contextlib.contextmanager
    def hold(self, caller: str) -> Iterator[_Caller]:
        """Take a place; raises OverloadedError when a caller has too many."""
        holder = self._callers.setdefault(caller, _Caller())
        if holder.num_held >= self._limit:
            raise OverloadedError(f"{self._what}: one caller may have {self._limit} at once")
        holder.num_held += 1
        try:
            yield holder
        finally:
            holder.num_held -= 1
            if not holder.num_held:
                del self._callers[caller]


class HeldCalls:
    """Limits the calls that wait for a message, and the streams, of each caller of one server.

    A caller is named by its key or certificate, or, where anybody may call, by its address.
    """

    def __init__(self) -> None:
        self._coming = _Places(MAX_WAITING, "calls without a message")
        self._streams = _Places(MAX_STREAMS, "health watches")
        self._message_streams = _Places(MAX_MESSAGE_STREAMS, "reflection streams")

    async def only_message(self, caller: str, messages: AsyncIterator[Any]) -> Any:
        """Wait for the one message of a call, when it is the caller's turn to send it.

        Raises:
            InvalidRequestError: none came, or it cannot be read.
            DeadlineExceededError: it did not come in time.
            OverloadedError: too many of the caller's calls have none.
        """
        with self._coming.hold(caller) as holder:
            await holder.turns.acquire()
            try:
                async with asyncio.timeout(MESSAGE_TIMEOUT_S):
                    return await anext(messages)
            except TimeoutError:
                what = f"the call's message did not come within {MESSAGE_TIMEOUT_S:g} s"
                raise DeadlineExceededError(what) from None
            except StopAsyncIteration:
                raise InvalidRequestError("request", "no message came") from None
            finally:
                holder.turns.release()

    @contextlib.asynccontextmanager
    async def turn(self, caller: str) -> AsyncIterator[None]:
        """Wait until it is a caller's turn to send something long."""
        with self._coming.hold(caller) as holder:
            async with holder.turns:
                yield

    def hold_stream(
        self, caller: str, *, has_messages: bool
    ) -> contextlib.AbstractContextManager[object]:
        """Hold a place for a stream that is no request; raises OverloadedError if none is left."""
        places = self._message_streams if has_messages else self._streams
        return places.hold(caller)
