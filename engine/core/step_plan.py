"""StepPlan: a step as whoever computes it needs it. Plain values alone: it may go to a process.

The worker keeps a row for each request that runs, and the core says what is new in it:

    core     Request --- row 3 ---+            worker    row 3: parameters, block table, last token
                                  |
    plan     NewRow(3, ...), NewBlocks(3, [7, 8]), shares [3, start, num_tokens, num_known]

Refuses to know: who is scheduled, what a tensor is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from baton.api.sampling_params import SamplingParams
from engine.core.outputs import ScheduledRequest
from engine.core.request import Request

UNKNOWN_TOKEN = -1  # the step in flight samples it; the worker has it then
SHARE = 4  # numbers in a request's part of `StepPlan.shares`


class NewRow(msgspec.Struct, frozen=True, gc=False):
    """A row is another request's from now on, and has no blocks.

    Attributes:
        token_ids: all known ones, where more of them are looked at than those that are computed;
            what is computed from then on belongs behind them.
        is_drafted_for: whether who guesses reads it.
    """

    row: int
    request_id: str
    sampling_params: SamplingParams
    seed: int
    num_prompt_tokens: int
    stop_token_ids: frozenset[int]
    token_ids: list[int]
    is_drafted_for: bool = True


class NewBlocks(msgspec.Struct, frozen=True, gc=False):
    """Blocks that come behind those of a row, of all groups in turn."""

    row: int
    block_ids: list[int]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step computes.

    Attributes:
        new_rows: come first; then ``new_blocks``.
        shares: four numbers of each request, one behind the other: its row, the position of the
            first token that is computed, how many are, and how many are known, those included that
            the step in flight samples. Who computes the last known one samples the next one. Tokens
            that are computed behind it are drafts, and behind each of them one more is sampled.
        token_ids: the computed tokens of all requests; `UNKNOWN_TOKEN` stands for some.
        constrained: ids of requests that sample by a grammar, or in which a thought must end:
            `StepHooks.allowed_bits`.
        num_drafts: how many to guess behind each token that is sampled last.
        behind: for whoever guesses, of each request the token behind those that are computed;
            `UNKNOWN_TOKEN` where the step samples it. Empty where nobody does.
    """

    new_rows: tuple[NewRow, ...]
    new_blocks: tuple[NewBlocks, ...]
    shares: list[int]
    token_ids: list[int]
    constrained: tuple[str, ...] = ()
    num_drafts: int = 0
    behind: tuple[int, ...] = ()

    @property
    def num_requests(self) -> int:
        return len(self.shares) // SHARE


@dataclass(frozen=True, slots=True)
class StepHooks:
    """What is called while a step is computed, on the thread that computes.

    Attributes:
        after_layer: with each layer's number, when it is computed (on a GPU: launched).
        allowed_bits: the tokens that grammars allow, by request id and in the order in which it
            samples, when the logits are on their way: the host has time then. See
            `GrammarState.allowed_bits`.
    """

    after_layer: Callable[[int], None] | None = None
    allowed_bits: Callable[[], Mapping[str, Sequence[NDArray[np.uint8]]]] = dict


class StepPlanner:
    """Gives requests rows, and remembers what is known of them there.

    Args:
        max_num_requests: rows.
        tells_behind: whether plans say which tokens are behind those that are computed.
    """

    def __init__(self, max_num_requests: int, *, tells_behind: bool = False) -> None:
        self._free_rows = list(range(max_num_requests))
        self._tells_behind = tells_behind

    def plan(self, scheduled: Sequence[ScheduledRequest], num_drafts: int = 0) -> StepPlan:
        """Tell a worker of a step, when the one before has been planned and begun.

        The only loop over the requests of every step: it runs once per output token.
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
            num_known = len(known) + request.num_tokens_pending
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
            tuple(map(_behind, scheduled)) if self._tells_behind else (),
        )

    def leave(self, request: Request) -> None:
        """A request needs its row no more, if it has one; it gets a new one if it comes back."""
        if request.row >= 0:
            self._free_rows.append(request.row)
            request.row, request.num_planned_blocks = -1, 0


def _behind(item: ScheduledRequest) -> int:
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
        request.is_drafted_for,
    )
