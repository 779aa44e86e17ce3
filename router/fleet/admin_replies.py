"""AdminReplies: joins the parts of a node's answers to operators' questions into whole answers."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError

from baton.api.errors import NodeUnavailableError, error_of
from baton.link.admin_answers import MAX_REPLY_BYTES
from baton.link.words import AdminReply
from baton.v1 import admin_pb2
from baton.wire.parts import count_parts

# Maximum number of fields in one message of an answer, and in the whole answer. A field takes about
# 100 bytes of memory.
MAX_PART_PARTS, MAX_REPLY_PARTS = 2**17, 2**19


@dataclass(slots=True)
class _Open:
    answer: asyncio.Future[admin_pb2.NodeAdminResponse]
    response: admin_pb2.NodeAdminResponse = field(default_factory=admin_pb2.NodeAdminResponse)
    num_bytes: int = 0
    num_parts: int = 0


class AdminReplies:
    """The questions to one node that wait for an answer, on the router's event loop.

    Replies to unknown or closed questions are ignored. The size of an answer is limited.
    """

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self._open: dict[int, _Open] = {}

    def open_call(self) -> tuple[int, asyncio.Future[admin_pb2.NodeAdminResponse]]:
        """Begin to wait for an answer; return the id of the question and the future of the answer.

        The caller must call `close_call` in the end.
        """
        call_id = next(self._ids) % 2**32
        opened = self._open[call_id] = _Open(asyncio.get_running_loop().create_future())
        return call_id, opened.answer

    def close_call(self, call_id: int) -> None:
        """Stop waiting for an answer."""
        self._open.pop(call_id, None)

    def on_reply(self, reply: AdminReply) -> None:
        """Add the next part to the answer that it belongs to."""
        opened = self._open.get(reply.call_id)
        if opened is None or opened.answer.done():
            return
        opened.num_bytes += len(reply.part)
        if reply.error is not None:
            opened.answer.set_exception(error_of(reply.error))
        elif opened.num_bytes > MAX_REPLY_BYTES:
            opened.answer.set_exception(
                NodeUnavailableError(f"the answer has more than {MAX_REPLY_BYTES} bytes")
            )
        else:
            self._merge(opened, reply)

    def _merge(self, opened: _Open, reply: AdminReply) -> None:
        try:
            num_parts = count_parts(reply.part, admin_pb2.NodeAdminResponse, MAX_PART_PARTS)
            opened.num_parts += num_parts
            if num_parts > MAX_PART_PARTS or opened.num_parts > MAX_REPLY_PARTS:
                problem = f"the answer has more than {MAX_REPLY_PARTS} parts, or one message of it"
                problem += f" more than {MAX_PART_PARTS}"
                opened.answer.set_exception(NodeUnavailableError(problem))
                return
            opened.response.MergeFromString(reply.part)
        except DecodeError:
            opened.answer.set_exception(NodeUnavailableError("its answer is no message"))
            return
        if reply.last:
            opened.answer.set_result(opened.response)

    def close(self, why: str) -> None:
        """End all waits with an error, because the node is gone."""
        for opened in self._open.values():
            if not opened.answer.done():
                opened.answer.set_exception(NodeUnavailableError(why))
