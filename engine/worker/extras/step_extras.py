"""StepExtras: a step's work beside its tokens: encodings of images, and pooled numbers.

    before the forward    new images are encoded; some tokens read encodings
    after the forward     prompts that end in this step get their pooled numbers

Refuses to know: how a forward is run, sampling.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from engine.sampling.step_sampler import LaunchedStep
from engine.worker.extras.encodings import Encodings, ReadImages
from engine.worker.extras.pooler import Pooler
from engine.worker.inputs.prepared_step import PreparedStep
from models.base import CausalLM

NO_IMAGES = ReadImages()


class StepExtras:
    """The extras of one model runner's steps. Plain steps pass unchanged.

    Args:
        model: the model, with its encoder of images.
        device: device of the model.
        is_last_stage: whether this rank has the last layer, and so pools.

    Attributes:
        encodings: encodings of images.
    """

    def __init__(self, model: CausalLM, device: torch.device, *, is_last_stage: bool) -> None:
        self.encodings = Encodings(model, device)
        self._pooler = Pooler(model, is_last_stage=is_last_stage)
        self._read = NO_IMAGES
        self._pooled: dict[str, Tensor] = {}

    def begin(self, prepared: PreparedStep) -> PreparedStep:
        """Encode a step's new images; return the step with the encodings that it reads."""
        self._read = NO_IMAGES
        if prepared.images is None:
            return prepared
        self._read = self.encodings.read(prepared.images)
        return replace(prepared, model=replace(prepared.model, images=self._read.rows))

    def pool(self, hidden: Tensor, prepared: PreparedStep) -> None:
        """Compute a step's pooled numbers.

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
