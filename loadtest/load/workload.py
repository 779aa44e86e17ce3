"""Plans the requests of a run, by conversation: their times, prompts and cancellations.

Arrivals, lengths, groups and cancellations are drawn from separate random streams. So another rate
does not change the prompts, and runs at different rates can be compared. A later turn's prompt
repeats drawn or recorded answers and not the server's answers, so only the seed decides what is
sent.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

from loadtest.load.generate import gamma_arrivals
from loadtest.load.images import DrawnImage
from loadtest.load.prompts import (
    DrawnPrompt,
    DrawnTokens,
    ImagePrompt,
    SharedBeginnings,
    WrittenPrompt,
    prompt_of_trace,
)
from loadtest.load.traces import read_trace
from loadtest.load.written import written_conversations
from loadtest.plan import ClosedLoop, LoadPlan, OpenLoop, TraceReplay


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRequest:
    """One request of a run.

    Attributes:
        due_s: when the request is due, in seconds since the run began; None: it is due when a user
            of a closed loop is free, or when its conversation's previous answer has ended.
        think_s: seconds of pause before a request whose ``due_s`` is None.
        turn: number of the turn in its conversation, from 0.
        shared_share: share of the prompt, from its beginning, with which an earlier prompt of this
            load also begins.
        cancel_after_tokens: number of output tokens after which the client cancels the request;
            None: the client does not cancel.
    """

    index: int
    due_s: float | None
    prompt: DrawnPrompt | WrittenPrompt | ImagePrompt
    output_length: int
    think_s: float = 0.0
    turn: int = 0
    shared_share: float = 0.0
    cancel_after_tokens: int | None = None

    @property
    def images(self) -> tuple[DrawnImage, ...]:
        """The images of the prompt, in order."""
        return self.prompt.images if isinstance(self.prompt, ImagePrompt) else ()


Conversation = tuple[PlannedRequest, ...]


def planned_conversations(plan: LoadPlan) -> Iterator[Conversation]:
    """Yield conversations in the order in which their first requests are due.

    Raises:
        ConfigError: a trace or a data set cannot be read.
    """
    cancels = random.Random(f"{_seed(plan)} cancels")
    beginnings = SharedBeginnings()
    index = 0
    for conversation in _sent_in_full(plan):
        due_s = conversation[0].due_s
        if due_s is not None and plan.duration_s is not None and due_s >= plan.duration_s:
            return
        if plan.num_requests is not None:
            conversation = conversation[: plan.num_requests - index]
            if not conversation:
                return
        turns: list[PlannedRequest] = []
        for request in conversation:
            # Draw two numbers for each request, cancelled or not: with a higher cancel rate, the
            # same requests and some more are then cancelled.
            is_cancelled, share = cancels.random() < plan.cancel_rate, cancels.random()
            is_cancelled = is_cancelled and request.output_length > 1
            after = 1 + int(share * (request.output_length - 1))
            turns.append(
                dataclasses.replace(
                    request,
                    index=index,
                    turn=len(turns),
                    shared_share=beginnings.share_of(request.prompt),
                    cancel_after_tokens=after if is_cancelled else None,
                )
            )
            index += 1
        yield tuple(turns)


def planned_requests(plan: LoadPlan) -> Iterator[PlannedRequest]:
    """Yield all requests, conversation by conversation; raises ConfigError."""
    return itertools.chain.from_iterable(planned_conversations(plan))


def _sent_in_full(plan: LoadPlan) -> Iterator[Conversation]:
    """Yield conversations whose requests are not numbered yet, and are not cancelled."""
    load, seed = plan.load, _seed(plan)
    if isinstance(load, TraceReplay):
        yield from _of_trace(load, seed)
        return
    thoughts = random.Random(f"{seed} think")
    think_s = load.think_s if isinstance(load, ClosedLoop) else 0.0
    arrivals = _arrivals(plan, load) if isinstance(load, OpenLoop) else itertools.repeat(None)
    conversations = _drawn(plan) if plan.dataset is None else _written(plan)
    for due_s, conversation in zip(arrivals, conversations, strict=False):
        first, *later = conversation
        pause_s = thoughts.expovariate(1 / think_s) if think_s else 0.0
        yield (dataclasses.replace(first, due_s=due_s, think_s=pause_s), *later)


def _drawn(plan: LoadPlan) -> Iterator[Conversation]:
    """Yield conversations of drawn token ids, or of words with images, without end."""
    seed = _seed(plan)
    lengths = random.Random(f"{seed} lengths")
    groups = random.Random(f"{seed} groups")
    turns = random.Random(f"{seed} turns")
    pauses = random.Random(f"{seed} pauses")
    drawn = itertools.repeat(()) if plan.images is None else plan.images.draw(seed)
    for number, images in enumerate(drawn):
        parts: list[DrawnTokens] = []
        if plan.prefix_groups:
            group = groups.randrange(plan.prefix_groups)
            parts.append(DrawnTokens(f"{seed} group {group}", plan.prefix_tokens))
        num_before = len(parts)
        requests = []
        for turn in range(plan.turns.draw(turns)):
            name = f"{seed} request {number}.{turn}"
            parts.append(DrawnTokens(name, plan.input_lengths.draw(lengths)))
            output_length = plan.output_lengths.draw(lengths)
            prompt: DrawnPrompt | ImagePrompt = DrawnPrompt(tuple(parts))
            if images:
                prompt = ImagePrompt(tuple(parts), num_before, images)
            requests.append(
                PlannedRequest(
                    index=0,
                    due_s=None,
                    prompt=prompt,
                    output_length=output_length,
                    think_s=_pause_s(plan, pauses) if turn else 0.0,
                )
            )
            parts.append(DrawnTokens(f"{name} answer", output_length))
        yield tuple(requests)


def _written(plan: LoadPlan) -> Iterator[Conversation]:
    """Yield conversations of a data set without end; raises ConfigError."""
    lengths = random.Random(f"{_seed(plan)} lengths")
    pauses = random.Random(f"{_seed(plan)} pauses")
    for turns in written_conversations(plan, _seed(plan)):
        requests = []
        for number, turn in enumerate(turns):
            drawn_s = _pause_s(plan, pauses)
            pause_s = drawn_s if turn.pause_s is None else turn.pause_s
            length = plan.output_lengths.draw(lengths)
            requests.append(
                PlannedRequest(
                    index=0,
                    due_s=None,
                    prompt=turn.prompt,
                    output_length=length if turn.output_length is None else turn.output_length,
                    think_s=pause_s if number else 0.0,
                )
            )
        yield tuple(requests)


def _pause_s(plan: LoadPlan, chance: random.Random) -> float:
    return chance.expovariate(1 / plan.turn_pause_s) if plan.turn_pause_s else 0.0


def _seed(plan: LoadPlan) -> str:
    """Return the seed of all random streams: the plan's seed, from round 1 on with the round."""
    return f"{plan.seed}.{plan.round}" if plan.round else f"{plan.seed}"


def _arrivals(plan: LoadPlan, load: OpenLoop) -> Iterator[float]:
    if load.arrivals == "constant":
        return (index / load.rate_per_s for index in itertools.count())
    chance = random.Random(f"{_seed(plan)} arrivals")
    variation = load.burstiness if load.arrivals == "gamma" else 1.0
    return gamma_arrivals(chance, rate_per_s=load.rate_per_s, variation=variation)


def _of_trace(load: TraceReplay, seed: str) -> Iterator[Conversation]:
    in_order = sorted(read_trace(load.path), key=lambda request: request.timestamp_ms)
    for request in in_order:
        yield (
            PlannedRequest(
                index=0,
                due_s=request.timestamp_ms / 1000 * load.slowdown,
                prompt=prompt_of_trace(request, seed),
                output_length=request.output_length,
            ),
        )
