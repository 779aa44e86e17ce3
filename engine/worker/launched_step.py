"""LaunchedStep: a step on the device, and the result that it becomes when the device has ended."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.core.outputs import ModelRunnerOutput
from engine.sampling.gumbel import NO_TOKEN
from engine.sampling.sampling_input import SamplingInput


@dataclass(slots=True)
class LaunchedStep:
    """A step that was launched on the device.

    Attributes:
        output: the result, except tokens that are still to come.
        token_ids: `[num_sampling]` int64 on the host, valid after ``done``; None: see ``output``.
        done: event when the device has computed the step; None: it has.
        started_at: when the step was launched, by the monotonic clock.
        ended_at: when the step ended, likewise; None: unknown before `wait`.
    """

    sampling: SamplingInput
    output: ModelRunnerOutput
    token_ids: Tensor | None
    done: torch.Event | None
    started_at: float
    ended_at: float | None = None

    def wait(self) -> ModelRunnerOutput:
        """Wait until KV and tokens are here; return the result."""
        if self.done is not None:
            self.done.synchronize()
        output, sampled = self.output, self.output.sampled_token_ids
        without_numbers = output.without_numbers
        if self.token_ids is not None:
            drawn = self.token_ids.tolist()
            if NO_TOKEN in drawn:
                wrong = {row for row, token_id in enumerate(drawn) if token_id == NO_TOKEN}
                without_numbers = frozenset(self.sampling.request_ids[row] for row in wrong)
                drawn = self.token_ids.clamp(min=0).tolist()  # later code needs a valid token
            sampled = self.sampling.accept(drawn)
        return ModelRunnerOutput(
            sampled,
            output.logprobs,
            output.prompt_logprobs,
            output.draft_token_ids,
            without_numbers,
            drafting_s=output.drafting_s,
            started_at=self.started_at,
            ended_at=self.ended_at or time.monotonic(),
        )
