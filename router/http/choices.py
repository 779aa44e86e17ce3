"""Several calls as one stream: the outputs of all prompts of one HTTP request."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Iterable, Sequence

from baton.outputs import FinishReason, Receipt, TextDelta
from baton.prompt import choice_request_id, choice_seed, draw_seed
from baton.sampling_params import SamplingParams
from router.call import Call
from router.intake import GenerationRequest, Intake


async def accept_choices(
    intake: Intake, request: GenerationRequest, prompts: Sequence[list[int]], num_choices: int
) -> list[Call]:
    """The checked calls of all prompts, those of one prompt next to each other.

    Args:
        request: as that of the first; the others have its id with ``-1`` and so on.

    Raises:
        InvalidRequestError: of any of them; none has begun then.
    """
    params: SamplingParams = request.sampling_params
    calls: list[Call] = []
    for prompt in prompts:
        seed = draw_seed() if params.seed is None else params.seed
        for index in range(num_choices):
            one = dataclasses.replace(
                request,
                prompt=prompt,
                sampling_params=dataclasses.replace(params, seed=choice_seed(seed, index)),
                request_id=choice_request_id(request.request_id, len(calls)),
            )
            calls.append(await intake.accept(one))
    return calls


async def merge(
    streams: Sequence[AsyncGenerator[TextDelta, None]],
) -> AsyncGenerator[tuple[int, TextDelta], None]:
    """Deltas of all streams as they come, each with its stream's index.

    No stream is read on while as many deltas as there are streams wait to be taken. Ending the
    iteration ends all streams; the first error of one is raised, and ends the others.
    """
    if len(streams) == 1:  # nearly always: no task, no queue
        async with contextlib.aclosing(streams[0]) as stream:
            async for delta in stream:
                yield 0, delta
        return
    queue: asyncio.Queue[tuple[int, TextDelta | None]] = asyncio.Queue()
    room = asyncio.Semaphore(len(streams))

    async def pump(index: int) -> None:
        try:
            async with contextlib.aclosing(streams[index]) as stream:
                async for delta in stream:
                    await room.acquire()
                    queue.put_nowait((index, delta))
        finally:
            queue.put_nowait((index, None))

    tasks = [asyncio.create_task(pump(index)) for index in range(len(streams))]
    num_open = len(tasks)
    try:
        while num_open:
            index, taken = await queue.get()
            if taken is None:
                num_open -= 1
                await tasks[index]  # raises what the stream raised
                continue
            yield index, taken
            room.release()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def join_deltas(deltas: Iterable[TextDelta]) -> TextDelta:
    """All deltas of one output as a single one; there is at least one."""
    parts = list(deltas)
    last = parts[-1]
    return TextDelta(
        last.request_id,
        parts[0].output_index,
        tuple(token_id for delta in parts for token_id in delta.token_ids),
        "".join(delta.text for delta in parts),
        last.finish_reason or FinishReason.ABORT,
        last.receipt,
        tuple(entry for delta in parts for entry in delta.logprobs),
        tuple(entry for delta in parts for entry in delta.prompt_logprobs),
    )


def receipt_of(delta: TextDelta) -> Receipt:
    """Of an output's last delta."""
    assert delta.receipt is not None
    return delta.receipt
