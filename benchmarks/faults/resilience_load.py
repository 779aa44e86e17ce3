"""Makes random requests with known answers for simulated nodes, and measures a client's lag."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator

from baton import AsyncClient, SamplingParams
from benchmarks.runner.answers import Answer, Case, OpenLoad, follow
from sim_node.sim_model import output_tokens

HUNG_S = 60.0  # seconds after the deadline, or without a deadline after sending
PROMPT_TOKENS = (400, 1600)
OUTPUT_TOKENS = (20, 60)
# A third of the requests end early by a stop token, and not by max_tokens.
_STOPS, _ROOM = 1 / 3, 4
_LAG_INTERVAL_S = 0.01


def draw_case(draw: random.Random, vocab_size: int) -> Case:
    prompt = [draw.randrange(vocab_size) for _ in range(draw.randint(*PROMPT_TOKENS))]
    num_tokens = draw.randint(*OUTPUT_TOKENS)
    expected = output_tokens(prompt, num_tokens, vocab_size=vocab_size)
    if draw.random() < _STOPS:
        expected = expected[: expected.index(expected[-1]) + 1]
        params = SamplingParams(max_tokens=_ROOM * num_tokens, stop_token_ids=(expected[-1],))
    else:
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    return Case(prompt, params, expected)


def make_load(
    client: AsyncClient, vocab_size: int, seed: int, timeout_s: float | None = None
) -> OpenLoad:
    """Make a load of random requests.

    Args:
        timeout_s: seconds until each request's deadline; None: the router's default.
    """
    draw = random.Random(seed)

    async def ask() -> Answer:
        case = draw_case(draw, vocab_size)
        stream = client.stream(case.prompt, case.params, timeout_s=timeout_s)
        return await follow(stream, case, patience_s=HUNG_S + (timeout_s or 0.0))

    return OpenLoad(ask, draw)


@contextlib.asynccontextmanager
async def watch_lag() -> AsyncIterator[list[float]]:
    """Record how late this process's timers fire, which is the error of the times it measures."""
    lags: list[float] = []

    async def watch() -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _LAG_INTERVAL_S
            await asyncio.sleep(_LAG_INTERVAL_S)
            lags.append(loop.time() - due)

    task = asyncio.create_task(watch())
    try:
        yield lags
    finally:
        task.cancel()
