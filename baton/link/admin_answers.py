"""AdminAnswers: a node's answers to operators' questions, over its link to a router.

An answer is sent in parts. A part waits until no event is queued on the link, so that a large
answer hardly delays tokens. Each part is a protobuf message; all parts merged are the answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from baton.api.errors import BatonError, status_name
from baton.link.words import AdminCall, AdminReply, RequestError

logger = logging.getLogger(__name__)

PART_BYTES = 64 * 2**10  # approximate size
MAX_PART_BYTES = 4 * 2**20  # a router accepts no longer messages
MAX_REPLY_BYTES = 16 * 2**20
MAX_OPEN_CALLS = 8  # per router
MAX_TIMEOUT_S = 120.0

Answer = Callable[[AdminCall], Awaitable[Sequence[bytes]]]


class AdminAnswers:
    """The calls of operators that are being answered over one link.

    Args:
        answer: makes the answer to a call; None: every call gets an error.
        send: queues a part on the link when no event waits.
    """

    def __init__(
        self, answer: Answer | None, send: Callable[[AdminReply], Awaitable[None]]
    ) -> None:
        self._answer = answer
        self._send = send
        self._tasks: set[asyncio.Task[None]] = set()

    def take(self, call: AdminCall) -> None:
        """Start a task that answers a call; return at once."""
        task = asyncio.create_task(self._run(call))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """Cancel all answers because the link is gone."""
        for task in self._tasks:
            task.cancel()

    async def _run(self, call: AdminCall) -> None:
        answer = await self._answer_or_error(call)
        if isinstance(answer, RequestError):
            await self._send(AdminReply(call.call_id, error=answer))
            return
        for number, part in enumerate(answer, 1):
            await self._send(AdminReply(call.call_id, part, last=number == len(answer)))

    async def _answer_or_error(self, call: AdminCall) -> Sequence[bytes] | RequestError:
        if self._answer is None:
            return RequestError("UNIMPLEMENTED", "this node answers no admin calls")
        if len(self._tasks) > MAX_OPEN_CALLS:
            return RequestError(
                "RESOURCE_EXHAUSTED", f"{MAX_OPEN_CALLS} admin calls are open here, the limit"
            )
        try:
            async with asyncio.timeout(min(call.timeout_s, MAX_TIMEOUT_S)):
                answer = await self._answer(call)
        except TimeoutError:
            return RequestError("DEADLINE_EXCEEDED", f"no answer within {call.timeout_s:g} s")
        except BatonError as error:
            return RequestError(status_name(error), str(error))
        except Exception as error:  # operators are told of unexpected errors, too
            logger.exception("unexpected error in an admin call")
            return RequestError("INTERNAL", f"internal error: {type(error).__name__}")
        num_bytes, largest = sum(map(len, answer)), max(map(len, answer), default=0)
        if num_bytes > MAX_REPLY_BYTES or largest > MAX_PART_BYTES:
            return RequestError(
                "RESOURCE_EXHAUSTED",
                f"the answer has {num_bytes} bytes, the limit is {MAX_REPLY_BYTES}",
            )
        return answer
