"""A load with known right answers: concurrent requests, each compared token by token.

The load uses only the public client; `chaos.py` causes the faults.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import struct
import time
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from baton import AsyncClient, SamplingParams
from benchmarks.runner.answers import Answer, Case, follow
from engine.offline.llm import LLM

PATIENCE_S = 0.1
HUNG_S = 30.0
RETRY_PAUSE_S = 0.1  # pause of a client between UNAVAILABLE and its next request
LEAVER_TOKENS = 700  # prompt length of clients that leave during the hand-off
VOCABULARY = 4000
Asked = list[int] | dict[str, Any]  # a prompt; see `baton.Client`
# Most prompts have several chunks, so that their KV is sent in several parts.
CHUNK_TOKENS = 64
NO_ADAPTERS: Mapping[str, Path] = MappingProxyType({})
_END_BYTES = 12  # the last chunk of a PNG file
_file_numbers = itertools.count()
# Outcomes that must not occur, whatever the fault.
BROKEN = ("hung", "lost", "wrong")


@dataclass(slots=True)
class Load:
    """Sends requests in ``concurrency`` lanes, one after another in each, until `stop`.

    Attributes:
        leaving: share of the requests whose client leaves before the answer's end.
        most: number of requests after which the load stops by itself.
        num_leavers: number of extra lanes whose clients all leave during the hand-off.
        patience_s: seconds after which a request counts as hung.
        pause_s: seconds between a lane's requests.
        open_since: by lane, the time on the monotonic clock at which its open request was sent.
    """

    address: str
    cases: Sequence[Case]
    concurrency: int
    seed: int
    leaving: float = 0.15
    most: float = float("inf")
    num_leavers: int = 0
    patience_s: float = HUNG_S
    pause_s: float = 0.0
    answers: list[Answer] = field(default_factory=list)
    open_since: dict[int, float] = field(default_factory=dict)
    _stopping: bool = False

    async def run(self) -> None:
        """Send requests until `stop` is called; return when every lane's last request has ended."""
        async with AsyncClient(self.address) as client:
            lanes = [self._lane(client, lane) for lane in range(self.concurrency)]
            leavers = [self._leaver_lane(client, lane) for lane in range(self.num_leavers)]
            await asyncio.gather(*lanes, *leavers)

    def stop(self) -> None:
        self._stopping = True

    def longest_wait_s(self) -> float:
        """Return how long the oldest open request has been open; safe from any thread."""
        return time.monotonic() - min(list(self.open_since.values()), default=time.monotonic())

    async def _lane(self, client: AsyncClient, lane: int) -> None:
        draw = random.Random(f"{self.seed}-{lane}")
        while not self._stopping:
            self.most -= 1
            if self.most < 0:
                return
            case = draw.choice(self.cases)
            self.open_since[lane] = time.monotonic()
            answer = await ask(client, case, draw, self.leaving, self.patience_s)
            del self.open_since[lane]
            self.answers.append(answer)
            failed = answer.outcome == "NodeUnavailableError"
            await asyncio.sleep(max(self.pause_s, RETRY_PAUSE_S if failed else 0.0))

    async def _leaver_lane(self, client: AsyncClient, lane: int) -> None:
        draw = random.Random(f"{self.seed}-leaver-{lane}")
        while not self._stopping:
            prompt = self._leaver_prompt(draw)
            # Leave between the first chunk and the end of the hand-off, on slow and on fast
            # machines.
            patience_s = PATIENCE_S * 10 ** draw.uniform(-1, 1)
            stream = client.stream(prompt, SamplingParams(max_tokens=2))
            # When the first token arrives, the hand-off is over, or nearly.
            answer = await follow(stream, patience_s=patience_s, leave_after=0)
            if answer.outcome not in ("left", "hung"):  # an error; only other lanes count errors
                await asyncio.sleep(RETRY_PAUSE_S)
            self.answers.append(replace(answer, outcome="left"))

    def _leaver_prompt(self, draw: random.Random) -> Asked:
        """Return a new prompt, so that all of its KV, or of its encodings, is sent."""
        shown = [case for case in self.cases if case.images]
        if shown:
            return prompt_of(draw.choice(shown))
        return [draw.randrange(VOCABULARY) for _ in range(LEAVER_TOKENS)]

    def counts(self) -> Counter[str]:
        return Counter(answer.outcome for answer in self.answers)


