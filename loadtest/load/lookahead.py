"""Lookahead: prepares requests' messages before they are due, so that sending is not delayed."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator

from loadtest.load.workload import Conversation, PlannedRequest
from loadtest.targets.base import Target

MAX_CONVERSATIONS = 1000
MAX_BYTES = 4_000_000

Prepared = tuple[PlannedRequest, bytes]
PreparedConversation = tuple[Prepared, ...]


class Lookahead:
    """A queue of prepared conversations; when one is removed, the next is prepared.

    Args:
        conversations: the conversations in the order of their due times. The queue limits their
            number and their bytes.
    """

    def __init__(
        self, conversations: Iterator[Conversation], target: Target, vocab_size: int
    ) -> None:
        self._conversations = conversations
        self._target = target
        self._vocab_size = vocab_size
        self._ready: deque[PreparedConversation] = deque()
        self._num_bytes = 0

    def fill(self) -> None:
        """Prepare as many conversations as the queue's limits allow, which takes a while."""
        while self._make_one():
            pass

    def next_conversation(self) -> PreparedConversation | None:
        """Remove and return the next conversation; None after the last."""
        if not self._ready:
            self._make_one()
        if not self._ready:
            return None
        prepared = self._ready.popleft()
        self._num_bytes -= _num_bytes(prepared)
        # Prepare the next conversation later, after the requests that are due now are sent.
        asyncio.get_running_loop().call_soon(self._make_one)
        return prepared

    def _make_one(self) -> bool:
        if len(self._ready) >= MAX_CONVERSATIONS or self._num_bytes >= MAX_BYTES:
            return False
        conversation = next(self._conversations, None)
        if conversation is None:
            return False
        prepared = tuple(
            (request, self._target.prepare(request.prompt.make(self._vocab_size),
                                           request.output_length))
            for request in conversation
        )  # fmt: skip
        self._ready.append(prepared)
        self._num_bytes += _num_bytes(prepared)
        return True


def _num_bytes(conversation: PreparedConversation) -> int:
    return sum(len(payload) for _, payload in conversation)
