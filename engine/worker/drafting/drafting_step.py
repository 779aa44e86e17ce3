"""DraftingStep: the part of a step's plan that a drafter reads.

All values are copied when the step is prepared. A later plan may assign rows to other requests
before this step has been computed.
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
        num_drafts: number of drafts to make behind each request's last sampled token.
        new_rows: rows that belonged to another request before.
        request_ids: ids of the requests.
        rows, starts, num_tokens, num_known: `[num_requests]`; see `StepPlan.shares`.
        token_ids: computed tokens of all requests; see `StepPlan`.
        behind: `[num_requests]`; see `StepPlan`.
        parameters: `[num_requests]` of `PARAMETERS`.
        block_tables: one per KV cache group, `[num_requests, max_blocks]`.
        num_held: `[num_requests]`, tokens that the blocks have room for.
        undrafted: rows of requests that are not drafted for, hence not read.
        is_silent: whether every request computes just its last known token and no drafts are
            wanted; values that only drafting needs (parameters, block tables, room) are left out.
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


# A step whose requests are not drafted for.
FOR_NOBODY = DraftingStep(
    num_drafts=0, new_rows=frozenset(), request_ids=(), rows=(), starts=(), num_tokens=(),
    num_known=(), token_ids=(), behind=(), parameters=np.zeros(0, PARAMETERS), block_tables=(),
    num_held=(), is_silent=True,
)  # fmt: skip
