"""LongAnswers: what is made of many logprobs is made in a thread, while the router serves others.

Logprobs of a long prompt are hundreds of thousands of objects: to make them, or their texts, takes
a second and more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from baton.api.outputs import TextDelta, count_logprobs

MAX_LOGPROBS_HERE = 500  # a millisecond or two

T = TypeVar("T")


class LongAnswers:
    """One thread for all: several would take most turns of the interpreter from the loop."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "long-answers")

    async def make(self, delta: TextDelta, make: Callable[[], T]) -> T:
        """What a function makes of a piece of an output; nobody else uses its own meanwhile."""
        has_any = bool(delta.logprobs or delta.prompt_logprobs)
        if not has_any or count_logprobs(delta) <= MAX_LOGPROBS_HERE:
            return make()
        return await asyncio.get_running_loop().run_in_executor(self._thread, make)

    def close(self) -> None:
        """End the thread behind what it is at."""
        self._thread.shutdown(wait=False, cancel_futures=True)
