"""Requests in an open loop to a router over simulated nodes, each answer checked token by token.

Knows the public client only; what happens to the nodes meanwhile is `resilience.py`'s business.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from baton import AsyncClient, BatonError, SamplingParams
from baton.api.errors import OverloadedError
from sim_node.sim_model import output_tokens

HUNG_S = 60.0  # after the deadline, or after sending if there is none
PROMPT_TOKENS = (400, 1600)
OUTPUT_TOKENS = (20, 60)
# One in three requests ends at a stop token, long before its max_tokens.
_STOPS, _ROOM = 1 / 3, 4
_LAG_INTERVAL_S = 0.01


@dataclass(frozen=True, slots=True)
class Case:
    """A request and its only right answer."""

    prompt: list[int]
    params: SamplingParams
    expected: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """The outcome of one request; times are seconds, ``at`` by `time.monotonic`.

    Attributes:
        outcome: complete, refused, hung, wrong, or the type of the error.
        ttft_s: 0 without a token.
        total_s: until the last token, or the error.
        longest_gap_s: between two of its tokens, or before the first.
        attempts: attempts by the receipt; 0 without one.
        retry_delay_s: delay that a refusal advised; None: no advice.
    """

    outcome: str
    detail: str
    sent_at: float
    ttft_s: float
    total_s: float
    longest_gap_s: float
    attempts: int
    retry_delay_s: float | None


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


async def ask(client: AsyncClient, case: Case, timeout_s: float | None) -> Answer:
    """Send one request; follow it to its end."""
    got: list[int] = []
    sent_at = last_at = time.monotonic()
    ttft_s = longest = 0.0
    attempts, outcome, detail, delay_s = 0, "", "", None
    try:
        async with asyncio.timeout(HUNG_S + (timeout_s or 0.0)):
            deltas = client.stream(case.prompt, case.params, timeout_s=timeout_s)
            async with contextlib.aclosing(deltas):
                async for delta in deltas:
                    now = time.monotonic()
                    longest, last_at = max(longest, now - last_at), now
                    ttft_s = ttft_s or now - sent_at
                    got += delta.token_ids
                    attempts = delta.receipt.num_attempts if delta.receipt else attempts
    except OverloadedError as error:
        outcome = "refused" if not got else "OverloadedError"
        detail, delay_s = str(error), error.retry_delay_s
    except BatonError as error:
        outcome, detail = type(error).__name__, str(error)
    except TimeoutError:
        outcome, detail = "hung", f"{len(got)} of {len(case.expected)} tokens"
    total_s = time.monotonic() - sent_at
    if tuple(got) != case.expected[: len(got)] or (not outcome and len(got) < len(case.expected)):
        outcome, detail = "wrong", f"{len(got)} of {len(case.expected)} tokens, {outcome} {detail}"
    return Answer(
        outcome or "complete", detail, sent_at, ttft_s, total_s, longest, attempts, delay_s
    )


class Load:
    """Requests that arrive at random (Poisson) at a rate that may change.

    Args:
        timeout_s: each request's deadline; None: the router's usual one.

    Attributes:
        answers: answers of requests that have ended.
    """

    def __init__(
        self, client: AsyncClient, vocab_size: int, seed: int, timeout_s: float | None = None
    ) -> None:
        self.answers: list[Answer] = []
        self._client = client
        self._vocab_size = vocab_size
        self._draw = random.Random(seed)
        self._timeout_s = timeout_s
        self._tasks: set[asyncio.Task[None]] = set()

    async def arrive(self, rate: float, until: asyncio.Event) -> None:
        """Begin ``rate`` requests per second until something has happened."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while not until.is_set():
            due += self._draw.expovariate(rate)
            case = draw_case(self._draw, self._vocab_size)
            await asyncio.sleep(max(due - loop.time(), 0.0))
            task = asyncio.create_task(self._ask(case))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def arrive_for(self, rate: float, seconds: float) -> None:
        """Begin ``rate`` requests per second for so long."""
        over = asyncio.Event()
        asyncio.get_running_loop().call_later(seconds, over.set)
        await self.arrive(rate, over)

    async def finish(self) -> None:
        """Wait for the answers of all that have begun."""
        await asyncio.gather(*self._tasks)

    async def saturate(self, num_lanes: int, seconds: float) -> float:
        """Requests per second that end while so many are always open; a third is run-up."""
        ends_at = time.monotonic() + seconds

        async def lane() -> None:
            while time.monotonic() < ends_at:
                await self._ask(draw_case(self._draw, self._vocab_size))

        await asyncio.gather(*(lane() for _ in range(num_lanes)))
        counted = [
            answer
            for answer in self.answers
            if ends_at - seconds * 2 / 3 <= answer.sent_at + answer.total_s < ends_at
        ]
        return len(counted) / (seconds * 2 / 3)

    async def _ask(self, case: Case) -> None:
        self.answers.append(await ask(self._client, case, self._timeout_s))


@contextlib.asynccontextmanager
async def watch_lag() -> AsyncIterator[list[float]]:
    """Record how late this process's timers fire, which is the error of a client's times."""
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
