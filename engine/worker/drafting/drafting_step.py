"""DraftingStep: what of a step's plan is looked at by whoever guesses what comes behind it.

All of it is copied when the step is prepared: a later plan, which may be prepared before this step
has been computed, gives rows to other requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.sampling.sampling_input import PARAMETERS

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DraftingStep:
    """One step, by request, in the order of the plan.

    Attributes:
        num_drafts: how many to guess behind each token that is sampled last.
        new_rows: that another request had before.
        request_ids: see `StepPlan`, as are the next ones.
        rows, starts, num_tokens, num_known: `[num_requests]`.
        token_ids: of all requests, one behind the other.
        behind: `[num_requests]`.
        parameters: `[num_requests]` of `PARAMETERS`.
        block_tables: of each KV cache group, `[num_requests, max_blocks]`.
        num_held: `[num_requests]`, tokens that the blocks have room for.
        undrafted: rows that are not read, as nobody is to guess for them.
        is_silent: every request computes its last known token alone, and nobody is to guess behind
            it. What only guessing needs (parameters, block tables, room) is left out then.
    """

    num_drafts: int
    new_rows: frozenset[int]
    request_ids: tuple[str, ...]
    rows: tuple[int, ...]
    starts: tuple[int, ...]
    num_tokens: tuple[int, ...]
    num_known: tuple[int, ...]
    token_ids: Sequence[int]
    behind: tuple[int, ...]
    parameters: npt.NDArray[np.void]
    block_tables: tuple[npt.NDArray[np.int32], ...]
    num_held: tuple[int, ...]
    undrafted: frozenset[int] = frozenset()
    is_silent: bool = False


# A step of rows that nobody is to guess for.
FOR_NOBODY = DraftingStep(
    num_drafts=0, new_rows=frozenset(), request_ids=(), rows=(), starts=(), num_tokens=(),
    num_known=(), token_ids=(), behind=(), parameters=np.zeros(0, PARAMETERS), block_tables=(),
    num_held=(), is_silent=True,
)  # fmt: skip
