"""StepPlan: a step as the worker gets it: plain values that can be sent to another process.

The worker keeps a row for each running request; a plan lists what changes in these rows:

    core     Request --- row 3 ---+            worker    row 3: parameters, block table, last token
                                  |
    plan     NewRow(3, ...), NewBlocks(3, [7, 8]), shares [3, start, num_tokens, num_known]

Refuses to know: how requests are chosen, tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from baton.api.images import ImageSpan
from baton.api.pooling import PoolingParams
from baton.api.sampling_params import SamplingParams
from engine.core.drafts import is_drafted_for
from engine.core.images.image_plan import StepImages
from engine.core.outputs import ScheduledRequest
from engine.core.request import Request

UNKNOWN_TOKEN = -1  # placeholder for a token that the step in flight samples
SHARE = 4  # numbers per request in `StepPlan.shares`


class NewRow(msgspec.Struct, frozen=True, gc=False):
    """Tells the worker to assign a row to a new request; the row then has no blocks.

    Attributes:
        token_ids: all known tokens, if sampling depends on them; the worker appends later ones.
        is_drafted_for: whether the drafter reads the request and makes drafts for it.
        adapter: digest of the adapter that computes the request; empty: the base model.
        images: the prompt's images, which determine position ids if there are three axes.
        pooling: what to compute from the request's hidden states; None: sample tokens.
    """

    row: int
    request_id: str
    sampling_params: SamplingParams
    seed: int
    num_prompt_tokens: int
    stop_token_ids: frozenset[int]
    token_ids: list[int]
    is_drafted_for: bool = False
    adapter: str = ""
    images: tuple[ImageSpan, ...] = ()
    pooling: PoolingParams | None = None


class NewBlocks(msgspec.Struct, frozen=True, gc=False):
    """Tells the worker to append blocks to a row; block ids are interleaved over groups."""

    row: int
    block_ids: list[int]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """All inputs of one step, as changes since the previous step.

    Attributes:
        new_rows: rows to assign first.
        new_blocks: blocks to append to rows after ``new_rows`` are assigned.
        shares: four numbers per request: its row, the position of its first computed token, the
            number of computed tokens, and the number of known tokens, including those that the step
            in flight samples. If the last known token is computed, the next token is sampled.
            Computed tokens after the last known token are drafts; one more token is sampled after
            each draft. A pooled request samples no token, so its number of known tokens is the
            prompt's length plus one. Requests of one adapter are adjacent.
        token_ids: the computed tokens of all requests; `UNKNOWN_TOKEN` where the step in flight
            samples a token.
        constrained: ids of requests whose sampling needs a mask of a grammar or of a thought
            (`StepHooks.allowed_bits`).
        num_drafts: number of drafts to make after each request's last sampled token.
        next_token_ids: for the drafter, the token of each request that follows the computed tokens;
            `UNKNOWN_TOKEN` if this step samples the token. Empty without a drafter.
        images: images to encode and to place; None: the step has no images.
    """

    new_rows: tuple[NewRow, ...]
    new_blocks: tuple[NewBlocks, ...]
    shares: list[int]
    token_ids: list[int]
    constrained: tuple[str, ...] = ()
    num_drafts: int = 0
    next_token_ids: tuple[int, ...] = ()
    images: StepImages | None = None

    @property
    def num_requests(self) -> int:
        return len(self.shares) // SHARE


@dataclass(frozen=True, slots=True)
class StepHooks:
    """Functions that are called while a step is computed, on the computing thread.

    Attributes:
        after_layer: called with a layer's index once the layer is computed (on a GPU: once its
            computation is launched).
        allowed_bits: returns the grammar masks by request id, one per sampled token
            (`GrammarState.allowed_bits`). Called after the computation of the logits is launched,
            when the host would be idle.
    """

    after_layer: Callable[[int], None] | None = None
    allowed_bits: Callable[[], Mapping[str, Sequence[NDArray[np.uint8]]]] = dict


class StepPlanner:
    """Assigns rows to requests, and writes each step's plan as changes since the rows' last steps.

    Args:
        max_num_requests: number of rows.
        has_next_tokens: whether plans have `StepPlan.next_token_ids`.
    """

    def __init__(self, max_num_requests: int, *, has_next_tokens: bool = False) -> None:
        self._free_rows = list(range(max_num_requests))
        self._has_next_tokens = has_next_tokens

    def plan(self, scheduled: Sequence[ScheduledRequest], num_drafts: int = 0) -> StepPlan:
        """Make the plan of a step; call after the previous step was planned and begun.

        This is the only loop over requests that runs in every step, once per output token.
        """
        new_rows: list[NewRow] = []
        new_blocks: list[NewBlocks] = []
        constrained: list[str] = []
        shares: list[int] = []
        token_ids: list[int] = []
        for item in scheduled:
            request, num_tokens = item.request, item.num_scheduled_tokens
            row, known, block_ids = request.row, request.token_ids, request.block_ids
            if row < 0:
                row = request.row = self._free_rows.pop()
                new_rows.append(_new_row(request))
            if len(block_ids) != request.num_planned_blocks:
                new_blocks.append(NewBlocks(row, block_ids[request.num_planned_blocks :]))
                request.num_planned_blocks = len(block_ids)
            start = request.num_computed_tokens + request.num_tokens_in_flight
            num_known = len(known) + request.num_tokens_pending + (request.pooling is not None)
            if num_tokens == 1:
                token_ids.append(known[start] if start < len(known) else UNKNOWN_TOKEN)
            else:
                token_ids += known[start : start + num_tokens]
                token_ids += item.draft_token_ids
            shares += (row, start, num_tokens, num_known)
            if (
                request.grammar is not None
                and start + num_tokens >= num_known
                and request.grammar.needs_masks(
                    request.num_tokens_pending, len(item.draft_token_ids)
                )
            ):
                constrained.append(request.request_id)
        return StepPlan(
            tuple(new_rows),
            tuple(new_blocks),
            shares,
            token_ids,
            tuple(constrained),
            num_drafts,
            tuple(map(_next_token_id, scheduled)) if self._has_next_tokens else (),
        )

    def leave(self, request: Request) -> None:
        """Free the row of a request, if it has one; a request that runs again gets a new row."""
        if request.row >= 0:
            self._free_rows.append(request.row)
            request.row, request.num_planned_blocks = -1, 0


def _next_token_id(item: ScheduledRequest) -> int:
    request = item.request
    start = request.num_computed_tokens + request.num_tokens_in_flight
    end, known = start + item.num_scheduled_tokens, request.token_ids
    return known[end] if end < len(known) else UNKNOWN_TOKEN


def _new_row(request: Request) -> NewRow:
    params = request.sampling_params
    looks_back = request.changes_logits or params.prompt_logprobs is not None
    return NewRow(
        request.row,
        request.request_id,
        params,
        request.seed,
        request.num_prompt_tokens,
        request.stop_token_ids,
        request.token_ids.copy() if looks_back else [],
        is_drafted_for(request),
        request.adapter,
        request.image_spans,
        request.pooling,
    )
