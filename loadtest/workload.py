"""The requests of a plan, one by one: when they are due, their prompts, who is given up when.

Arrivals, lengths, groups and cancels have streams of random numbers of their own: another rate does
not change the prompts, so that two runs can be compared.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

from loadtest.generate import gamma_arrivals
from loadtest.plan import ClosedLoop, LoadPlan, OpenLoop, TraceReplay
from loadtest.traces import BLOCK_TOKENS, TraceRequest, read_trace


@dataclass(frozen=True, slots=True)
class PromptPart:
    """So many token ids, drawn with a text as the seed: equal texts, equal tokens."""

    seed: str
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRequest:
    """One request of a run.

    Attributes:
        due_s: after the beginning of the run; None: when a user is free.
        think_s: what a user waits before it.
        cancel_after_tokens: the client gives it up with this token; None: never.
    """

    index: int
    due_s: float | None
    prompt: tuple[PromptPart, ...]
    output_length: int
    think_s: float = 0.0
    cancel_after_tokens: int | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return sum(part.num_tokens for part in self.prompt)

    def prompt_token_ids(self, vocab_size: int) -> list[int]:
        token_ids: list[int] = []
        for part in self.prompt:
            chance = random.Random(part.seed)
            token_ids += chance.choices(range(vocab_size), k=part.num_tokens)
        return token_ids


def planned_requests(plan: LoadPlan) -> Iterator[PlannedRequest]:
    """In the order in which they are due; raises ConfigError for a trace that cannot be read."""
    cancels = random.Random(f"{_seed(plan)} cancels")
    for request in itertools.islice(_sent_in_full(plan), plan.num_requests):
        due_s = request.due_s
        if due_s is not None and plan.duration_s is not None and due_s >= plan.duration_s:
            return
        # Two draws for each, so that another rate of cancels gives up a part of the same ones.
        is_cancelled, share = cancels.random() < plan.cancel_rate, cancels.random()
        if is_cancelled and request.output_length > 1:
            after = 1 + int(share * (request.output_length - 1))
            request = PlannedRequest(
                index=request.index,
                due_s=due_s,
                prompt=request.prompt,
                output_length=request.output_length,
                think_s=request.think_s,
                cancel_after_tokens=after,
            )
        yield request


def _sent_in_full(plan: LoadPlan) -> Iterator[PlannedRequest]:
    load = plan.load
    if isinstance(load, TraceReplay):
        yield from _of_trace(load)
        return
    seed = _seed(plan)
    lengths = random.Random(f"{seed} lengths")
    groups = random.Random(f"{seed} groups")
    thoughts = random.Random(f"{seed} think")
    think_s = load.think_s if isinstance(load, ClosedLoop) else 0.0
    arrivals = _arrivals(plan, load) if isinstance(load, OpenLoop) else itertools.repeat(None)
    for index, due_s in enumerate(arrivals):
        own = PromptPart(f"{seed} request {index}", plan.input_lengths.draw(lengths))
        prompt: tuple[PromptPart, ...] = (own,)
        if plan.prefix_groups:
            group = groups.randrange(plan.prefix_groups)
            prompt = (PromptPart(f"{seed} group {group}", plan.prefix_tokens), own)
        yield PlannedRequest(
            index=index,
            due_s=due_s,
            prompt=prompt,
            output_length=plan.output_lengths.draw(lengths),
            think_s=thoughts.expovariate(1 / think_s) if think_s else 0.0,
        )


def _seed(plan: LoadPlan) -> str:
    """Of all streams; the first round's is the seed alone."""
    return f"{plan.seed}.{plan.round}" if plan.round else f"{plan.seed}"


def _arrivals(plan: LoadPlan, load: OpenLoop) -> Iterator[float]:
    if load.arrivals == "constant":
        return (index / load.rate_per_s for index in itertools.count())
    chance = random.Random(f"{_seed(plan)} arrivals")
    variation = load.burstiness if load.arrivals == "gamma" else 1.0
    return gamma_arrivals(chance, rate_per_s=load.rate_per_s, variation=variation)


def _of_trace(load: TraceReplay) -> Iterator[PlannedRequest]:
    in_order = sorted(read_trace(load.path), key=lambda request: request.timestamp_ms)
    for index, request in enumerate(in_order):
        yield PlannedRequest(
            index=index,
            due_s=request.timestamp_ms / 1000 * load.slowdown,
            prompt=tuple(_trace_parts(request)),
            output_length=request.output_length,
        )


def _trace_parts(request: TraceRequest) -> Iterator[PromptPart]:
    """The same tokens as `traces.prompt_token_ids` makes."""
    left = request.input_length
    for hash_id in request.hash_ids:
        yield PromptPart(f"block {hash_id}", min(left, BLOCK_TOKENS))
        left -= BLOCK_TOKENS
