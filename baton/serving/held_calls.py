"""HeldCalls: limits how much of a server's memory, and how many streams, one caller may hold.

    a call whose message has not come      one place, and up to 8 MiB of its message
    a health watch, a reflection stream    one place while the stream lives

gRPC limits calls and their memory only per connection, and accepts hundreds of connections.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

from baton.api.errors import DeadlineExceededError, InvalidRequestError, OverloadedError

# Maximum number of messages, of up to 8 MiB each, that are read from one caller at a time. Further
# messages stay at the caller until one of these has arrived.
MAX_COMING = 32
# Maximum number of a caller's calls that wait for their turn. Each takes 25 KiB, and several times
# the size of its headers.
MAX_WAITING = 1024
# Seconds to receive 8 MiB at 64 KiB/s, the slowest rate that the HTTP server allows, too.
MESSAGE_TIMEOUT_S = 138.0
MAX_STREAMS = 512  # maximum number of health watches per caller
# Maximum number of streams per caller in which the caller sends messages, such as reflection.
MAX_MESSAGE_STREAMS = 32


class _Caller:
    """Counts of the places that one caller holds."""

    __slots__ = ("num_held", "turns")

    def __init__(self) -> None:
        self.num_held = 0
        self.turns = asyncio.Semaphore(MAX_COMING)


class _Places:
    """Counts the places of each caller, and forgets callers that hold none."""

    def __init__(self, limit: int, what: str) -> None:
        self._limit, self._what = limit, what
        self._callers: dict[str, _Caller] = {}

    @contextlib.contextmanager
    def hold(self, caller: str) -> Iterator[_Caller]:
        """Take a place; raises OverloadedError if the caller has too many."""
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
    """Limits of calls that wait for messages, and of open streams, for each caller of one server.

    Callers are distinguished by key or certificate, and unauthenticated callers by address.
    """

    def __init__(self) -> None:
        self._coming = _Places(MAX_WAITING, "calls without a message")
        self._streams = _Places(MAX_STREAMS, "health watches")
        self._message_streams = _Places(MAX_MESSAGE_STREAMS, "reflection streams")

    async def only_message(self, caller: str, messages: AsyncIterator[Any]) -> Any:
        """Wait for the caller's turn to send the only message of a call; return the message.

        Raises:
            InvalidRequestError: no message came, or it is unreadable.
            DeadlineExceededError: the message did not come in time.
            OverloadedError: too many of the caller's calls wait for a message.
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
        """Wait until the caller may send a long message."""
        with self._coming.hold(caller) as holder:
            async with holder.turns:
                yield

    def hold_stream(
        self, caller: str, *, has_messages: bool
    ) -> contextlib.AbstractContextManager[object]:
        """Hold a place for a stream that is no request; raises OverloadedError if none is free."""
        places = self._message_streams if has_messages else self._streams
        return places.hold(caller)
