"""Input and output of a step: the scheduled requests and their results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from baton.api.outputs import FinishReason, RequestDelta, TokenLogprobs
from engine.core.request import Request


class ScheduledRequest(msgspec.Struct, frozen=True, gc=False):
    """One request's part of a step: compute its next ``num_scheduled_tokens`` tokens.

    This class is a msgspec struct, because creating one takes a tenth of a frozen dataclass's time.

    Attributes:
        draft_token_ids: drafts to compute, which are the last of the scheduled tokens; empty: no
            drafts.
    """

    request: Request
    num_scheduled_tokens: int
    draft_token_ids: tuple[int, ...] = ()

    @property
    def samples(self) -> bool:
        """Return whether the step computes the last known token, and so samples the next one."""
        request = self.request
        return request.num_computed_tokens + self.num_scheduled_tokens >= request.num_tokens


class SchedulerOutput(msgspec.Struct, frozen=True):
    """All requests and tokens that one step computes.

    Attributes:
        has_drafts: whether any request may have drafts to compute; if False, no code searches for
            them.
        num_drafts: number of drafts to make for each request after its sampled token.
        decodes: whether any request decodes in this step.
        num_prompt_tokens: prompt tokens in this step.
    """

    scheduled: tuple[ScheduledRequest, ...]
    num_scheduled_tokens: int
    has_drafts: bool = False
    num_drafts: int = 0
    decodes: bool = False
    num_prompt_tokens: int = 0

    @property
    def may_run_ahead(self) -> bool:
        """Return whether the step may be launched before the step in flight has ended.

        The result is False if the step computes nothing, or if its penalties, grammars or prompt
        logprobs need the tokens of the step in flight on the host.
        """
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
        """Return this step without the requests that have ended since the step was scheduled."""
        return self.without(lambda item: item.request.status.is_finished)

    def without(self, is_left_out: Callable[[ScheduledRequest], bool]) -> SchedulerOutput:
        """Return this step without the requests for which ``is_left_out`` is true."""
        left = tuple(item for item in self.scheduled if not is_left_out(item))
        num_tokens = sum(item.num_scheduled_tokens for item in left)
        return msgspec.structs.replace(self, scheduled=left, num_scheduled_tokens=num_tokens)


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Logprobs of prompt tokens from ``first_position`` on, for one chunk of the prompt."""

    first_position: int
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """The sampled tokens of a step, by request id.

    Attributes:
        sampled_token_ids: tokens of the requests that sample, in scheduled order: one token, and
            one more for each accepted draft.
        logprobs: logprobs of the sampled tokens (maybe of other requests too), by request id.
        prompt_logprobs: logprobs of the prompt tokens that this step predicts, of requests that
            ask for them.
        draft_token_ids: drafts of the tokens after the sampled ones, by request id, for the next
            step to compute.
        without_numbers: ids of requests whose logits are NaN or infinite, so that their sampled
            tokens are invalid.
        failed_images: by digest of an image, why it could not be encoded; the worker has no
            encoding of it.
        pooled: results of the pooled requests whose last token was computed, by request id; see
            `RequestDelta.pooled`.
        started_at, ended_at: when the step's computation started and ended, in seconds of the
            monotonic clock.
        drafting_s: seconds spent on making drafts, as part of the step.
        encoding_s: seconds spent on encoding images, as part of the step.
    """

    sampled_token_ids: dict[str, tuple[int, ...]]
    logprobs: dict[str, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    prompt_logprobs: dict[str, PromptLogprobs] = field(default_factory=dict)
    draft_token_ids: dict[str, tuple[int, ...]] = field(default_factory=dict)
    without_numbers: frozenset[str] = frozenset()
    failed_images: Mapping[bytes, str] = field(default_factory=dict)
    pooled: dict[str, bytes] = field(default_factory=dict)
    started_at: float = field(default=0.0, compare=False)
    ended_at: float = field(default=0.0, compare=False)
    drafting_s: float = field(default=0.0, compare=False)
    encoding_s: float = field(default=0.0, compare=False)


class StepResult(msgspec.Struct, frozen=True):
    """The result of a step: new tokens and ended requests.

    Attributes:
        scheduled: the step that ended, with its requests; empty if no step ended.
    """

    outputs: tuple[RequestDelta, ...] = ()
    finished: tuple[Request, ...] = ()
    scheduled: SchedulerOutput = SchedulerOutput((), 0)


def pooled_delta(request: Request, pooled: bytes) -> RequestDelta:
    """Return the output that carries a pooled request's result and ends the request."""
    return RequestDelta(
        request.request_id, 0, (), FinishReason.STOP, epoch=request.epoch, pooled=pooled
    )
