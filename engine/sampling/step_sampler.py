"""StepSampler: draws a step's tokens and logprobs from its logits, on the device or the host.

LaunchedStep: a step that was launched on the device, with a method that waits for its result.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.core.outputs import ModelRunnerOutput, PromptLogprobs
from engine.core.step_plan import StepHooks
from engine.sampling.device_sampling import sample_on_device, upload_parameters
from engine.sampling.gumbel import NO_TOKEN, Floats
from engine.sampling.logprobs import PromptRows, compute_logprobs, compute_prompt_logprobs
from engine.sampling.rejection import sample_with_rejection
from engine.sampling.sampler import rows_without_numbers, sample
from engine.sampling.sampling_input import SamplingInput

Proposed = Mapping[int, Floats]  # distribution from which each row's draft was drawn


@dataclass(frozen=True, slots=True)
class StepSampler:
    """Draws the tokens of a step, on the device or on the host, with equal results.

    Tokens with penalties, grammars or logprobs are drawn on the host.

    Attributes:
        samples_on_device: whether the sampling kernel runs on the device.
        rejects: whether drafts are accepted by rejection sampling; otherwise, a draft is accepted
            if it equals the sampled token.
    """

    samples_on_device: bool
    rejects: bool

    def needs_host(self, sampling: SamplingInput) -> bool:
        """Return whether the host must draw these tokens, because the kernel lacks a feature."""
        return sampling.needs_host or self.judges_drafts(sampling)

    def judges_drafts(self, sampling: SamplingInput) -> bool:
        """Return whether rejection sampling decides which of this step's drafts are accepted."""
        return self.rejects and bool(sampling.draft_token_ids)

    def prompt_logprobs(
        self,
        compute_logits: Callable[[range], Tensor],
        prompt_rows: Sequence[PromptRows],
    ) -> dict[str, PromptLogprobs]:
        """Return the logprobs of a step's prompt tokens; see `compute_prompt_logprobs`."""
        return compute_prompt_logprobs(compute_logits, prompt_rows)

    def draw_on_device(
        self, logits: Tensor, sampling: SamplingInput, device: torch.device
    ) -> Tensor:
        """Draw tokens, `[num_sampling]` int64 on the device; `NO_TOKEN` where logits are bad."""
        tensors = upload_parameters(sampling.parameters, sampling.keys, device)
        return sample_on_device(logits, tensors)

    def draw_on_host(
        self,
        logits: Tensor,
        sampling: SamplingInput,
        hooks: StepHooks,
        prompt_logprobs: dict[str, PromptLogprobs],
        proposed: Callable[[], Proposed | None],
    ) -> tuple[ModelRunnerOutput, list[int]]:
        """Return the step's output, and its tokens: one for each row of the logits.

        Args:
            logits: `[num_sampling, vocab_size]`.
            proposed: returns the distributions that drafts were drawn from; called only for
                rejection sampling.
        """
        if self.judges_drafts(sampling):
            token_ids = sample_with_rejection(
                logits.float(), sampling, hooks.allowed_bits, proposed()
            )
        else:
            token_ids = sample(logits, sampling, hooks.allowed_bits)
        wrong = rows_without_numbers(logits, token_ids)
        for row in wrong:  # later code needs a valid token
            token_ids[row] = 0
        output = ModelRunnerOutput(
            sampling.accept(token_ids),
            compute_logprobs(logits, sampling, token_ids),
            prompt_logprobs,
            without_numbers=frozenset(sampling.request_ids[row] for row in wrong),
        )
        return output, token_ids


@dataclass(slots=True)
class LaunchedStep:
    """A step that was launched on the device, and its result.

    Attributes:
        output: the result; its tokens are missing until ``done``.
        token_ids: `[num_sampling]` int64 on the host, valid after ``done``; None: see ``output``.
        done: CUDA event of the step's end; None: the step has ended.
        started_at: when the step was launched, in seconds of the monotonic clock.
        ended_at: when the step ended, in seconds of the monotonic clock; None: unknown before
            `wait`.
        pooled: results of pooled requests, float32 on the device, by request id.
    """

    sampling: SamplingInput
    output: ModelRunnerOutput
    token_ids: Tensor | None
    done: torch.Event | None
    started_at: float
    ended_at: float | None = None
    pooled: Mapping[str, Tensor] = field(default_factory=dict)

    def wait(self) -> ModelRunnerOutput:
        """Wait until the step's KV and tokens are computed; return the result."""
        if self.done is not None:
            self.done.synchronize()
        output, sampled = self.output, self.output.sampled_token_ids
        without_numbers = output.without_numbers
        if self.token_ids is not None:
            drawn = self.token_ids.tolist()
            if NO_TOKEN in drawn:
                bad = {row for row, token_id in enumerate(drawn) if token_id == NO_TOKEN}
                without_numbers = frozenset(self.sampling.request_ids[row] for row in bad)
                drawn = self.token_ids.clamp(min=0).tolist()  # later code needs a valid token
            sampled = self.sampling.accept(drawn)
        pooled = {name: numbers.cpu() for name, numbers in self.pooled.items()}
        wrong = [name for name, numbers in pooled.items() if not numbers.isfinite().all()]
        return ModelRunnerOutput(
            sampled,
            output.logprobs,
            output.prompt_logprobs,
            output.draft_token_ids,
            without_numbers.union(wrong),
            output.failed_images,
            {name: numbers.numpy().tobytes() for name, numbers in pooled.items()},
            drafting_s=output.drafting_s,
            encoding_s=output.encoding_s,
            started_at=self.started_at,
            ended_at=self.ended_at or time.monotonic(),
        )
