"""Copies the plan of a step, with blocks and parameters of its rows, for the drafter."""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.step_plan import SHARE, UNKNOWN_TOKEN, StepPlan
from engine.worker.block_table import BlockTable
from engine.worker.drafting.base import FOR_NOBODY, DraftingStep
from engine.worker.inputs.request_rows import RequestRows


def drafting_step(
    plan: StepPlan, batch: RequestRows, block_tables: Sequence[BlockTable], block_size: int
) -> DraftingStep:
    """Copy a plan for the drafter, right after the input batch has read the plan."""
    undrafted = batch.undrafted
    if undrafted and not plan.new_rows and undrafted.issuperset(plan.shares[::SHARE]):
        return FOR_NOBODY
    columns = [tuple(plan.shares[first::SHARE]) for first in range(SHARE)]
    rows, starts, num_tokens, num_known = columns
    request_ids = tuple([batch.request_ids[row] for row in rows])
    if (
        not plan.num_drafts
        and not plan.new_rows
        and len(plan.token_ids) == len(rows)
        and tuple([start + 1 for start in starts]) == num_known
    ):
        return DraftingStep(
            num_drafts=0,
            new_rows=frozenset(),
            request_ids=request_ids,
            rows=rows,
            starts=starts,
            num_tokens=num_tokens,
            num_known=num_known,
            token_ids=plan.token_ids,
            next_token_ids=(),
            parameters=batch.parameters[:0],
            block_tables=(),
            num_held=(),
            undrafted=undrafted,
            is_silent=True,
        )
    num_held = tuple(map(block_tables[0].num_held, rows))
    width = max(num_held) // block_size
    return DraftingStep(
        num_drafts=plan.num_drafts,
        new_rows=frozenset(new.row for new in plan.new_rows),
        request_ids=request_ids,
        rows=rows,
        starts=starts,
        num_tokens=num_tokens,
        num_known=num_known,
        token_ids=plan.token_ids,
        next_token_ids=plan.next_token_ids or (UNKNOWN_TOKEN,) * len(rows),
        parameters=batch.parameters.take(rows),
        block_tables=tuple(table.copy_rows(rows, width) for table in block_tables),
        num_held=num_held,
        undrafted=undrafted,
    )
