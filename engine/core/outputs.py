"""What a step is to the core and to nodes: who computes how much, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from baton.api.outputs import RequestOutput, TokenLogprobs
from engine.core.request import Request


class ScheduledRequest(msgspec.Struct, frozen=True, gc=False):
    """One request's part of a step: compute its next ``num_scheduled_tokens`` tokens.

    A struct, for one is made per output token, and a frozen dataclass takes ten times as long.
    """

    request: Request
    num_scheduled_tokens: int

    @property
    def samples(self) -> bool:
        """Whether this step computes the last known token, so that a next one can be sampled."""
        request = self.request
        return request.num_computed_tokens + self.num_scheduled_tokens == request.num_tokens


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """All that one step computes."""

    scheduled: tuple[ScheduledRequest, ...]
    num_scheduled_tokens: int

    @property
    def may_run_ahead(self) -> bool:
        """Whether it computes something, and needs nothing of a step in flight that only the host
        can tell: what a token means to a penalty or a grammar."""
        for item in self.scheduled:
            request = item.request
            if request.num_tokens_in_flight and (
                request.changes_logits or request.sampling_params.prompt_logprobs is not None
            ):
                return False
        return bool(self.scheduled)

    def without_finished(self) -> SchedulerOutput:
        """What is still to be computed of a step that was scheduled ahead."""
        left = tuple(item for item in self.scheduled if not item.request.status.is_finished)
        return SchedulerOutput(left, sum(item.num_scheduled_tokens for item in left))


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Logprobs of the prompt tokens from ``first_position`` on, one chunk's share of them."""

    first_position: int
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """What was sampled, by request id.

    Attributes:
        sampled_token_ids: of the scheduled requests that sample, in their order.
        logprobs: of those tokens, where a request asks for them.
        prompt_logprobs: of the prompt tokens that this step predicts, likewise.
        started_at, ended_at: when it was computed, by the monotonic clock.
    """

    sampled_token_ids: dict[str, int]
    logprobs: dict[str, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[str, PromptLogprobs] = field(default_factory=dict)
    started_at: float = field(default=0.0, compare=False)
    ended_at: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step did: new tokens, and which requests ended.

    Attributes:
        scheduled: what the step computed; nothing when no step ended.
    """

    outputs: tuple[RequestOutput, ...] = ()
    finished: tuple[Request, ...] = ()
    scheduled: SchedulerOutput = SchedulerOutput((), 0)
