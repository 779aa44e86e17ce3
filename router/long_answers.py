"""Long answers: what is made of many logprobs is made in a thread, while the router serves others.

Logprobs of a long prompt are hundreds of thousands of objects: to make them, or their texts, takes
a second and more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from baton.outputs import TextDelta, count_logprobs

MAX_LOGPROBS_HERE = 500  # a millisecond or two

T = TypeVar("T")


async def made_of(delta: TextDelta, make: Callable[[], T]) -> T:
    """What a function makes of a piece of an output; nobody else uses what it uses meanwhile."""
    is_long = bool(delta.logprobs or delta.prompt_logprobs) and (
        count_logprobs(delta) > MAX_LOGPROBS_HERE
    )
    return await asyncio.to_thread(make) if is_long else make()
