"""Follows requests to their ends, and sends many requests at random times.

A client's stream and a call of a dispatcher in this process yield the same pieces. Times are on the
event loop's clock, which may be virtual.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import random
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass

from baton.api.errors import BatonError, OverloadedError
from baton.api.outputs import Receipt, TextDelta
from baton.api.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Case:
    """A request and its only right answer.

    Attributes:
        model: the request's model name; empty: the router's first served name.
    """

    prompt: list[int]
    params: SamplingParams
    expected: tuple[int, ...]
    model: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The outcome of one request; times are in seconds.

    Attributes:
        outcome: complete; left: the client disconnected; refused; hung: no end in time; lost: fewer
            tokens than asked for; wrong: a wrong token; or the type of the error.
        times: arrival time of each token.
        receipt: the receipt in the last piece or in the error; None: there was none.
        retry_delay_s: seconds after which a refusal advised to try again; None: no advice.
    """

    outcome: str
    detail: str
    sent_at: float
    ended_at: float
    times: tuple[float, ...]
    receipt: Receipt | None
    retry_delay_s: float | None

    @property
    def ttft_s(self) -> float:
        """Return the seconds to the first token; 0 without a token."""
        return self.times[0] - self.sent_at if self.times else 0.0

    @property
    def total_s(self) -> float:
        return self.ended_at - self.sent_at

    @property
    def longest_gap_s(self) -> float:
        """Return the longest time between two tokens or before the first token, in seconds."""
        arrivals = (self.sent_at, *self.times)
        return max((b - a for a, b in itertools.pairwise(arrivals)), default=0.0)

    @property
    def attempts(self) -> int:
        """Return the router's number of attempts, from the receipt; 0 without a receipt."""
        return self.receipt.num_attempts if self.receipt else 0


async def follow(
    stream: AsyncGenerator[TextDelta, None],
    case: Case | None = None,
    *,
    patience_s: float | None = None,
    leave_after: int | None = None,
) -> Answer:
    """Read a stream to its end, or until its client leaves.

    Args:
        case: the request and its right tokens; None: all tokens count as right.
        patience_s: seconds after which the request counts as hung.
        leave_after: number of tokens after which the client disconnects.
    """
    clock = asyncio.get_running_loop().time
    sent_at, times, got = clock(), list[float](), list[int]()
    outcome, detail, receipt, delay_s = "complete", "", None, None
    try:
        async with asyncio.timeout(patience_s), contextlib.aclosing(stream) as deltas:
            async for delta in deltas:
                times += [clock()] * len(delta.token_ids)
                got += delta.token_ids
                receipt = delta.receipt or receipt
                if leave_after is not None and len(got) > leave_after:
                    outcome = "left"
                    break
    except BatonError as error:
        is_refused = isinstance(error, OverloadedError) and not got
        outcome = "refused" if is_refused else type(error).__name__
        detail, receipt, delay_s = str(error), error.receipt, error.retry_delay_s
    except TimeoutError:
        outcome, detail = "hung", f"after {len(got)} tokens"
    if case is not None and tuple(got) != case.expected[: len(got)]:
        where = next(i for i, token in enumerate(got) if (token,) != case.expected[i : i + 1])
        of = f"{len(case.expected)}, prompt of {len(case.prompt)} tokens"
        outcome, detail = "wrong", f"token {where} of {of}, {outcome} {detail}".strip()
    elif case is not None and outcome == "complete" and len(got) < len(case.expected):
        outcome, detail = "lost", f"{len(got)} of {len(case.expected)} tokens"
    return Answer(
        outcome=outcome,
        detail=detail,
        sent_at=sent_at,
        ended_at=clock(),
        times=tuple(times),
        receipt=receipt,
        retry_delay_s=delay_s,
    )


class OpenLoad:
    """A load of requests at random times (Poisson), whether earlier requests have ended or not.

    Args:
        ask: sends one request and returns its answer.

    Attributes:
        answers: answers of the ended requests.
    """

    def __init__(self, ask: Callable[[], Awaitable[Answer]], draw: random.Random) -> None:
        self.answers: list[Answer] = []
        self._ask_one = ask
        self._draw = draw
        self._tasks: set[asyncio.Task[None]] = set()

    async def arrive(
        self, rate: float, seconds: float = math.inf, until: asyncio.Event | None = None
    ) -> None:
        """Start ``rate`` requests per second for ``seconds``, or until ``until`` is set."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        ends_at = due + seconds
        while (due := due + self._draw.expovariate(rate)) < ends_at:
            await asyncio.sleep(max(due - loop.time(), 0.0))
            if until is not None and until.is_set():
                return
            task = asyncio.create_task(self._ask())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        await asyncio.sleep(ends_at - loop.time())

    async def saturate(self, num_lanes: int, seconds: float) -> float:
        """Keep ``num_lanes`` requests open for a time; return the ended requests per second.

        The first third of the time is not counted.
        """
        clock = asyncio.get_running_loop().time
        ends_at = clock() + seconds

        async def lane() -> None:
            while clock() < ends_at:
                await self._ask()

        await asyncio.gather(*(lane() for _ in range(num_lanes)))
        counted_s = seconds * 2 / 3
        ended = (ends_at - counted_s <= answer.ended_at < ends_at for answer in self.answers)
        return sum(ended) / counted_s

    async def finish(self) -> None:
        """Wait until all requests have ended."""
        await asyncio.gather(*self._tasks)

    async def cancel(self) -> None:
        """Cancel all open requests."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _ask(self) -> None:
        self.answers.append(await self._ask_one())
