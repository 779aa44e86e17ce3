"""Choices: a request for n outputs of each prompt is as many calls, and their outputs one stream.

The one place that names and seeds them, for every public API. Knows neither gRPC nor HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import TypeVar

from baton.api.errors import InvalidRequestError
from baton.api.prompt import choice_request_id, choice_seed, draw_seed
from baton.api.sampling_params import SamplingParams
from router.calls.call import Call, Terms
from router.intake.intake import Intake, Prompt

MAX_OUTPUTS = 1024

Item = TypeVar("Item")


def check_num_outputs(field: str, num_outputs: int) -> None:
    """Raise InvalidRequestError, about the field of prompts, unless so many can be asked for."""
    if not 1 <= num_outputs <= MAX_OUTPUTS:
        raise InvalidRequestError(field, f"must make 1 to {MAX_OUTPUTS} outputs, got {num_outputs}")


async def accept_choices(
    intake: Intake,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    terms: Terms,
    request_id: str = "",
) -> list[Call]:
    """The checked calls of all outputs, those of one prompt next to each other.

    Output i (from 0) of a prompt is what a request with seed + i gives, as in `engine.LLM`. The
    first of all has the request's id, the others the same with ``-1`` and so on.

    Args:
        params: for ``n`` outputs of each prompt.
        request_id: made up when empty.

    Raises:
        InvalidRequestError: of any of them; none has begun then.
    """
    request_id = request_id or uuid.uuid4().hex
    calls: list[Call] = []
    for prompt in prompts:
        seed = draw_seed() if params.seed is None else params.seed
        first = dataclasses.replace(params, n=1, seed=seed)
        name = choice_request_id(request_id, len(calls))
        checked = await intake.accept(prompt, first, terms, name)
        calls.append(checked)
        for index in range(1, params.n):  # they differ in nothing that is to be checked
            of_choice = dataclasses.replace(checked.sampling_params, seed=choice_seed(seed, index))
            name = choice_request_id(request_id, len(calls))
            calls.append(dataclasses.replace(checked, request_id=name, sampling_params=of_choice))
        await asyncio.sleep(0)  # many prompts take long: others' tokens come in between
    return calls


async def merge_streams(
    streams: Sequence[AsyncGenerator[Item, None]],
) -> AsyncGenerator[tuple[int, Item], None]:
    """What all streams yield, as it comes, each with its stream's index.

    No stream is read on while as many items as there are streams wait to be taken. Ending the
    iteration ends all streams; the first error of one is raised, and ends the others.
    """
    if len(streams) == 1:  # nearly always: no task, no queue
        async with contextlib.aclosing(streams[0]) as stream:
            async for item in stream:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, Item] | int] = asyncio.Queue()
    room = asyncio.Semaphore(len(streams))

    async def pump(index: int) -> None:
        try:
            async with contextlib.aclosing(streams[index]) as stream:
                async for item in stream:
                    await room.acquire()
                    queue.put_nowait((index, item))
        finally:
            queue.put_nowait(index)  # it has ended

    tasks: list[asyncio.Task[None]] = []
    num_open = len(streams)
    try:
        for index in range(len(streams)):
            tasks.append(asyncio.create_task(pump(index)))
            # It looks at a long prompt as a whole before it waits: one at a time, or nothing else
            # is served until all have.
            await asyncio.sleep(0)
        while num_open:
            taken = await queue.get()
            if isinstance(taken, int):
                num_open -= 1
                await tasks[taken]  # raises what the stream raised
                continue
            yield taken
            room.release()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
