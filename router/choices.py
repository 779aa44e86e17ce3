"""A request for n outputs as n requests for one, and their streams as one stream again.

Shared by every public API. Knows neither gRPC nor HTTP.
"""

from __future__ import annotations

import asyncio
import dataclasses
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import TypeVar

from baton.prompt import choice_request_id, choice_seed, draw_seed
from router.intake import GenerationRequest

Item = TypeVar("Item")


def split_choices(request: GenerationRequest) -> list[GenerationRequest]:
    """One request per output that is wanted of a prompt; ids and seeds are those of `engine.LLM`.

    Output i (from 0) is what a request with seed + i gives.
    """
    params = request.sampling_params
    if params.n == 1:
        return [request]
    request_id = request.request_id or uuid.uuid4().hex
    seed = draw_seed() if params.seed is None else params.seed
    return [
        dataclasses.replace(
            request,
            request_id=choice_request_id(request_id, index),
            sampling_params=dataclasses.replace(params, n=1, seed=choice_seed(seed, index)),
        )
        for index in range(params.n)
    ]


async def merge_streams(
    streams: Sequence[AsyncGenerator[Item, None]],
) -> AsyncGenerator[tuple[int, Item], None]:
    """What all streams yield, as it comes, with the index of the stream.

    Each waits until its last item is taken. Ends with all of them, or with the first error; what is
    still open then is closed.
    """
    pending = {_next(stream): index for index, stream in enumerate(streams)}
    try:
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=pending.__getitem__):
                index = pending.pop(task)
                for item in task.result():
                    yield index, item
                    pending[_next(streams[index])] = index
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


def _next(stream: AsyncGenerator[Item, None]) -> asyncio.Task[list[Item]]:
    """One item, or none at the end."""

    async def take() -> list[Item]:
        async for item in stream:
            return [item]
        return []

    return asyncio.create_task(take())
