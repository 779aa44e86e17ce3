"""RequestRows: what sampling needs to know of the request in each row of an input batch."""

from __future__ import annotations

import numpy as np

from baton.api.pooling import PoolingParams
from engine.core.step_plan import SHARE, NewRow, StepPlan
from engine.sampling.device_sampling import kernel_parameters
from engine.sampling.logprobs import PromptRows
from engine.sampling.philox import WordTable
from engine.sampling.sampling_input import (
    PARAMETERS,
    RequestSnapshot,
    SamplingInput,
    parameters_row,
)
from engine.worker.inputs.pooled_rows import PooledRows
from engine.worker.inputs.step_columns import Ints, StepColumns
from models.base import AdapterSpan


class RequestRows:
    """Sampling parameters, ids and known tokens of requests, by row.

    A row belongs to one request until a plan assigns it to another.

    Args:
        num_rows: maximum number of requests in a step.
        is_staged: whether steps may be staged for graph replays, which read `kernel_parameters`.

    Attributes:
        parameters: `[num_rows]` of `PARAMETERS`, sampling parameters of each row.
        kernel_parameters: the parameters in the sampling kernel's format; filled only if
            ``is_staged``.
        request_ids: ids by row; empty: the row was never used.
        num_placed: number of times that a row was assigned, since the start.
        undrafted: rows of requests that the drafter does not read, and that get no drafts.
    """

    def __init__(self, num_rows: int, *, is_staged: bool) -> None:
        self.parameters = np.zeros(num_rows, dtype=PARAMETERS)
        self.kernel_parameters = kernel_parameters(self.parameters)
        self.request_ids = [""] * num_rows
        self.num_placed = 0
        self.undrafted: frozenset[int] = frozenset()
        self._is_staged = is_staged
        self._random_words = WordTable(num_rows)
        self._rows: dict[int, NewRow] = {}
        self._adapters: dict[int, str] = {}  # digest of the adapter of each row that has one
        self._pooling: dict[int, PoolingParams] = {}  # parameters of each row with a pooled request
        # All known tokens by row, only for rows whose sampling depends on known tokens.
        self._known: dict[int, list[int]] = {}

    @property
    def has_known(self) -> bool:
        """Return whether any row's sampling depends on its known tokens."""
        return bool(self._known)

    def place(self, new: NewRow) -> None:
        """Assign a row to a new request."""
        row = new.row
        self.num_placed += 1
        self._rows[row], self.request_ids[row] = new, new.request_id
        if (row in self.undrafted) is new.is_drafted_for:
            self.undrafted ^= {row}
        self._known.pop(row, None)
        self._adapters.pop(row, None)
        if new.adapter:
            self._adapters[row] = new.adapter
        self._pooling.pop(row, None)
        if new.pooling is not None:
            self._pooling[row] = new.pooling
        if new.token_ids:
            self._known[row] = new.token_ids.copy()
        self.parameters[row] = parameters_row(new)
        if self._is_staged:
            written = kernel_parameters(self.parameters[row : row + 1])
            for name, values in written.items():
                self.kernel_parameters[name][row : row + 1] = values
        self._random_words.clear(row)

    def note_computed(self, plan: StepPlan) -> None:
        """Append the tokens that a step computes to the known tokens of their rows."""
        shares, offset = plan.shares, 0
        for index in range(0, len(shares), SHARE):
            row, start, num_tokens, num_known = shares[index : index + SHARE]
            known = self._known.get(row)
            if known is not None:
                known[start : start + num_tokens] = plan.token_ids[offset : offset + num_tokens]
                del known[max(num_known, start + num_tokens) :]  # drop drafts of the step before
            offset += num_tokens

    def adapter_spans(self, columns: StepColumns) -> tuple[AdapterSpan, ...]:
        """Return the span of tokens that each adapter of the step has."""
        if not self._adapters:
            return ()
        spans: list[AdapterSpan] = []
        first = 0
        for row, num_tokens in zip(columns.rows.tolist(), columns.query_lens.tolist(), strict=True):
            end, adapter = first + num_tokens, self._adapters.get(row, "")
            if spans and spans[-1].adapter == adapter:
                spans[-1] = spans[-1]._replace(end=end)
            else:
                spans.append(AdapterSpan(adapter, first, end))
            first = end
        return tuple(span for span in spans if span.adapter)

    def pooled_rows(self, columns: StepColumns) -> tuple[PooledRows, ...]:
        """Return the tokens of each pooled request of a step, in the step's order."""
        if not self._pooling:
            return ()
        found: list[PooledRows] = []
        first = 0
        for row, start, num_tokens in zip(
            columns.rows.tolist(), columns.starts.tolist(), columns.query_lens.tolist(), strict=True
        ):
            params = self._pooling.get(row)
            if params is not None:
                is_last = start + num_tokens == self._rows[row].num_prompt_tokens
                name, end = self.request_ids[row], first + num_tokens
                found.append(PooledRows(name, params, row, first, end, start, is_last))
            first += num_tokens
        return tuple(found)

    def sampling_input(self, columns: StepColumns) -> SamplingInput:
        """Return the sampler's input for the tokens that a step samples."""
        sampling = columns.sampling
        rows = columns.rows[sampling]
        # `take` copies whole structs; indexing with an array would copy field by field.
        parameters = self.parameters.take(rows)
        places = columns.sampled_at - parameters["num_prompt_tokens"]
        as_list, by_row = rows.tolist(), self.request_ids
        request_ids = tuple([by_row[row] for row in as_list])
        changes_logits = parameters["changes_logits"]
        if columns.constrained:
            constrained = frozenset(columns.constrained)
            changes_logits = changes_logits | [one in constrained for one in request_ids]
        return SamplingInput(
            request_ids,
            parameters,
            self._random_words.words_at(rows, parameters["seed"], places),
            {
                index: self._snapshot(as_list[index], int(columns.sampled_at[index]))
                for index in changes_logits.nonzero()[0].tolist()
            },
            columns.draft_token_ids,
        )

    def sample_again(self, before: SamplingInput, rows: Ints, sampled_at: Ints) -> SamplingInput:
        """Return the sampler's input of a step with the same requests as the step of ``before``."""
        if before.is_greedy:  # greedy sampling needs no positions
            return before
        parameters = before.parameters
        places = sampled_at - parameters["num_prompt_tokens"]
        return SamplingInput(
            before.request_ids,
            parameters,
            self._random_words.words_at(rows, parameters["seed"], places),
            {
                index: self._snapshot(int(rows[index]), int(sampled_at[index]))
                for index in before.adjusted
            },
        )

    def _snapshot(self, row: int, num_tokens: int) -> RequestSnapshot:
        """Return what adjusts the logits of a row's token after its first ``num_tokens`` tokens."""
        request, known = self._rows[row], self._known.get(row, [])
        return RequestSnapshot(
            request.sampling_params,
            known if len(known) == num_tokens else known[:num_tokens],
            # This is read only if sampling depends on known tokens.
            request.num_prompt_tokens if known else 0,
            request.stop_token_ids,
        )

    def prompt_rows(self, columns: StepColumns, index: int, first_row: int) -> PromptRows:
        """Return the prompt tokens whose logprobs a step computes; none if it only decodes."""
        request = self._rows[int(columns.rows[index])]
        first = int(columns.starts[index]) + 1
        end = min(first + int(columns.query_lens[index]), request.num_prompt_tokens)
        known = self._known[request.row]
        token_ids = known[first:end] if len(known) == request.num_prompt_tokens else []
        num_top = request.sampling_params.prompt_logprobs
        return PromptRows(request.request_id, first_row, first, tuple(token_ids), num_top or 0)
