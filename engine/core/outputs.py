"""What a step is to the core and to nodes: who computes how much, and what came of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from baton.api.outputs import RequestDelta, TokenLogprobs
from engine.core.request import Request


class ScheduledRequest(msgspec.Struct, frozen=True, gc=False):
    """One request's part of a step: compute its next ``num_scheduled_tokens`` tokens.

    A struct, for one is made per output token, and a frozen dataclass takes ten times as long.

    Attributes:
        draft_token_ids: the last of these tokens, which nobody has sampled yet.
    """

    request: Request
    num_scheduled_tokens: int
    draft_token_ids: tuple[int, ...] = ()

    @property
    def samples(self) -> bool:
        """Whether this step computes the last known token, so that a next one can be sampled."""
        request = self.request
        return request.num_computed_tokens + self.num_scheduled_tokens >= request.num_tokens


class SchedulerOutput(msgspec.Struct, frozen=True):
    """All that one step computes.

    Attributes:
        has_drafts: whether any request may have some, so that most steps need not look for them.
        num_drafts: how many to guess behind what each request samples.
        decodes: whether a request decodes in this step.
        num_prompt_tokens: tokens of prompts.
    """

    scheduled: tuple[ScheduledRequest, ...]
    num_scheduled_tokens: int
    has_drafts: bool = False
    num_drafts: int = 0
    decodes: bool = False
    num_prompt_tokens: int = 0

    @property
    def may_run_ahead(self) -> bool:
        """Whether it computes something, and needs nothing of a step in flight that only the host
        can tell: what a token means to a penalty or a grammar."""
        for item in self.scheduled:
            request = item.request
            if not request.num_tokens_in_flight:
                continue
            if request.changes_logits or request.sampling_params.prompt_logprobs is not None:
                return False
            grammar = request.grammar
            if grammar is not None and grammar.num_free <= request.num_tokens_pending:
                return False
        return bool(self.scheduled)

    def without_finished(self) -> SchedulerOutput:
        """Return this step, which was scheduled ahead, without requests that have ended since."""
        return self.without(lambda item: item.request.status.is_finished)

    def without(self, is_left_out: Callable[[ScheduledRequest], bool]) -> SchedulerOutput:
        """Return this step without the parts that a predicate leaves out."""
        left = tuple(item for item in self.scheduled if not is_left_out(item))
        num_tokens = sum(item.num_scheduled_tokens for item in left)
        return msgspec.structs.replace(self, scheduled=left, num_scheduled_tokens=num_tokens)


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Logprobs of the prompt tokens from ``first_position`` on, one chunk's share of them."""

    first_position: int
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """What was sampled, by request id.

    Attributes:
        sampled_token_ids: of the scheduled requests that sample, in their order: one token, and
            one more for each leading draft that is what was sampled in its place.
        logprobs: of those tokens (maybe of some behind them), where a request asks for them.
        prompt_logprobs: of the prompt tokens that this step predicts, likewise.
        draft_token_ids: what may come behind the sampled tokens, by request id; the next step may
            compute it, and tells.
        without_numbers: ids of requests with NaN or infinite logits; their tokens mean nothing.
        started_at, ended_at: when it was computed, by the monotonic clock.
        drafting_s: seconds of that in which the drafts were guessed.
    """

    sampled_token_ids: dict[str, tuple[int, ...]]
    logprobs: dict[str, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    prompt_logprobs: dict[str, PromptLogprobs] = field(default_factory=dict)
    draft_token_ids: dict[str, tuple[int, ...]] = field(default_factory=dict)
    without_numbers: frozenset[str] = frozenset()
    started_at: float = field(default=0.0, compare=False)
    ended_at: float = field(default=0.0, compare=False)
    drafting_s: float = field(default=0.0, compare=False)


class StepResult(msgspec.Struct, frozen=True):
    """What a step did: new tokens, and which requests ended.

    Attributes:
        scheduled: what the step computed; nothing when no step ended.
    """

    outputs: tuple[RequestDelta, ...] = ()
    finished: tuple[Request, ...] = ()
    scheduled: SchedulerOutput = SchedulerOutput((), 0)
