"""StepExtras: what a step computes besides tokens: image encodings, pooled results, and drafts.

    before the forward    new images are encoded; some tokens read encodings
    after the forward     prompts that end in this step get their pooled results
    after the sampler     a drafter drafts the tokens after the sampled ones

Refuses to know: how a forward is run, sampling.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from engine.core.step_plan import StepHooks, StepPlan
from engine.sampling.step_sampler import LaunchedStep, Proposed
from engine.worker.drafting.base import Drafting, DraftingStep
from engine.worker.extras.encodings import Encodings, ReadImages
from engine.worker.extras.pooler import Pooler
from engine.worker.extras.rank_tokens import RankTokens
from engine.worker.input_batch import InputBatch
from engine.worker.inputs.prepared_step import PreparedStep
from models.base import CausalLM
from models.parallel.group import ALONE, Ranks

NO_IMAGES = ReadImages()


class StepExtras:
    """Adds encodings, pooled results and drafts to the steps of one model runner.

    Args:
        model: the model, with its encoder of images.
        device: device of the model.
        tokens: exchanges sampled tokens with other ranks. Only the last pipeline stage pools.
        ranks: the ranks that share the model.
        drafting: makes drafts after each step, once its tokens are known; None: no drafts.
        replays: returns whether steps replay captured graphs, which overwrite earlier hidden
            states.

    Attributes:
        encodings: encodings of images.
        tokens: see the arguments.
    """

    def __init__(
        self,
        model: CausalLM,
        device: torch.device,
        *,
        tokens: RankTokens | None = None,
        ranks: Ranks = ALONE,
        drafting: Drafting | None = None,
        replays: Callable[[], bool] = lambda: False,
    ) -> None:
        self.encodings = Encodings(model, device, ranks)
        self.tokens = tokens or RankTokens()
        self._pooler = Pooler(model, is_last_stage=self.tokens.is_last_stage)
        self._drafting, self._replays = drafting, replays
        self._drafting_steps: deque[DraftingStep] = deque()  # prepared, but not launched yet
        self._read = NO_IMAGES
        self._pooled: dict[str, Tensor] = {}

    # ------------------------------------------------------------------ images and poolings

    def begin(self, prepared: PreparedStep) -> PreparedStep:
        """Encode a step's new images; return the step with the encodings that it reads."""
        self._read = NO_IMAGES
        if prepared.images is None:
            return prepared
        self._read = self.encodings.read(prepared.images)
        return replace(prepared, model=replace(prepared.model, images=self._read.rows))

    def pool(self, hidden: Tensor, prepared: PreparedStep) -> None:
        """Compute the results of pooled requests whose prompt ends in a step, for `add_to`.

        Args:
            hidden: `[num_tokens, hidden_size]`, the step's hidden states after the last norm.
        """
        self._pooled = self._pooler.pool(hidden, prepared) if prepared.pooled else {}

    def add_to(self, launched: LaunchedStep) -> LaunchedStep:
        """Add the results of `begin` and `pool` to the launched step, and return the step."""
        launched.pooled = self._pooled
        if self._read is not NO_IMAGES:
            failed, seconds = self._read.failed, self._read.seconds
            launched.output = replace(launched.output, failed_images=failed, encoding_s=seconds)
        return launched

    # ------------------------------------------------------------------ drafts

    def prepare(self, plan: StepPlan, batch: InputBatch) -> None:
        """Copy what the drafter needs of a plan, right after the batch has read the plan."""
        if self._drafting is not None:
            self._drafting_steps.append(batch.drafting_step(plan))

    def draft(self, launched: LaunchedStep, hidden: Tensor, hooks: StepHooks) -> LaunchedStep:
        """Wait for a launched step and add drafts; without a drafter, only return the step.

        Args:
            hidden: `[num_tokens, hidden_size]`, the step's hidden states.
        """
        if self._drafting is None:
            return launched
        step, layers = self._drafting_steps.popleft(), hooks.after_layer
        is_known = launched.ended_at is not None and launched.token_ids is None
        if not step.rows or (step.is_silent and is_known):
            # Make no drafts; the drafter only reads the tokens.
            self._drafting.after_step(step, hidden, launched.output.sampled_token_ids, layers)
            return launched
        output = launched.wait()
        started_at = time.monotonic()
        # Copy the hidden states, because the next replay of a graph overwrites them.
        states = hidden.clone() if self._replays() else hidden
        drafts = self._drafting.after_step(step, states, output.sampled_token_ids, layers)
        ended_at = time.monotonic()
        output = replace(output, draft_token_ids=drafts, drafting_s=ended_at - started_at)
        return LaunchedStep(launched.sampling, output, None, None, launched.started_at, ended_at)

    def draft_distributions(self) -> Proposed | None:
        """Return, by row, the distributions from which the next step's drafts were drawn."""
        if self._drafting is None:
            return None
        return self._drafting.chooser.pop_distributions(self._drafting_steps[0])