async def ask(
    client: AsyncClient, case: Case, draw: random.Random, leaving: float, hung_s: float = HUNG_S
) -> Answer:
    """Send one request; follow it to its end, or until its client leaves.

    Args:
        hung_s: seconds after which the request counts as hung.
    """
    leave_after, patience_s = None, hung_s
    if draw.random() < leaving:
        leave_after = draw.randrange(len(case.expected))
        if draw.random() < 0.5:  # leave at a random time, mostly before token 1
            patience_s = draw.uniform(0.0, PATIENCE_S)
    stream = client.stream(prompt_of(case), case.params, model=case.model)
    answer = await follow(stream, case, patience_s=patience_s, leave_after=leave_after)
    gave_up = answer.outcome == "hung" and patience_s < hung_s
    return replace(answer, outcome="left") if gave_up else answer


def prompt_of(case: Case) -> Asked:
    """Return a case's prompt; its image files are new ones with the same pixels."""
    if not case.images:
        return case.prompt
    return {"prompt": case.prompt, "images": [with_comment(image) for image in case.images]}


def with_comment(png: bytes) -> bytes:
    """Return a PNG image in a file that no other call returns, so that no cache has it."""
    comment = f"Comment\0{next(_file_numbers)}".encode()
    chunk = b"tEXt" + comment
    own = struct.pack(">I", len(comment)) + chunk + struct.pack(">I", zlib.crc32(chunk))
    end = len(png) - _END_BYTES
    return png[:end] + own + png[end:]


@contextlib.asynccontextmanager
async def under_load(load: Load) -> AsyncIterator[None]:
    """Run a load during the ``with`` block; then wait for its last answers."""
    running = asyncio.create_task(load.run())
    try:
        yield
    finally:
        load.stop()
        await running


def certain_answers(
    model: str,
    prompts: Sequence[Asked],
    params: Sequence[SamplingParams],
    names: Sequence[str] = (),
    **options: Any,
) -> list[tuple[int, ...] | None]:
    """Return each request's answer in this process; None: the answer depends on rounding.

    With other requests in the batch, sums are computed in another order. An answer is certain if
    the engine gives the same answer in a batch and alone.

    Args:
        names: name of each prompt's adapter; empty: the base model answers all prompts.
    """
    llm = LLM(model, dtype="float32", device="cpu", kv_cache_bytes=2**28, **options)
    names = names or [""] * len(prompts)
    asked: list[Any] = list(prompts)
    together = [one.token_ids for one in llm.generate(asked, params, adapter=names)]
    alone = [
        llm.generate([prompt], one, adapter=name)[0].token_ids
        for prompt, one, name in zip(asked, params, names, strict=True)
    ]
    return [a if a == b else None for a, b in zip(together, alone, strict=True)]


def make_cases(
    model: str, num_cases: int, seed: int, adapters: Mapping[str, Path] = NO_ADAPTERS
) -> list[Case]:
    """Make requests of various lengths, greedy and seeded, whose answers are certain.

    Args:
        adapters: folders of the adapters, by name; every second request asks for one.
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
    names = [
        draw.choice(sorted(adapters)) if adapters and index % 4 > 1 else ""
        for index in range(num_cases)
    ]
    answers = certain_answers(
        model,
        prompts,
        params,
        names,
        adapters=adapters,
        long_prefill_token_threshold=CHUNK_TOKENS,
    )
    return [
        Case(prompt, one, answer, name)
        for prompt, one, answer, name in zip(prompts, params, answers, names, strict=True)
        if answer is not None
    ]
