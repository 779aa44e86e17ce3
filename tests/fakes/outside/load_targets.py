"""A target whose answers are scripted, without a network, and runs on a virtual clock."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass

from loadtest.load.prompts import Prompt
from loadtest.plan import LoadPlan
from loadtest.run import Run, RunResult
from loadtest.targets.base import Frame, TargetError, Usage
from tests.fakes.time.virtual_clock import VirtualClock
from tests.fakes.time.virtual_loop import VirtualLoop

TICK_S = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A scripted server's answer to one request.

    Attributes:
        frames: for each frame, seconds after the frame before (or the request), and its tokens.
        error: instead of an end: a gRPC status or an HTTP status; "cut": just no more.
        says_tokens: the usage, if it is to be another than what was sent.
    """

    frames: tuple[tuple[float, int], ...]
    error: str = ""
    says_tokens: int | None = None

    @property
    def num_tokens(self) -> int:
        return sum(num_tokens for _, num_tokens in self.frames)


Script = Callable[[int, int], Answer]
"""The answer to the call of a number, for an output of a length."""


def even(ttft_s: float, gap_s: float, per_frame: int = 1) -> Script:
    """Make an answer of one token first, then equal frames."""

    def script(number: int, length: int) -> Answer:
        rest = length - 1
        sizes = [per_frame] * (rest // per_frame) + [rest % per_frame] * (rest % per_frame > 0)
        return Answer(frames=((ttft_s, 1), *((gap_s, size) for size in sizes)))

    return script


class ScriptedTarget:
    """See Target.

    Attributes:
        prompts: prompts of all messages, in the order in which they were made.

    Args:
        stalls: begins and ends, in seconds since the first call; meanwhile it does nothing.
        one_at_a_time: whether requests are answered one after the other.
    """

    def __init__(
        self,
        script: Script,
        *,
        stalls: Sequence[tuple[float, float]] = (),
        one_at_a_time: bool = False,
    ) -> None:
        self._script = script
        self._stalls = stalls
        self._turn = asyncio.Semaphore(1 if one_at_a_time else 1_000_000)
        self._began_at: float | None = None
        self.num_calls = 0
        self.prompts: list[Prompt] = []
        self.num_given_up = 0

    def describe(self) -> dict[str, str]:
        return {"api": "scripted"}

    def prepare(self, prompt: Prompt, output_length: int) -> bytes:
        self.prompts.append(prompt)
        return str(output_length).encode()

    async def stream(self, payload: bytes) -> AsyncGenerator[Frame, None]:
        answer = self._script(self.num_calls, int(payload))
        self.num_calls += 1
        is_whole = False
        try:
            async with self._turn:
                for gap_s, num_tokens in answer.frames:
                    await self._sleep(gap_s)
                    yield Frame(num_tokens)
            if answer.error:
                raise TargetError(answer.error, "as scripted")
            said = answer.num_tokens if answer.says_tokens is None else answer.says_tokens
            yield Frame(0, finish_reason="length", usage=Usage(1, said))
            is_whole = True
        finally:
            self.num_given_up += not (is_whole or answer.error)

    async def _sleep(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        if self._began_at is None:
            self._began_at = loop.time()
        await asyncio.sleep(seconds)
        for begin_s, end_s in self._stalls:
            if begin_s <= loop.time() - self._began_at < end_s:
                await asyncio.sleep(self._began_at + end_s - loop.time())

    async def close(self) -> None:
        """Do nothing: the target has no connection."""


def run_virtually(
    plan: LoadPlan, target: ScriptedTarget, *, stop_after_s: float | None = None
) -> RunResult:
    """Run a whole load on virtual time, in whole milliseconds."""
    clock = VirtualClock()
    loop = VirtualLoop(clock)

    async def execute() -> RunResult:
        stop = asyncio.Event()
        if stop_after_s is not None:
            loop.call_later(stop_after_s, stop.set)
        return await Run(plan, target, now=clock).execute(stop)

    try:
        running = loop.create_task(execute())
        while not running.done():
            loop.run_until_idle()
            clock.advance(TICK_S * max(1, math.ceil(loop.idle_s / TICK_S)))
        assert loop.errors == []
        return running.result()
    finally:
        loop.close()
