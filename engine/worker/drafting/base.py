"""Drafting: what a model runner needs of whoever guesses what comes behind its steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from engine.sampling.philox import counter_words
from engine.sampling.sampler import choose
from engine.worker.drafting.drafting_step import DraftingStep, Ints

Drafts = dict[str, tuple[int, ...]]
Sampled = Mapping[str, tuple[int, ...]]


class Drafting(Protocol):
    """Guesses behind steps, each when it has been computed and its tokens are known."""

    def after_step(
        self,
        step: DraftingStep,
        states: Tensor,
        sampled: Sampled,
        after_layer: Callable[[int], None] | None = None,
    ) -> Drafts:
        """Guess what comes behind what a step sampled, by request id.

        Args:
            states: `[num_tokens, ...]`, what the drafter reads of the model, of all tokens that the
                step computed.
            sampled: see `ModelRunnerOutput.sampled_token_ids`.
            after_layer: called with the number of each layer of the drafter, when nothing more is
                written for it.
        """


def choose_drafts(
    logits: Tensor, parameters: npt.NDArray[np.void], positions: Ints, salt: int = 0
) -> list[int]:
    """Draw a draft per row with the noise that its position's token will be drawn with.

    So it is that token wherever the two distributions are near enough. Penalties and grammars are
    not looked at: where they change the draw, the draft is wrong.

    Args:
        logits: `[n, vocab_size]`.
        parameters: `[n]` of `PARAMETERS`.
        positions: `[n]`, where in their requests the drafts stand.
        salt: for noise of its own, where draws must not depend on the model's.
    """
    places = positions - parameters["num_prompt_tokens"]
    keys = counter_words(parameters["seed"] ^ np.uint64(salt), places)
    token_ids: list[int] = choose(logits.float(), parameters, keys).tolist()
    return token_ids


def accepted_end(step: DraftingStep, index: int, sampled: Sampled) -> int:
    """Up to where, of a request, what the step computed is right: the position behind it.

    Where the request samples, its newest token stands there, which nobody has computed.
    """
    token_ids = sampled.get(step.request_ids[index])
    if token_ids is None:
        return step.starts[index] + step.num_tokens[index]
    return step.num_known[index] + len(token_ids) - 1
