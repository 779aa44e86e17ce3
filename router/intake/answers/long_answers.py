"""LongAnswers: builds parts of responses with many logprobs in a thread, beside the event loop.

Logprobs of a long prompt are hundreds of thousands of objects; building them takes a second or
more, in which the event loop must serve other requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from baton.api.outputs import TextDelta, count_logprobs

# At most this many logprobs are built on the event loop, which takes a millisecond or two
MAX_LOGPROBS_HERE = 500

T = TypeVar("T")


class LongAnswers:
    """Runs a single thread: more threads would keep the GIL from the event loop for too long."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "long-answers")

    async def make(self, delta: TextDelta, make: Callable[[], T]) -> T:
        """Return the result of ``make``; run it in the thread if the delta has many logprobs."""
        has_any = bool(delta.logprobs or delta.prompt_logprobs)
        if not has_any or count_logprobs(delta) <= MAX_LOGPROBS_HERE:
            return make()
        return await asyncio.get_running_loop().run_in_executor(self._thread, make)

    def close(self) -> None:
        """End the thread when its current work is done."""
        self._thread.shutdown(wait=False, cancel_futures=True)
