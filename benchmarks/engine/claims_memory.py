"""KV memory without tokens: in blocks of the real scheduler, and in reservations of whole requests.

The scheduler and the block pool are real; a model runner that computes nothing answers each step.
Refuses to know: models, tables.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.api.sampling_params import SamplingParams
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.outputs import ModelRunnerOutput, SchedulerOutput
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from loadtest.load.generate import Lengths
from loadtest.load.traces import read_trace

UNLIMITED = 1_000_000  # requests and tokens of a step, so that only memory limits the scheduler


@dataclass(frozen=True, slots=True)
class Sizes:
    """The lengths of one request, in tokens."""

    prompt: int
    output: int

    @property
    def total(self) -> int:
        return self.prompt + self.output


@dataclass(frozen=True, slots=True)
class Workload:
    """Lengths of requests, and the model's limit that a contiguous reservation must assume.

    Attributes:
        prompt: mean length of a prompt in tokens.
        output: mean length of an output in tokens.
    """

    prompt: float
    output: float
    max_model_len: int = 2048

    def draw(self, num_requests: int, spread: float = 1.0) -> list[Sizes]:
        """Draw lengths from lognormal distributions; longer requests than the limit are shortened.

        Args:
            spread: standard deviation of the lengths' logarithms.
        """
        chance = random.Random(0)
        prompts, outputs = Lengths(self.prompt, spread), Lengths(self.output, spread)
        return [
            fitted(prompts.draw(chance), outputs.draw(chance), self.max_model_len)
            for _ in range(num_requests)
        ]


# Mean lengths of two data sets (Kwon et al., arXiv 2309.06180, section 6.1, figure 11).
WORKLOADS = {"ShareGPT": Workload(161.31, 337.99), "Alpaca": Workload(19.31, 58.45)}


def fitted(prompt: int, output: int, max_model_len: int) -> Sizes:
    """Shorten the lengths, the prompt's first, until their sum is at most ``max_model_len``."""
    output = min(output, max_model_len - 1)
    return Sizes(min(prompt, max_model_len - output), output)


def read_lengths(path: Path, num_requests: int, max_model_len: int) -> list[Sizes]:
    """Read the first requests' lengths of a trace.

    Args:
        path: a file in Mooncake's format (`.jsonl`), or a CSV file with the columns of Azure's
            traces of 2023, ContextTokens and GeneratedTokens.
    """
    found: list[Sizes] = []
    for prompt, output in _pairs(path):
        if prompt > 0 and output > 0:
            found.append(fitted(prompt, output, max_model_len))
        if len(found) == num_requests:
            break
    return found


def _pairs(path: Path) -> Iterator[tuple[int, int]]:
    if path.suffix == ".jsonl":
        for request in read_trace(path):
            yield request.input_length, request.output_length
        return
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            yield int(row["ContextTokens"]), int(row["GeneratedTokens"])


# ---------------------------------------------------------------------- contiguous reservations

# Tokens that a system without blocks reserves for a request when the request starts. The names and
# rules are those of the paper above, section 6.1.
Reserve = Callable[[Sizes, int], int]
RESERVATIONS: dict[str, Reserve] = {
    "the model's limit": lambda sizes, max_model_len: max_model_len,
    "the next power of two of the output": lambda sizes, max_model_len: min(
        sizes.prompt + next_power_of_two(sizes.output), max_model_len
    ),
    "exactly the output, known in advance": lambda sizes, max_model_len: sizes.total,
}


def next_power_of_two(number: int) -> int:
    """Return the least power of two that is at least ``number``, which must be 1 or more."""
    return 1 << (number - 1).bit_length()


# ---------------------------------------------------------------------- the real block pool


@dataclass(slots=True)
class Occupancy:
    """Sums over the steps in which requests wait for memory.

    Attributes:
        filled: token slots that hold the KV of a token.
        held: token slots of the blocks that requests hold.
        reserved: token slots that each reservation would hold for the same requests.
        running: requests that hold blocks.
    """

    num_steps: int = 0
    filled: int = 0
    held: int = 0
    running: int = 0
    reserved: dict[str, int] | None = None

    def note(
        self,
        manager: KVCacheManager,
        scheduled: SchedulerOutput,
        sizes: dict[str, Sizes],
        max_model_len: int,
    ) -> None:
        """Add the state after a step is computed and before ended requests free their blocks."""
        self.reserved = self.reserved or dict.fromkeys(RESERVATIONS, 0)
        self.num_steps += 1
        for item in scheduled.scheduled:  # all requests that hold blocks, as steps are unlimited
            self.running += 1
            self.filled += item.request.num_computed_tokens + item.num_scheduled_tokens
            self.held += manager.num_tokens_held(item.request)
            for name, reserve in RESERVATIONS.items():
                self.reserved[name] += reserve(sizes[item.request.request_id], max_model_len)


def occupy(
    lengths: list[Sizes], max_model_len: int, num_blocks: int, block_size: int
) -> tuple[Occupancy, Scheduler]:
    """Run requests of these lengths through the real scheduler, all waiting from the beginning."""
    scheduler = Scheduler(
        KVCacheManager(num_blocks, block_size),
        max_num_requests=UNLIMITED,
        max_num_batched_tokens=UNLIMITED,
        long_prefill_token_threshold=UNLIMITED,
    )
    sizes: dict[str, Sizes] = {}
    for index, one in enumerate(lengths):
        sizes[str(index)] = one
        scheduler.add_request(_request(str(index), one, max_model_len))
    occupancy = Occupancy()
    while scheduler.has_work:
        scheduled = scheduler.schedule()
        if not scheduled.scheduled:
            raise RuntimeError(f"a request does not fit {num_blocks} blocks of {block_size}")
        tokens: dict[str, tuple[int, ...]] = {
            item.request.request_id: (7,) for item in scheduled.scheduled if item.samples
        }
        if scheduler.num_waiting:
            occupancy.note(scheduler.kv_cache_manager, scheduled, sizes, max_model_len)
        scheduler.update(scheduled, ModelRunnerOutput(tokens))
    scheduler.check()
    return occupancy, scheduler


def _request(request_id: str, sizes: Sizes, max_model_len: int) -> Request:
    return Request.create(
        request_id,
        [1] * sizes.prompt,
        SamplingParams(max_tokens=sizes.output, ignore_eos=True),
        seed=0,
        eos_token_ids=frozenset({0}),
        max_model_len=max_model_len,
    )


def compare_memory(
    lengths: list[Sizes], max_model_len: int, num_blocks: int, block_size: int
) -> dict[str, Any]:
    """Return the share of memory without tokens, with blocks and with each reservation."""
    found, scheduler = occupy(lengths, max_model_len, num_blocks, block_size)
    if not found.num_steps or not found.reserved:
        raise RuntimeError("no request waited for memory: give more requests or fewer blocks")
    pool = num_blocks * block_size
    return {
        "requests": len(lengths),
        "mean_tokens": round(sum(one.total for one in lengths) / len(lengths), 1),
        "steps": found.num_steps,
        "preemptions": scheduler.num_preemptions,
        "waste": 1 - found.filled / found.held,
        "pool_without_tokens": 1 - found.filled / (found.num_steps * pool),
        "running": found.running / found.num_steps,
        "reservations": {
            name: {
                "waste": 1 - found.filled / reserved,
                "running": pool * found.running / reserved,
            }
            for name, reserved in found.reserved.items()
        },
    }
