"""AdminReplies: what one node answers to operators, part by part, until it is whole."""

from __future__ import annotations

import asyncio
import itertools

from baton.admin_answers import MAX_REPLY_BYTES
from baton.errors import NodeUnavailableError
from baton.link import AdminReply
from router.call_errors import error_of


class AdminReplies:
    """The open admin calls of one node, on the router's loop.

    What a node says of a call that is not open is passed over; it can make nobody keep more of an
    answer than the limit.
    """

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self._open: dict[int, tuple[asyncio.Future[bytes], bytearray]] = {}

    def begin(self) -> tuple[int, asyncio.Future[bytes]]:
        """The id of a new call, and its answer; to be ended with `end`."""
        call_id = next(self._ids) % 2**32
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._open[call_id] = (answer, bytearray())
        return call_id, answer

    def end(self, call_id: int) -> None:
        """Nobody waits for this answer any more."""
        self._open.pop(call_id, None)

    def take(self, reply: AdminReply) -> None:
        """The next part of an answer."""
        answer, parts = self._open.get(reply.call_id, (None, bytearray()))
        if answer is None or answer.done():
            return
        parts += reply.part
        if reply.error is not None:
            answer.set_exception(error_of(reply.error))
        elif len(parts) > MAX_REPLY_BYTES:
            answer.set_exception(
                NodeUnavailableError(f"the answer has more than {MAX_REPLY_BYTES} bytes")
            )
        elif reply.last:
            answer.set_result(bytes(parts))

    def close(self, why: str) -> None:
        """The node is gone: end all open calls with an error."""
        for answer, _ in self._open.values():
            if not answer.done():
                answer.set_exception(NodeUnavailableError(why))
