"""The schedulers that `scheduler.py` compares: Baton's, a minimal scheduler, nano-vllm's.

All of them schedule the same prompts, with a model runner that computes nothing. Refuses to know:
statistics, tables.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import random
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Protocol

from baton.api.sampling_params import SamplingParams
from baton.kv.block_hash import BlockHasher
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.outputs import ModelRunnerOutput
from engine.core.request import Request
from engine.core.scheduler import Scheduler

NUM_RUNNING = 256
NUM_WAITING = 10_000
NUM_PARKED = 1_000  # number of waiting requests that wait for remote KV
BLOCK_SIZE = 16
NUM_BLOCKS = 20_000
MAX_BATCHED_TOKENS = 2**17  # large enough for all prompts in the first step
PROMPT_TOKENS = 256
WAITING_PROMPT_TOKENS = 64
OUTPUT_TOKENS = 256  # output tokens of a request in loads whose requests end


# ---------------------------------------------------------------------- the baseline


@dataclass(slots=True)
class MinimalRequest:
    """A request of the baseline."""

    token_ids: list[int]
    max_num_tokens: int
    num_computed_tokens: int = 0
    block_ids: list[int] = field(default_factory=list)


class MinimalScheduler:
    """BASELINE: a minimal scheduler over a paged KV cache."""

    def __init__(self) -> None:
        self.waiting: deque[MinimalRequest] = deque()
        self.running: list[MinimalRequest] = []
        self.free: deque[int] = deque(range(NUM_BLOCKS))

    def schedule(self) -> list[MinimalRequest]:
        """Give free blocks to running requests first, then to waiting requests."""
        index = 0
        while index < len(self.running):
            request = self.running[index]
            missing = -(-len(request.token_ids) // BLOCK_SIZE) - len(request.block_ids)
            while missing > len(self.free):
                self._preempt(self.running.pop())
            for _ in range(missing):
                request.block_ids.append(self.free.popleft())
            index += 1
        while self.waiting and len(self.running) < NUM_RUNNING:
            num_blocks = -(-len(self.waiting[0].token_ids) // BLOCK_SIZE)
            if num_blocks > len(self.free):
                break
            request = self.waiting.popleft()
            request.block_ids = [self.free.popleft() for _ in range(num_blocks)]
            self.running.append(request)
        return list(self.running)

    def update(self, scheduled: list[MinimalRequest], token_ids: list[int]) -> None:
        """Append the sampled tokens; end requests that have all their output tokens."""
        finished = False
        for request, token_id in zip(scheduled, token_ids, strict=True):
            request.num_computed_tokens = len(request.token_ids)
            request.token_ids.append(token_id)
            if token_id == 0 or len(request.token_ids) >= request.max_num_tokens:
                self.free.extend(request.block_ids)
                request.block_ids = []
                finished = True
        if finished:
            self.running = [request for request in self.running if request.block_ids]

    def _preempt(self, request: MinimalRequest) -> None:
        self.free.extend(request.block_ids)
        request.block_ids = []
        self.waiting.appendleft(request)


# ---------------------------------------------------------------------- what is measured


class Subject(Protocol):
    """A scheduler with a fake model runner."""

    def step(self) -> tuple[float, float]:
        """Run one step; return the seconds in ``schedule`` and those in ``update``."""


@dataclass(frozen=True, slots=True)
class Load:
    """The load of a scheduler. With ``turnover``, a request ends and one begins in each step."""

    name: str
    num_waiting: int
    num_parked: int
    turnover: bool = False

    def output_tokens(self, index: int) -> int:
        """Return the number of output tokens of the running request ``index``."""
        return index + 3 if self.turnover else 1_000_000


LOADS = (
    Load("nobody waits", 0, 0),
    Load("10,000 wait", NUM_WAITING, NUM_PARKED),
    Load("10,000 wait, one ends per step", NUM_WAITING, NUM_PARKED, turnover=True),
)


class BatonSubject:
    """Baton's scheduler, `engine.Scheduler`, as a subject."""

    def __init__(self, load: Load, prompts: Prompts, *, prefix_cache: bool) -> None:
        hasher = BlockHasher(BLOCK_SIZE) if prefix_cache else None
        self.scheduler = Scheduler(
            KVCacheManager(NUM_BLOCKS, BLOCK_SIZE, hasher=hasher),
            max_num_requests=NUM_RUNNING,
            max_num_batched_tokens=MAX_BATCHED_TOKENS,
            long_prefill_token_threshold=MAX_BATCHED_TOKENS,
        )
        self._ids = itertools.count()
        for index, prompt in enumerate(prompts.running):
            self.scheduler.add_request(self._request(prompt, load.output_tokens(index)))
        self.step()
        for index, prompt in enumerate(itertools.islice(prompts.waiting, load.num_waiting)):
            request = self._request(prompt, OUTPUT_TOKENS)
            (self.scheduler.park if index < load.num_parked else self.scheduler.add_request)(
                request
            )

    def step(self) -> tuple[float, float]:
        start = time.perf_counter()
        scheduled = self.scheduler.schedule()
        middle = time.perf_counter()
        tokens: dict[str, tuple[int, ...]] = {
            item.request.request_id: (7,) for item in scheduled.scheduled if item.samples
        }
        output = ModelRunnerOutput(tokens)
        assert len(tokens) == NUM_RUNNING
        resumed = time.perf_counter()
        self.scheduler.update(scheduled, output)
        return middle - start, time.perf_counter() - resumed

    def _request(self, prompt: list[int], max_tokens: int) -> Request:
        return Request.create(
            f"request-{next(self._ids)}",
            prompt,
            SamplingParams(max_tokens=max_tokens),
            seed=0,
            eos_token_ids=frozenset({0}),
            max_model_len=2_000_000,
        )


