"""A load whose right answers are known: concurrent streams, each compared token by token.

Knows the public client only; what happens to the nodes meanwhile is `chaos.py`'s business.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton import AsyncClient, BatonError, SamplingParams
from engine.offline.llm import LLM

PATIENCE_S = 0.1
HUNG_S = 30.0
RETRY_PAUSE_S = 0.1  # before a client tries again after UNAVAILABLE
LEAVER_TOKENS = 700  # of prompts whose client leaves during the hand-off
VOCABULARY = 4000
# Most prompts have several chunks, so that watermarks travel.
CHUNK_TOKENS = 64
# Outcomes that no fault excuses.
BROKEN = ("hung", "lost", "wrong")


@dataclass(frozen=True, slots=True)
class Case:
    """A request and its only right answer."""

    name: str
    prompt: list[int]
    params: SamplingParams
    expected: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """The outcome of one request.

    Attributes:
        outcome: complete, left, hung, lost, wrong, or the type of the error.
        longest_gap_s: between two of its tokens, or before the first.
        attempts: by the receipt; 1 of an answer that was left.
        num_drafts, num_accepted_drafts: likewise; 0 of an answer that was left.
    """

    outcome: str
    detail: str
    ended_at: float
    longest_gap_s: float
    attempts: int = 1
    num_drafts: int = 0
    num_accepted_drafts: int = 0


@dataclass(slots=True)
class Load:
    """Streams that follow each other in ``concurrency`` lanes until `stop`.

    Attributes:
        leaving: share of the requests whose client leaves in the middle.
        most: number of requests after which the load stops by itself.
        num_leavers: further lanes, whose clients all leave during the hand-off.
    """

    address: str
    cases: Sequence[Case]
    concurrency: int
    seed: int
    leaving: float = 0.15
    most: float = float("inf")
    num_leavers: int = 0
    answers: list[Answer] = field(default_factory=list)
    _stopping: bool = False

    async def run(self) -> None:
        """Run until `stop` is called and each lane's last request has ended."""
        async with AsyncClient(self.address) as client:
            lanes = [self._lane(client, lane) for lane in range(self.concurrency)]
            leavers = [self._leaver_lane(client, lane) for lane in range(self.num_leavers)]
            await asyncio.gather(*lanes, *leavers)

    def stop(self) -> None:
        self._stopping = True

    async def _lane(self, client: AsyncClient, lane: int) -> None:
        draw = random.Random(f"{self.seed}-{lane}")
        while not self._stopping:
            self.most -= 1
            if self.most < 0:
                return
            answer = await ask(client, draw.choice(self.cases), draw, self.leaving)
            self.answers.append(answer)
            if answer.outcome == "NodeUnavailableError":
                await asyncio.sleep(RETRY_PAUSE_S)

    async def _leaver_lane(self, client: AsyncClient, lane: int) -> None:
        draw = random.Random(f"{self.seed}-leaver-{lane}")
        while not self._stopping:
            # A new prompt, so that all of its KV travels.
            prompt = [draw.randrange(VOCABULARY) for _ in range(LEAVER_TOKENS)]
            # From before the first chunk to behind the last, be the machine fast or slow.
            patience_s = PATIENCE_S * 10 ** draw.uniform(-1, 1)
            try:
                async with asyncio.timeout(patience_s):
                    stream = client.stream(prompt, SamplingParams(max_tokens=2))
                    async with contextlib.aclosing(stream) as deltas:
                        await anext(deltas)  # the hand-off is over, or nearly
            except BatonError:  # others count it
                await asyncio.sleep(RETRY_PAUSE_S)
            except TimeoutError:
                pass
            self.answers.append(Answer("left", "", time.monotonic(), 0.0))

    def counts(self) -> Counter[str]:
        return Counter(answer.outcome for answer in self.answers)


async def ask(client: AsyncClient, case: Case, draw: random.Random, leaving: float) -> Answer:
    """Send one request; follow it to its end, or until its client leaves."""
    leave_after, patience_s = None, HUNG_S
    if draw.random() < leaving:
        leave_after = draw.randrange(len(case.expected))
        if draw.random() < 0.5:  # at a random time, mostly before token 1
            patience_s = draw.uniform(0.0, PATIENCE_S)
    got: list[int] = []
    last_at, longest, attempts = time.monotonic(), 0.0, 1
    num_drafts = num_accepted_drafts = 0
    outcome, detail = "", ""
    try:
        async with asyncio.timeout(patience_s):
            async with contextlib.aclosing(client.stream(case.prompt, case.params)) as deltas:
                async for delta in deltas:
                    now = time.monotonic()
                    longest, last_at = max(longest, now - last_at), now
                    got += delta.token_ids
                    if delta.receipt is not None:
                        attempts = delta.receipt.num_attempts
                        if (decode := delta.receipt.decode) is not None:
                            num_drafts = decode.num_drafts
                            num_accepted_drafts = decode.num_accepted_drafts
                    if leave_after is not None and len(got) > leave_after:
                        outcome = "left"
                        break
    except BatonError as error:
        outcome, detail = type(error).__name__, str(error)
    except TimeoutError:
        outcome = "hung" if patience_s == HUNG_S else "left"
        detail = f"{len(got)} of {len(case.expected)} tokens"
    if tuple(got) != case.expected[: len(got)]:
        where = next(i for i, token in enumerate(got) if (token,) != case.expected[i : i + 1])
        outcome, detail = "wrong", f"token {where} of {len(case.expected)}, {case.name}"
    elif not outcome and len(got) < len(case.expected):
        outcome, detail = "lost", f"{len(got)} of {len(case.expected)} tokens"
    return Answer(
        *(outcome or "complete", detail, time.monotonic(), longest, attempts),
        num_drafts=num_drafts,
        num_accepted_drafts=num_accepted_drafts,
    )


def make_cases(model: str, num_cases: int, seed: int) -> list[Case]:
    """Make requests of various lengths, greedy and seeded, with answers of one process.

    An answer may hang on a rounding: with other requests in the batch, sums are taken in another
    order. Only requests that the engine answers alike in company and alone are cases.
    """
    draw = random.Random(seed)
    prompts, params = [], []
    for index in range(num_cases):
        length = draw.choice([1, 15, 16, 17, 100, 300, 700])
        prompts.append([draw.randrange(VOCABULARY) for _ in range(length)])
        params.append(
            SamplingParams(
                max_tokens=draw.choice([1, 2, 20, 60, 120]),
                temperature=0.0 if index % 2 else 0.8,
                seed=index,
                ignore_eos=True,
            )
        )
    llm = LLM(
        model,
        dtype="float32",
        device="cpu",
        kv_cache_bytes=2**28,
        long_prefill_token_threshold=CHUNK_TOKENS,
    )
    together = [one.token_ids for one in llm.generate(list(prompts), params)]
    alone = [llm.generate([p], one)[0].token_ids for p, one in zip(prompts, params, strict=True)]
    return [
        Case(f"case {index}", prompts[index], params[index], expected)
        for index, expected in enumerate(together)
        if expected == alone[index]
    ]
