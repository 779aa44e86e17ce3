"""InputBatch: turns a step's plan into tensors; rows persist, and a plan tells their changes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from baton_kernels.attention.base import AttentionMetadata
from baton_kernels.state_metadata import StateMetadata
from engine.core.step_plan import SHARE, UNKNOWN_TOKEN, NewRow, StepPlan
from engine.sampling.device_sampling import kernel_parameters
from engine.sampling.logprobs import PromptRows
from engine.sampling.philox import WordTable
from engine.sampling.sampling_input import (
    PARAMETERS,
    RequestSnapshot,
    SamplingInput,
    parameters_row,
)
from engine.worker.block_table import BlockTable
from engine.worker.drafting.drafting_step import FOR_NOBODY, DraftingStep
from engine.worker.graph_inputs import GraphInputs, StagedStep

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ModelInput:
    """Inputs of one forward."""

    input_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    last_token_rows: Tensor  # [num_sampling] int64, rows of tokens whose logits are needed
    groups: tuple[AttentionMetadata | StateMetadata, ...]  # one per KV cache group


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """Inputs of a step's forward and sampler.

    The tensors are views of buffers, which are overwritten when the step after the next one is
    prepared.

    Attributes:
        sampling_rows: `[num_sampling]` int64 on the device, rows of the input batch; a row that
            samples behind drafts occurs several times.
        unknown: `(places, rows)`, int64 on the device: places in ``input_ids`` of tokens that the
            previous step samples, and their rows in ``last_tokens``; None: all are known.
    """

    model: ModelInput
    sampling: SamplingInput
    prompt_rows: tuple[PromptRows, ...]
    sampling_rows: Tensor
    unknown: tuple[Tensor, Tensor] | None

    @property
    def has_prompts(self) -> bool:
        """Return whether some computed tokens sample no next token, as in prompts."""
        return len(self.model.input_ids) > len(self.model.last_token_rows)


@dataclass(slots=True)
class _Decodes:
    """A decode step whose buffers the next step with the same requests can reuse.

    Attributes:
        num_placed: number of row assignments when the step was made.
        rows: rows of the step's requests: `[num_requests]`.
        num_changes: `BlockTable.num_changes` of each group.
        step: the latest step in these buffers.
        constrained: see `StepPlan`.
    """

    num_placed: int
    rows: Ints
    num_changes: list[int]
    step: PreparedStep
    constrained: tuple[str, ...]


class _Buffer:
    """One host tensor, and the same memory as an array."""

    def __init__(self, size: int, dtype: torch.dtype, pin_memory: bool) -> None:
        self.tensor = torch.zeros(size, dtype=dtype, pin_memory=pin_memory)  # [size]
        self.array = self.tensor.numpy()


class _Buffers:
    """Host buffers of one step."""

    def __init__(
        self,
        max_rows: int,
        max_num_tokens: int,
        max_blocks: int,
        groups: int,
        state_groups: Collection[int],
        pin: bool,
    ) -> None:
        tables = max_rows * max_blocks
        self.input_ids = _Buffer(max_num_tokens, torch.int64, pin)
        self.positions = _Buffer(max_num_tokens, torch.int64, pin)
        self.slot_mappings = [_Buffer(max_num_tokens, torch.int64, pin) for _ in range(groups)]
        self.block_tables = [_Buffer(tables, torch.int32, pin) for _ in range(groups)]
        self.query_start_loc = _Buffer(max_rows + 1, torch.int32, pin)
        self.seq_lens = _Buffer(max_rows, torch.int32, pin)
        self.last_token_rows = _Buffer(max_num_tokens, torch.int64, pin)
        self.sampling_rows = _Buffer(max_num_tokens, torch.int64, pin)
        self.unknown = _Buffer(2 * max_rows, torch.int64, pin)
        self.decodes: _Decodes | None = None  # set if the latest step is a decode step
        max_segments = max_num_tokens if state_groups else 0
        self.segment_start_loc = _Buffer(max_segments + 1, torch.int32, pin)
        self.request_start_loc = _Buffer(max_rows + 1, torch.int32, pin)
        self.state_slots = {
            group: (
                _Buffer(max_segments, torch.int32, pin),
                _Buffer(max_segments, torch.int32, pin),
            )
            for group in state_groups
        }  # slots to read and to write


@dataclass(frozen=True, slots=True)
class _Segments:
    """Runs of tokens of one request within one block: each `[num_segments]`.

    Attributes:
        num_requests: number of requests in the step.
        rows: row of the input batch.
        starts: position of the first token.
        blocks: logical block that contains the run.
        lens: number of tokens.
    """

    num_requests: int
    rows: Ints
    starts: Ints
    blocks: Ints
    lens: tuple[int, ...]


class _Columns:
    """A step's plan as columns: each `[num_requests]`, unless stated otherwise.

    Attributes:
        sampling: `[num_sampling]`, index of the request of each sampled token; ascending.
        sampled_at: `[num_sampling]`, position of each sampled token.
        num_behind: `[num_sampling]`, drafts computed from that position on; None: no drafts.
        draft_token_ids: see `SamplingInput`.
        constrained: see `StepPlan`.
    """

    def __init__(self, plan: StepPlan, max_decode_rows: int) -> None:
        # One flat list, as numpy takes twice as long to convert a list of tuples.
        columns = np.array(plan.shares, dtype=np.int64).reshape(-1, SHARE).T.copy()
        self.rows, self.starts, self.query_lens, self.num_known = columns
        # [num_tokens]; unknown tokens are < 0
        self.token_ids = np.array(plan.token_ids, dtype=np.int64)
        self.ends = self.starts + self.query_lens
        self.sampling: Ints = (self.ends >= self.num_known).nonzero()[0]
        self.sampled_at: Ints = self.num_known[self.sampling]
        self.constrained = plan.constrained
        self.num_behind: Ints | None = None
        self.draft_token_ids: tuple[int, ...] = ()
        if len(self.token_ids) > len(self.rows):
            num_drafts = self.ends[self.sampling] - self.sampled_at
            if num_drafts.any():
                self._sample_behind(num_drafts)
                if len(self.token_ids) == len(self.sampling) <= max_decode_rows:
                    self._spread()

    def _sample_behind(self, num_drafts: Ints) -> None:
        """Sample a token behind each draft as well.

        Args:
            num_drafts: number of drafts of each sampling request.
        """
        num_samples = num_drafts + 1
        ends = num_samples.cumsum()
        after_first = np.arange(ends[-1]) - (ends - num_samples).repeat(num_samples)
        self.sampling = self.sampling.repeat(num_samples)
        self.sampled_at = self.sampled_at.repeat(num_samples) + after_first
        self.num_behind = num_behind = num_drafts.repeat(num_samples) - after_first
        places = self.query_lens.cumsum()[self.sampling] - num_behind
        drafts = np.append(self.token_ids, UNKNOWN_TOKEN)[places]
        self.draft_token_ids = tuple(np.where(num_behind, drafts, UNKNOWN_TOKEN).tolist())

    def _spread(self) -> None:
        """Turn the step into a decode step: each draft becomes a request with the same blocks.

        Every layer writes the KV of all tokens before it reads any. So graphs and kernels of decode
        steps also work with drafts.
        """
        self.rows = self.rows.repeat(self.query_lens)
        self.starts, self.ends = self.sampled_at - 1, self.sampled_at
        self.sampling = np.arange(len(self.rows))
        self.query_lens = np.ones_like(self.sampling)
        self.num_behind = np.zeros_like(self.sampling)

    @property
    def is_decode(self) -> bool:
        """Return whether every request computes its last known token and no other one."""
        return len(self.token_ids) == len(self.rows) == len(self.sampling)


class InputBatch:
    """Persistent host buffers (pinned if there is a GPU) and the copies to the device.

    There are two sets of buffers, as one step may be prepared while the previous one runs.
    A row of block ids and parameters belongs to one request until a plan assigns it to another.
    A token that a running step samples is unknown here; the next step reads it from
    ``last_tokens`` on the device.

    Args:
        max_num_requests: most requests in a step.
        max_num_tokens: most tokens in a step.
        max_decode_rows: most tokens of a step that only decodes, drafts included; None: one per
            request.
        sliding_windows: window of each KV cache group, in tokens; None: full attention.
        state_groups: indices of the groups that hold states.
        max_blocks: most blocks of one request in one group.
        block_size: tokens per block.
        device: where the model runs.
        graph_inputs: stages steps that can be replayed; None: nothing is captured.

    Attributes:
        device: where the model runs.
        max_num_tokens: most tokens in a step.
        last_tokens: `[max_num_requests + 1]` int64 on the device, the last sampled token of each
            row; written by the runner.
    """

    def __init__(
        self,
        *,
        max_num_requests: int,
        max_num_tokens: int,
        max_decode_rows: int | None = None,
        sliding_windows: Sequence[int | None] = (None,),
        state_groups: Collection[int] = (),
        max_blocks: int,
        block_size: int,
        device: torch.device,
        graph_inputs: GraphInputs | None = None,
    ) -> None:
        self.device = device
        self._block_size, self._state_groups = block_size, frozenset(state_groups)
        self._on_gpu = pin = device.type == "cuda"
        num_groups = len(sliding_windows)
        self._graph_inputs = graph_inputs
        self._max_decode_rows = max_decode_rows or max_num_requests
        self.max_num_tokens = max_num_tokens
        self.last_tokens = (
            torch.zeros(max_num_requests + 1, dtype=torch.int64, device=device)
            if graph_inputs is None
            else graph_inputs.last_tokens
        )
        self._spare, self._buffers = (
            _Buffers(
                self._max_decode_rows,
                max_num_tokens,
                max_blocks,
                num_groups,
                self._state_groups,
                pin,
            )
            for _ in range(2)
        )
        self._block_tables = [
            BlockTable(
                max_num_requests,
                max_blocks,
                block_size,
                group=group,
                num_groups=num_groups,
                sliding_window=window,
            )
            for group, window in enumerate(sliding_windows)
        ]
        self._sliding_tables = [
            block_table
            for block_table, window in zip(self._block_tables, sliding_windows, strict=True)
            if window is not None
        ]
        self._parameters = np.zeros(max_num_requests, dtype=PARAMETERS)
        # The parameters in the sampling kernel's layout, by row; only for staged steps.
        self._kernel_parameters = kernel_parameters(self._parameters)
        self._random_words = WordTable(max_num_requests)
        self._rows: dict[int, NewRow] = {}
        self._request_ids = [""] * max_num_requests  # by row
        self._num_placed = 0  # row assignments since the start
        self._undrafted: frozenset[int] = frozenset()  # rows without drafts
        # All known tokens of rows whose sampling looks back at them, by row.
        self._known: dict[int, list[int]] = {}

    def fill(self, plan: StepPlan) -> PreparedStep:
        """Write a step into the buffers; return views of them on the device."""
        self._read(plan)
        return self._fill_again(plan) or self._fill(_Columns(plan, self._max_decode_rows))

    def fill_or_stage(self, plan: StepPlan) -> PreparedStep | StagedStep:
        """Stage a step for a replay if possible; otherwise, do as `fill`."""
        self._read(plan)
        columns, inputs = _Columns(plan, self._max_decode_rows), self._graph_inputs
        if inputs is None or not columns.is_decode or inputs.size_for(len(columns.rows)) is None:
            return self._fill(columns)
        return inputs.stage(
            columns.rows,
            columns.token_ids,
            columns.starts,
            self._block_tables,
            self._kernel_parameters,
            self._sampling_input(columns),
        )

    def drafting_step(self, plan: StepPlan) -> DraftingStep:
        """Copy the plan that was just filled in, for the drafter."""
        undrafted = self._undrafted
        if undrafted and not plan.new_rows and undrafted.issuperset(plan.shares[::SHARE]):
            return FOR_NOBODY
        columns = [tuple(plan.shares[first::SHARE]) for first in range(SHARE)]
        rows, starts, num_tokens, num_known = columns
        request_ids = tuple([self._request_ids[row] for row in rows])
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
                behind=(),
                parameters=self._parameters[:0],
                block_tables=(),
                num_held=(),
                undrafted=undrafted,
                is_silent=True,
            )
        num_held = tuple(map(self._block_tables[0].num_held, rows))
        width = max(num_held) // self._block_size
        return DraftingStep(
            num_drafts=plan.num_drafts,
            new_rows=frozenset(new.row for new in plan.new_rows),
            request_ids=request_ids,
            rows=rows,
            starts=starts,
            num_tokens=num_tokens,
            num_known=num_known,
            token_ids=plan.token_ids,
            behind=plan.behind or (UNKNOWN_TOKEN,) * len(rows),
            parameters=self._parameters.take(rows),
            block_tables=tuple(table.copy_rows(rows, width) for table in self._block_tables),
            num_held=num_held,
            undrafted=undrafted,
        )

    def _sampling_input(self, columns: _Columns) -> SamplingInput:
        sampling = columns.sampling
        rows = columns.rows[sampling]
        # `take` copies structs as bytes; indexing with an array copies field by field.
        parameters = self._parameters.take(rows)
        places = columns.sampled_at - parameters["num_prompt_tokens"]
        as_list, by_row = rows.tolist(), self._request_ids
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

    def _snapshot(self, row: int, num_tokens: int) -> RequestSnapshot:
        """Return what the token behind the first ``num_tokens`` of a row depends on."""
        request, known = self._rows[row], self._known.get(row, [])
        return RequestSnapshot(
            request.sampling_params,
            known if len(known) == num_tokens else known[:num_tokens],
            request.num_prompt_tokens if known else 0,  # other rows need the mask only
            request.stop_token_ids,
        )

    def _fill_again(self, plan: StepPlan) -> PreparedStep | None:
        """Reuse the buffers of a decode step with the same requests, writing only what changes.

        Most steps are like this, and the unchanged parts take longest to make. Returns None if the
        step is different, or if the buffers are not what the device reads.
        """
        buffers, token_ids = self._spare, plan.token_ids
        kept = buffers.decodes
        if kept is None or kept.num_placed != self._num_placed or len(token_ids) != len(kept.rows):
            return None
        shares = np.array(plan.shares, dtype=np.int64).reshape(-1, SHARE)
        if len(shares) != len(token_ids) or min(token_ids) < 0:
            return None
        if plan.constrained != kept.constrained:
            return None
        rows, starts, _, num_known = shares.T
        if (rows != kept.rows).any() or (starts + 1 != num_known).any():
            return None
        self._spare, self._buffers = self._buffers, buffers
        num, model = len(rows), kept.step.model
        buffers.input_ids.array[:num] = token_ids
        buffers.positions.array[:num] = starts
        buffers.seq_lens.array[:num] = num_known
        seq_lens = tuple(num_known.tolist())
        kept.step = PreparedStep(
            ModelInput(
                model.input_ids,
                model.positions,
                model.last_token_rows,
                tuple(
                    self._attend_again(kept, index, starts, seq_lens)
                    for index in range(len(self._block_tables))
                ),
            ),
            self._sample_again(kept, num_known),
            kept.step.prompt_rows,
            kept.step.sampling_rows,
            None,
        )
        return kept.step

    def _attend_again(
        self, kept: _Decodes, group: int, positions: Ints, seq_lens: tuple[int, ...]
    ) -> AttentionMetadata:
        buffers, block_table = self._buffers, self._block_tables[group]
        before, num = kept.step.model.groups[group], len(positions)
        assert isinstance(before, AttentionMetadata)
        block_table.slots(kept.rows, positions, out=buffers.slot_mappings[group].array[:num])
        max_seq_len, blocks = max(seq_lens), before.block_table
        num_blocks = block_table.num_blocks(max_seq_len)
        if block_table.num_changes != kept.num_changes[group] or num_blocks != blocks.shape[1]:
            kept.num_changes[group] = block_table.num_changes
            blocks = block_table.gather(kept.rows, num_blocks, buffers.block_tables[group].tensor)
        return AttentionMetadata(
            num_requests=num,
            num_tokens=num,
            query_start_loc=before.query_start_loc,
            seq_lens=before.seq_lens,
            block_table=blocks,
            slot_mapping=before.slot_mapping,
            max_query_len=1,
            max_seq_len=max_seq_len,
            query_lens=before.query_lens,
            seq_lens_host=seq_lens,
        )

    def _sample_again(self, kept: _Decodes, sampled_at: Ints) -> SamplingInput:
        before = kept.step.sampling
        if before.is_greedy:  # a greedy input depends on no position
            return before
        parameters = before.parameters
        places = sampled_at - parameters["num_prompt_tokens"]
        return SamplingInput(
            before.request_ids,
            parameters,
            self._random_words.words_at(kept.rows, parameters["seed"], places),
            {
                index: self._snapshot(int(kept.rows[index]), int(sampled_at[index]))
                for index in before.adjusted
            },
        )

    def _fill(self, columns: _Columns) -> PreparedStep:
        self._spare, self._buffers = self._buffers, self._spare
        buffers = self._buffers
        num_requests, num_tokens = len(columns.rows), len(columns.token_ids)
        rows, starts, query_lens = columns.rows, columns.starts, columns.query_lens
        np.maximum(columns.token_ids, 0, out=buffers.input_ids.array[:num_tokens])
        query_start_loc = buffers.query_start_loc.array[: num_requests + 1]
        query_start_loc[1:] = query_lens.cumsum()
        buffers.seq_lens.array[:num_requests] = columns.ends
        positions = buffers.positions.array[:num_tokens]
        if num_tokens == num_requests:  # one token per request
            positions[:], token_rows = starts, rows
        else:
            shifts = starts - query_start_loc[:-1]
            np.add(np.arange(num_tokens), shifts.repeat(query_lens), out=positions)
            token_rows = rows.repeat(query_lens)
        sampling = columns.sampling
        last_token_rows = buffers.last_token_rows.array[: len(sampling)]
        last_token_rows[:] = query_start_loc[sampling + 1] - 1
        if columns.num_behind is not None:
            last_token_rows -= columns.num_behind
        buffers.sampling_rows.array[: len(sampling)] = rows[sampling]
        asks = self._parameters["num_prompt_logprobs"][rows] >= 0
        model_input = ModelInput(
            input_ids=self._to_device(buffers.input_ids.tensor[:num_tokens]),
            positions=self._to_device(buffers.positions.tensor[:num_tokens]),
            last_token_rows=self._to_device(buffers.last_token_rows.tensor[: len(sampling)]),
            groups=self._groups(columns, token_rows, positions),
        )
        step = PreparedStep(
            model_input,
            self._sampling_input(columns),
            tuple(
                self._prompt_rows(columns, index, int(query_start_loc[index]))
                for index in asks.nonzero()[0].tolist()
            ),
            self._to_device(buffers.sampling_rows.tensor[: len(sampling)]),
            self._unknown(columns.token_ids, token_rows),
        )
        self._keep(columns, step)
        return step

    def _keep(self, columns: _Columns, step: PreparedStep) -> None:
        """Keep a step for `_fill_again`, if a later step in these buffers can reuse it."""
        is_simple = not (self._on_gpu or self._state_groups or step.prompt_rows)
        if is_simple and columns.is_decode and columns.num_behind is None:
            num_changes = [block_table.num_changes for block_table in self._block_tables]
            self._buffers.decodes = _Decodes(
                self._num_placed, columns.rows, num_changes, step, columns.constrained
            )
        else:
            self._buffers.decodes = None

    def _unknown(self, token_ids: Ints, token_rows: Ints) -> tuple[Tensor, Tensor] | None:
        places = (token_ids < 0).nonzero()[0]
        if not len(places):
            return None
        buffer = self._buffers.unknown
        pair = buffer.array[: 2 * len(places)].reshape(2, -1)
        pair[0], pair[1] = places, token_rows[places]
        on_device = self._to_device(buffer.tensor[: 2 * len(places)]).view(2, -1)
        return on_device[0], on_device[1]

    def _groups(
        self, columns: _Columns, token_rows: Ints, positions: Ints
    ) -> tuple[AttentionMetadata | StateMetadata, ...]:
        """Make the metadata of each group; groups differ only in their blocks."""
        buffers, rows, ends = self._buffers, columns.rows, columns.ends
        num_requests, num_tokens = len(rows), len(positions)
        max_query_len, max_seq_len = int(columns.query_lens.max()), int(ends.max())
        query_lens_host, seq_lens_host = tuple(columns.query_lens.tolist()), tuple(ends.tolist())
        query_start_loc = self._to_device(buffers.query_start_loc.tensor[: num_requests + 1])
        seq_lens = self._to_device(buffers.seq_lens.tensor[:num_requests])
        segments = self._segments(columns) if self._state_groups else None
        groups: list[AttentionMetadata | StateMetadata] = []
        for index, (block_table, slot_mapping, gathered) in enumerate(
            zip(self._block_tables, buffers.slot_mappings, buffers.block_tables, strict=True)
        ):
            if segments is not None and index in self._state_groups:
                groups.append(self._states(segments, block_table, index))
                continue
            block_table.slots(token_rows, positions, out=slot_mapping.array[:num_tokens])
            num_blocks = block_table.num_blocks(max_seq_len)
            metadata = AttentionMetadata(
                num_requests=num_requests,
                num_tokens=num_tokens,
                query_start_loc=query_start_loc,
                seq_lens=seq_lens,
                block_table=self._to_device(block_table.gather(rows, num_blocks, gathered.tensor)),
                slot_mapping=self._to_device(slot_mapping.tensor[:num_tokens]),
                max_query_len=max_query_len,
                max_seq_len=max_seq_len,
                query_lens=query_lens_host,
                seq_lens_host=seq_lens_host,
            )
            groups.append(metadata)
        return tuple(groups)

    def _segments(self, columns: _Columns) -> _Segments:
        """Cut the tokens of each request at block boundaries."""
        assert columns.num_behind is None, "a state behind drafts cannot be taken back"
        buffers, block_size = self._buffers, self._block_size
        first_blocks = columns.starts // block_size
        counts = (columns.ends - 1) // block_size - first_blocks + 1
        request_start_loc = buffers.request_start_loc.array[: len(counts) + 1]
        request_start_loc[1:] = counts.cumsum()
        num_segments = int(request_start_loc[-1])
        after_first = np.arange(num_segments) - request_start_loc[:-1].repeat(counts)
        blocks = first_blocks.repeat(counts) + after_first
        starts = np.maximum(blocks * block_size, columns.starts.repeat(counts))
        lens = np.minimum((blocks + 1) * block_size, columns.ends.repeat(counts)) - starts
        buffers.segment_start_loc.array[1 : num_segments + 1] = lens.cumsum()
        return _Segments(
            len(counts), columns.rows.repeat(counts), starts, blocks, tuple(lens.tolist())
        )

    def _states(self, segments: _Segments, block_table: BlockTable, group: int) -> StateMetadata:
        buffers, num_segments = self._buffers, len(segments.lens)
        reads, writes = buffers.state_slots[group]
        before = np.maximum(segments.starts - 1, 0) // self._block_size
        read_slots = block_table.blocks(segments.rows, before)
        reads.array[:num_segments] = np.where(segments.starts > 0, read_slots, -1)
        writes.array[:num_segments] = block_table.blocks(segments.rows, segments.blocks)
        return StateMetadata(
            num_segments=num_segments,
            num_tokens=sum(segments.lens),
            segment_start_loc=self._to_device(buffers.segment_start_loc.tensor[: num_segments + 1]),
            read_slots=self._to_device(reads.tensor[:num_segments]),
            write_slots=self._to_device(writes.tensor[:num_segments]),
            request_start_loc=self._to_device(
                buffers.request_start_loc.tensor[: segments.num_requests + 1]
            ),
            segment_lens=segments.lens,
        )

    def _prompt_rows(self, columns: _Columns, index: int, first_row: int) -> PromptRows:
        """Return the prompt tokens that need logprobs in this step; none after the first output."""
        request = self._rows[int(columns.rows[index])]
        first = int(columns.starts[index]) + 1
        end = min(first + int(columns.query_lens[index]), request.num_prompt_tokens)
        known = self._known[request.row]
        token_ids = known[first:end] if len(known) == request.num_prompt_tokens else []
        num_top = request.sampling_params.prompt_logprobs
        return PromptRows(request.request_id, first_row, first, tuple(token_ids), num_top or 0)

    def _read(self, plan: StepPlan) -> None:
        """Write a plan's changes into the rows."""
        for new in plan.new_rows:
            self._place(new)
        for added in plan.new_blocks:
            for block_table in self._block_tables:
                block_table.extend(added.row, added.block_ids)
        if self._sliding_tables or self._known:
            self._note_computed(plan)

    def _note_computed(self, plan: StepPlan) -> None:
        """Add computed tokens to the known ones, and drop blocks that slid out."""
        shares, offset = plan.shares, 0
        for index in range(0, len(shares), SHARE):
            row, start, num_tokens, num_known = shares[index : index + SHARE]
            for block_table in self._sliding_tables:
                block_table.slide(row, start)
            known = self._known.get(row)
            if known is not None:
                known[start : start + num_tokens] = plan.token_ids[offset : offset + num_tokens]
                del known[max(num_known, start + num_tokens) :]  # drafts of the previous step
            offset += num_tokens

    def _place(self, new: NewRow) -> None:
        """Assign a row to a new request."""
        row = new.row
        self._num_placed += 1
        self._rows[row], self._request_ids[row] = new, new.request_id
        if (row in self._undrafted) is new.is_drafted_for:
            self._undrafted ^= {row}
        self._known.pop(row, None)
        if new.token_ids:
            self._known[row] = new.token_ids.copy()
        self._parameters[row] = parameters_row(new)
        if self._graph_inputs is not None:
            written = kernel_parameters(self._parameters[row : row + 1])
            for name, values in written.items():
                self._kernel_parameters[name][row : row + 1] = values
        self._random_words.clear(row)
        for block_table in self._block_tables:
            block_table.clear(row)

    def _to_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, non_blocking=True) if self._on_gpu else tensor