class MinimalSubject:
    """The baseline, `MinimalScheduler`, as a subject."""

    def __init__(self, load: Load, prompts: Prompts) -> None:
        self.scheduler = MinimalScheduler()
        for index, prompt in enumerate(prompts.running):
            self._add(prompt, load.output_tokens(index))
        self.step()
        for prompt in itertools.islice(prompts.waiting, load.num_waiting):
            self._add(prompt, OUTPUT_TOKENS)

    def step(self) -> tuple[float, float]:
        start = time.perf_counter()
        scheduled = self.scheduler.schedule()
        middle = time.perf_counter()
        token_ids = [7] * len(scheduled)
        assert len(token_ids) == NUM_RUNNING
        resumed = time.perf_counter()
        self.scheduler.update(scheduled, token_ids)
        return middle - start, time.perf_counter() - resumed

    def _add(self, prompt: list[int], max_tokens: int) -> None:
        request = MinimalRequest(list(prompt), len(prompt) + max_tokens)
        self.scheduler.waiting.append(request)


class NanoVllmSubject:
    """nano-vllm's scheduler, imported from a checkout.

    Only the scheduler and its dependencies are imported, because the whole package needs a GPU.

    Args:
        checkout: the folder that contains ``nanovllm/``.
    """

    def __init__(self, load: Load, prompts: Prompts, checkout: Path) -> None:
        if "nanovllm" not in sys.modules:
            package = ModuleType("nanovllm")
            package.__path__ = [str(checkout / "nanovllm")]
            sys.modules["nanovllm"] = package
        sequences: Any = importlib.import_module("nanovllm.engine.sequence")
        params: Any = importlib.import_module("nanovllm.sampling_params")
        scheduler: Any = importlib.import_module("nanovllm.engine.scheduler")
        sequences.Sequence.block_size = BLOCK_SIZE  # nano-vllm's default is 256
        self.scheduler = scheduler.Scheduler(
            SimpleNamespace(
                max_num_seqs=NUM_RUNNING,
                max_num_batched_tokens=MAX_BATCHED_TOKENS,
                num_kvcache_blocks=NUM_BLOCKS,
                kvcache_block_size=BLOCK_SIZE,
                eos=0,
            )
        )
        for index, prompt in enumerate(prompts.running):
            limits = params.SamplingParams(max_tokens=load.output_tokens(index))
            self.scheduler.add(sequences.Sequence(prompt, limits))
        self.step()

    def step(self) -> tuple[float, float]:
        start = time.perf_counter()
        scheduled, is_prefill = self.scheduler.schedule()
        middle = time.perf_counter()
        token_ids = [7] * len(scheduled)
        assert len(token_ids) == NUM_RUNNING
        resumed = time.perf_counter()
        self.scheduler.postprocess(scheduled, token_ids, is_prefill)
        return middle - start, time.perf_counter() - resumed


@dataclass(frozen=True, slots=True)
class Prompts:
    """Makes prompts for all subjects; no two share a prefix, so the prefix cache never hits."""

    running: list[list[int]]
    waiting: list[list[int]]

    @classmethod
    def draw(cls) -> Prompts:
        draw = random.Random(0)

        def prompt(num_tokens: int) -> list[int]:
            return draw.choices(range(1, 32_000), k=num_tokens)

        # Prompt lengths differ, so that about equally many blocks become full in each step.
        running = [prompt(PROMPT_TOKENS + index % BLOCK_SIZE) for index in range(NUM_RUNNING)]
        return cls(running, [prompt(WAITING_PROMPT_TOKENS) for _ in range(NUM_WAITING)])


SUBJECTS: dict[str, Callable[[Load, Prompts], Subject]] = {
    "baton": lambda load, prompts: BatonSubject(load, prompts, prefix_cache=True),
    "baton, no prefix cache": lambda load, prompts: BatonSubject(load, prompts, prefix_cache=False),
    "minimal (baseline)": MinimalSubject,
}


def subjects_of(load: Load, nano_vllm: Path | None) -> dict[str, Callable[[Prompts], Subject]]:
    """Return the subjects that are measured under a load."""
    subjects: dict[str, Callable[[Prompts], Subject]] = {
        name: functools.partial(make, load) for name, make in SUBJECTS.items()
    }
    if nano_vllm is not None and not load.num_waiting:
        subjects["nano-vllm"] = lambda prompts: NanoVllmSubject(load, prompts, nano_vllm)
    return subjects
