"""Drafting: a model runner's interface to a drafter. DraftingStep: the drafter's input."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from engine.sampling.gumbel import Floats
from engine.sampling.philox import counter_words
from engine.sampling.rejection import DRAFT, probabilities, salted
from engine.sampling.sampler import choose
from engine.sampling.sampling_input import PARAMETERS

Ints = npt.NDArray[np.int64]
Drafts = dict[str, tuple[int, ...]]
Sampled = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class DraftingStep:
    """A drafter's input for one step; requests are in the plan's order.

    All values are copies that are made when the step is prepared, because a later plan may assign
    the rows to other requests before this step has been computed.

    Attributes:
        num_drafts: number of drafts to make after each request's last sampled token.
        new_rows: rows that the plan assigned to new requests.
        request_ids: ids of the requests.
        rows, starts, num_tokens, num_known: `[num_requests]`; see `StepPlan.shares`.
        token_ids: computed tokens of all requests; see `StepPlan`.
        next_token_ids: `[num_requests]`; see `StepPlan`.
        parameters: `[num_requests]` of `PARAMETERS`.
        block_tables: one per KV cache group, `[num_requests, max_blocks]`.
        num_held: `[num_requests]`, number of tokens that fit into each request's blocks.
        undrafted: rows of requests that get no drafts, and that the drafter does not read.
        is_silent: whether no drafts are wanted and every request computes only its last known
            token. If so, `parameters`, `block_tables` and `num_held` are empty.
    """

    num_drafts: int
    new_rows: frozenset[int]
    request_ids: tuple[str, ...]
    rows: tuple[int, ...]
    starts: tuple[int, ...]
    num_tokens: tuple[int, ...]
    num_known: tuple[int, ...]
    token_ids: Sequence[int]
    next_token_ids: tuple[int, ...]
    parameters: npt.NDArray[np.void]
    block_tables: tuple[npt.NDArray[np.int32], ...]
    num_held: tuple[int, ...]
    undrafted: frozenset[int] = frozenset()
    is_silent: bool = False


# The input of a step in which the drafter has no request to read.
FOR_NOBODY = DraftingStep(
    num_drafts=0, new_rows=frozenset(), request_ids=(), rows=(), starts=(), num_tokens=(),
    num_known=(), token_ids=(), next_token_ids=(), parameters=np.zeros(0, PARAMETERS),
    block_tables=(), num_held=(), is_silent=True,
)  # fmt: skip


class Drafting(Protocol):
    """Work that a drafter does after each step, once the step's tokens are known.

    Attributes:
        chooser: samples the drafts.
    """

    chooser: DraftChooser

    def after_step(
        self,
        step: DraftingStep,
        states: Tensor,
        sampled: Sampled,
        after_layer: Callable[[int], None] | None = None,
    ) -> Drafts:
        """Return drafts after the sampled tokens of a step, by request id.

        Args:
            states: `[num_tokens, ...]`, states of all computed tokens, from the layers that the
                drafter reads.
            sampled: the step's sampled tokens, by request id
                (`ModelRunnerOutput.sampled_token_ids`).
            after_layer: called with the index of each layer of the drafter once the layer's KV is
                written.
        """


class DraftChooser:
    """Samples drafts, and keeps their distributions if rejection sampling needs them.

    Drafts are sampled without penalties and grammars; verification rejects drafts that violate
    them.

    Args:
        rejects: whether drafts are accepted by rejection sampling (`engine/sampling/rejection.py`).
            If True, drafts are sampled with noise of their own. If False, a draft is sampled with
            the same noise as the token at its position, so that draft and token are equal if
            drafter and model have similar distributions.
    """

    def __init__(self, *, rejects: bool = False) -> None:
        self._rejects = rejects
        # Drafts and their distributions, by row of the input batch, then by position.
        self._drawn: dict[int, dict[int, tuple[int, Floats]]] = {}

    def choose(
        self,
        logits: Tensor,
        parameters: npt.NDArray[np.void],
        rows: Sequence[int],
        positions: Ints,
    ) -> list[int]:
        """Sample a draft per row of the logits.

        Args:
            logits: `[n, vocab_size]`.
            parameters: `[n]` of `PARAMETERS`.
            rows: `[n]`, rows of the input batch.
            positions: `[n]`, positions of the drafts in their requests.
        """
        token_ids: list[int]
        if not parameters["temperature"].any():
            # Choose greedy drafts on the host, where numpy takes a fraction of torch's time.
            host = logits.float().cpu().numpy()
            token_ids = host.argmax(axis=-1).tolist()
        else:
            places = positions - parameters["num_prompt_tokens"]
            keys = counter_words(parameters["seed"], places)
            if self._rejects:
                keys = salted(keys, DRAFT)
            # For NaN logits, any draft will do: verification will reject it.
            token_ids = choose(logits.float(), parameters, keys).clip(min=0).tolist()
        if self._rejects:
            drawn_from = probabilities(logits.float(), parameters)
            for index, row in enumerate(rows):
                own = self._drawn.setdefault(row, {})
                own[int(positions[index])] = token_ids[index], drawn_from[index]
        return token_ids

    def pop_distributions(self, step: DraftingStep) -> dict[int, Floats]:
        """Remove and return the distributions of a step's drafts, by index of the sampled token.

        Drafts made by another node are left out, because their distributions are unknown.
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
        """Drop the drafts of rows that now belong to other requests."""
        for row in rows:
            self._drawn.pop(row, None)


def accepted_end(step: DraftingStep, index: int, sampled: Sampled) -> int:
    """Return the position after a request's last computed token that is not a rejected draft.

    If the request samples, this is the position of its newest token, which has no KV yet.
    """
    token_ids = sampled.get(step.request_ids[index])
    if token_ids is None:
        return step.starts[index] + step.num_tokens[index]
    return step.num_known[index] + len(token_ids) - 1
