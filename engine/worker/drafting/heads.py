"""HeadsDrafting: makes each draft with a separate head on the model's last hidden state."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from engine.worker.drafting.base import DraftChooser, DraftingStep, Drafts, Sampled, accepted_end
from models.drafters.base import HeadsDrafter


class HeadsDrafting:
    """A drafter of heads without KV; see `engine.worker.drafting.base.Drafting` for the contract.

    Args:
        drafter: the heads; head i drafts the token i + 1 places after the sampled one.
        chooser: samples the drafts.
    """

    def __init__(self, drafter: HeadsDrafter, chooser: DraftChooser) -> None:
        self._drafter, self.chooser = drafter, chooser

    def after_step(
        self,
        step: DraftingStep,
        states: Tensor,
        sampled: Sampled,
        after_layer: Callable[[int], None] | None = None,
    ) -> Drafts:
        self.chooser.forget(step.new_rows)
        num_drafts = min(step.num_drafts, self._drafter.num_heads)
        if not num_drafts:
            return {}
        first_rows = np.cumsum((0, *step.num_tokens))
        wanted = [i for i, name in enumerate(step.request_ids) if name in sampled]
        if not wanted:
            return {}
        ends = np.array([accepted_end(step, index, sampled) for index in wanted])
        starts = np.array([step.starts[index] for index in wanted])
        rows = first_rows[wanted] + ends - 1 - starts
        of_rows = states[torch.from_numpy(rows).to(states.device)]
        logits = self._drafter.draft(of_rows, num_drafts)  # [n, num_drafts, vocab_size]
        token_ids = self.chooser.choose(
            logits.flatten(0, 1),
            step.parameters[wanted].repeat(num_drafts),
            [step.rows[index] for index in wanted for _ in range(num_drafts)],
            (ends[:, None] + 1 + np.arange(num_drafts)).reshape(-1),
        )
        return {
            step.request_ids[index]: tuple(token_ids[i * num_drafts : (i + 1) * num_drafts])
            for i, index in enumerate(wanted)
        }
