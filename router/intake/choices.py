"""Choices: turns a request for n outputs of each prompt into calls, and merges their streams.

For all APIs, the ids and seeds of the n outputs' calls are made here.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import TypeVar

from baton.api.errors import InvalidRequestError
from baton.api.prompt import choice_request_id, choice_seed, draw_seed
from baton.api.sampling_params import SamplingParams
from router.calls.call import Call, Terms
from router.intake.intake import Intake
from router.intake.prompt_reader import Prompt

MAX_OUTPUTS = 1024
# Maximum number of bytes of images that one request sends to nodes: the command of each output
# contains all images.
MAX_IMAGE_BYTES = 128 * 2**20

Item = TypeVar("Item")


def check_num_outputs(field: str, num_outputs: int) -> None:
    """Raise InvalidRequestError if a request asks for too many outputs.

    Args:
        field: the field of the prompts, for the error.
    """
    if not 1 <= num_outputs <= MAX_OUTPUTS:
        raise InvalidRequestError(field, f"must make 1 to {MAX_OUTPUTS} outputs, got {num_outputs}")


def check_image_bytes(call: Call, num_outputs: int) -> None:
    """Raise InvalidRequestError if a request's outputs would send too many bytes of images."""
    num_bytes = sum(len(image.data) for image in call.images)
    if num_outputs * num_bytes > MAX_IMAGE_BYTES:
        raise InvalidRequestError(
            "n",
            f"must be at most {MAX_IMAGE_BYTES // num_bytes} with images of {num_bytes} bytes, "
            f"got {num_outputs}",
        )


async def accept_choices(
    intake: Intake,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    terms: Terms,
    request_id: str = "",
) -> list[Call]:
    """Return the checked calls of all outputs, grouped by prompt.

    Output i (from 0) of a prompt equals the output of a request with seed + i, as in `engine.LLM`.
    In a beam search, output i is the i-th best. The first call has the request's id; the other
    calls' ids have ``-1``, ``-2`` and so on appended.

    Args:
        params: the sampling parameters; ``n`` is the number of outputs per prompt.
        request_id: id of the request; empty: generate one.

    Raises:
        InvalidRequestError: a prompt is invalid; then none of the calls has begun.
    """
    request_id = request_id or uuid.uuid4().hex
    calls: list[Call] = []
    for prompt in prompts:
        seed = draw_seed() if params.seed is None else params.seed
        first = dataclasses.replace(params, n=1, seed=seed)
        checked = await intake.accept(prompt, first, terms, request_id)
        checked = dataclasses.replace(checked, request_id=choice_request_id(request_id, len(calls)))
        check_image_bytes(checked, params.n)
        if terms.beams is not None:
            run = intake.abilities.search_beams(checked, params.n)
            calls += [
                dataclasses.replace(
                    checked,
                    request_id=choice_request_id(request_id, len(calls) + place),
                    source=functools.partial(run.stream, place),
                )
                for place in range(params.n)
            ]
            continue
        calls.append(checked)
        # The other outputs' calls differ only in id and seed, so they need no check
        for index in range(1, params.n):
            of_choice = dataclasses.replace(checked.sampling_params, seed=choice_seed(seed, index))
            name = choice_request_id(request_id, len(calls))
            calls.append(dataclasses.replace(checked, request_id=name, sampling_params=of_choice))
        # Let other tasks run, because tokenizing many prompts takes long.
        await asyncio.sleep(0)
    return calls


async def merge_streams(
    streams: Sequence[AsyncGenerator[Item, None]],
) -> AsyncGenerator[tuple[int, Item], None]:
    """Yield (index of the stream, item) from all streams as their items arrive.

    At most one item per stream is held while the reader is slow. Ending the iteration ends all
    streams. The first error of a stream ends the other streams and is raised.
    """
    if len(streams) == 1:  # a single stream, which is the usual case, needs neither task nor queue
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
            queue.put_nowait(index)  # marks the end of the stream

    tasks: list[asyncio.Task[None]] = []
    num_open = len(streams)
    try:
        for index in range(len(streams)):
            tasks.append(asyncio.create_task(pump(index)))
            # A stream may begin with long work on its prompt, so let other tasks run in between.
            await asyncio.sleep(0)
        while num_open:
            taken = await queue.get()
            if isinstance(taken, int):
                num_open -= 1
                await tasks[taken]  # raises the stream's error
                continue
            yield taken
            room.release()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
