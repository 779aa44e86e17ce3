"""StepSampler: draws a step's tokens from its logits, on the device or on the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.core.outputs import ModelRunnerOutput, PromptLogprobs
from engine.core.step_plan import StepHooks
from engine.sampling.device_sampling import sample_on_device, upload_parameters
from engine.sampling.gumbel import Floats
from engine.sampling.logprobs import compute_logprobs
from engine.sampling.rejection import sample_with_rejection
from engine.sampling.sampler import rows_without_numbers, sample
from engine.sampling.sampling_input import SamplingInput

Proposed = Mapping[int, Floats]  # by row, the distribution that its draft was drawn from


@dataclass(frozen=True, slots=True)
class StepSampler:
    """Draw tokens; the choice between device and host changes no token.

    Tokens whose choice depends on more than the logits (penalties, grammars), and tokens with
    logprobs, are drawn on the host.

    Attributes:
        samples_on_device: whether the sampling kernel runs on the device.
        rejects: whether drafts are accepted by rejection sampling; otherwise, a draft is accepted
            if it equals the sampled token.
    """

    samples_on_device: bool
    rejects: bool

    def needs_host(self, sampling: SamplingInput) -> bool:
        """Return whether these tokens are drawn on the host although the kernel runs."""
        return sampling.needs_host or self.judges_drafts(sampling)

    def judges_drafts(self, sampling: SamplingInput) -> bool:
        """Return whether rejection sampling judges drafts of this step."""
        return self.rejects and bool(sampling.draft_token_ids)

    def draw_on_device(
        self, logits: Tensor, sampling: SamplingInput, device: torch.device
    ) -> Tensor:
        """Return the tokens, `[num_sampling]` int64 on the device; `NO_TOKEN` marks bad logits."""
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
            proposed: called if drafts are judged.
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
