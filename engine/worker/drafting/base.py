"""Drafting: what a model runner needs of whoever guesses what comes behind its steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from engine.sampling.gumbel import Floats
from engine.sampling.philox import counter_words
from engine.sampling.rejection import DRAFT, probabilities, salted
from engine.sampling.sampler import choose
from engine.worker.drafting.drafting_step import DraftingStep, Ints

Drafts = dict[str, tuple[int, ...]]
Sampled = Mapping[str, tuple[int, ...]]


class Drafting(Protocol):
    """Guesses behind steps, each when it has been computed and its tokens are known.

    Attributes:
        chooser: draws the drafts.
    """

    chooser: DraftChooser

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


class DraftChooser:
    """Draws drafts, and where they may be rejected by chance, remembers what they were drawn from.

    Penalties and grammars are not looked at: where they change the draw, the draft is wrong.

    Args:
        rejects: whether drafts are kept by rejection sampling (`engine/sampling/rejection.py`):
            then they are drawn with noise of their own. Else with the noise that their positions'
            tokens will be drawn with: a draft is that token wherever the two distributions are
            near enough.
    """

    def __init__(self, *, rejects: bool = False) -> None:
        self._rejects = rejects
        # By row of the input batch: drafts from a position on, and their distributions.
        self._drawn: dict[int, dict[int, tuple[int, Floats]]] = {}

    def choose(
        self,
        logits: Tensor,
        parameters: npt.NDArray[np.void],
        rows: Sequence[int],
        positions: Ints,
    ) -> list[int]:
        """Draw a draft per row of the logits.

        Args:
            logits: `[n, vocab_size]`.
            parameters: `[n]` of `PARAMETERS`.
            rows: `[n]`, of the input batch.
            positions: `[n]`, where in their requests the drafts stand.
        """
        token_ids: list[int]
        if not parameters["temperature"].any():
            # Nothing is drawn. On the host numpy takes a fraction of torch's time.
            host = logits.float().cpu().numpy()
            token_ids = host.argmax(axis=-1).tolist()
        else:
            places = positions - parameters["num_prompt_tokens"]
            keys = counter_words(parameters["seed"], places)
            if self._rejects:
                keys = salted(keys, DRAFT)
            # NaN logits give an arbitrary draft: the model checks the draft, and does not keep it.
            token_ids = choose(logits.float(), parameters, keys).clip(min=0).tolist()
        if self._rejects:
            drawn_from = probabilities(logits.float(), parameters)
            for index, row in enumerate(rows):
                own = self._drawn.setdefault(row, {})
                own[int(positions[index])] = token_ids[index], drawn_from[index]
        return token_ids

    def take(self, step: DraftingStep) -> dict[int, Floats]:
        """Take what the drafts that a step computes were drawn from, by row that it samples.

        Nothing is remembered of drafts that another node guessed.
        """
        found: dict[int, Floats] = {}
        offset = sampled = 0
        for index, row in enumerate(step.rows):
            end = step.starts[index] + step.num_tokens[index]
            own = {} if row in step.new_rows else self._drawn.pop(row, {})
            num_drafts = max(end - step.num_known[index], 0)
            first = offset + step.num_tokens[index] - num_drafts
            for place in range(num_drafts):
                known = own.get(step.num_known[index] + place)
                if known is not None and known[0] == step.token_ids[first + place]:
                    found[sampled + place] = known[1]
            sampled += num_drafts + 1 if end >= step.num_known[index] else 0
            offset += step.num_tokens[index]
        return found

    def forget(self, rows: Iterable[int]) -> None:
        """Drop what is remembered of rows that other requests have now."""
        for row in rows:
            self._drawn.pop(row, None)


def accepted_end(step: DraftingStep, index: int, sampled: Sampled) -> int:
    """Up to where, of a request, what the step computed is right: the position behind it.

    Where the request samples, its newest token stands there, which nobody has computed.
    """
    token_ids = sampled.get(step.request_ids[index])
    if token_ids is None:
        return step.starts[index] + step.num_tokens[index]
    return step.num_known[index] + len(token_ids) - 1
