"""Lookahead: requests made ready before they are due, so that sending them takes no time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator

from loadtest.targets.base import Target
from loadtest.workload import PlannedRequest

MAX_REQUESTS = 1000
MAX_PROMPT_TOKENS = 1_000_000

Prepared = tuple[PlannedRequest, bytes]


class Lookahead:
    """A queue of ready messages; one is made for each that is taken.

    Args:
        requests: in order; how many are ready is limited by number and by tokens.
    """

    def __init__(self, requests: Iterator[PlannedRequest], target: Target, vocab_size: int) -> None:
        self._requests = requests
        self._target = target
        self._vocab_size = vocab_size
        self._ready: deque[Prepared] = deque()
        self._num_tokens = 0

    def fill(self) -> None:
        """Make as many as may be ready; takes a while."""
        while self._make_one():
            pass

    def take(self) -> Prepared | None:
        """The next one; None when there are no more."""
        if not self._ready:
            self._make_one()
        if not self._ready:
            return None
        prepared = self._ready.popleft()
        self._num_tokens -= prepared[0].num_prompt_tokens
        # After what is due now has been sent.
        asyncio.get_running_loop().call_soon(self._make_one)
        return prepared

    def _make_one(self) -> bool:
        if len(self._ready) >= MAX_REQUESTS or self._num_tokens >= MAX_PROMPT_TOKENS:
            return False
        request = next(self._requests, None)
        if request is None:
            return False
        token_ids = request.prompt_token_ids(self._vocab_size)
        payload = self._target.prepare(token_ids, request.output_length)
        self._ready.append((request, payload))
        self._num_tokens += len(token_ids)
        return True
