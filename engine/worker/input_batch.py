"""InputBatch: turns the plan of a step into tensors; keeps the rows of requests between steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from baton_kernels.attention.base import AttentionMetadata
from baton_kernels.state_metadata import StateMetadata
from engine.core.images.image_plan import StepImages
from engine.core.step_plan import SHARE, StepPlan
from engine.worker.block_table import BlockTable
from engine.worker.drafting.base import DraftingStep
from engine.worker.graph_inputs import GraphInputs
from engine.worker.inputs.drafter_columns import drafting_step
from engine.worker.inputs.prepared_step import ModelInput, PreparedStep, ReplayStep
from engine.worker.inputs.request_rows import RequestRows
from engine.worker.inputs.state_segments import cut_segments, state_metadata
from engine.worker.inputs.step_buffers import KeptDecodes, StepBuffers
from engine.worker.inputs.step_columns import Ints, StepColumns
from engine.worker.inputs.three_axes import RotaryPositions


class InputBatch:
    """Host buffers (pinned with a GPU) that steps reuse, and their copies on the device.

    Steps take turns with several sets of buffers, because one step may be prepared while previous
    ones run. A row of block ids and parameters belongs to one request until a plan assigns it to
    another. A token that a running step samples is not known on the host yet; the next step reads
    the token from ``last_tokens`` on the device.

    Args:
        max_num_requests: maximum number of requests in a step.
        max_num_tokens: maximum number of tokens in a step.
        max_decode_rows: maximum number of tokens of a step that only decodes, drafts included;
            None: one per request.
        sliding_windows: window of each KV cache group, in tokens; None: full attention.
        state_groups: indices of the groups that hold states.
        max_blocks: maximum number of blocks of one request in one group.
        block_size: tokens per block.
        device: where the model runs.
        graph_inputs: stages steps for graph replays; None: no graphs are captured.
        has_three_axes: whether the model uses three-axis RoPE positions (M-RoPE) for images.
        num_steps: maximum number of steps in flight, and so the number of sets of buffers.
        whole_image_groups: indices of the groups in whose layers the embeddings of an image attend
            to each other. A step then computes all embeddings of an image that have no KV yet.

    Attributes:
        device: where the model runs.
        max_num_tokens: maximum number of tokens in a step.
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
        has_three_axes: bool = False,
        num_steps: int = 2,
        whole_image_groups: Collection[int] = (),
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
        self._sets = deque(  # least recently used set first
            StepBuffers(
                self._max_decode_rows,
                max_num_tokens,
                max_blocks,
                num_groups,
                self._state_groups,
                pin,
            )
            for _ in range(num_steps)
        )
        self._buffers = self._sets[-1]
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
        self._rows = RequestRows(max_num_requests, is_staged=graph_inputs is not None)
        self._rotary = RotaryPositions(max_num_requests)
        self._has_three_axes = has_three_axes
        self._whole_image_groups = frozenset(whole_image_groups)

    def fill(self, plan: StepPlan) -> PreparedStep:
        """Write a step into the buffers; return the step's tensors on the device."""
        self._read(plan)
        filled = self._fill_again(plan)
        filled = filled or self._fill(StepColumns(plan, self._max_decode_rows), plan.images)
        return filled if plan.images is None else replace(filled, images=plan.images)

    def fill_or_stage(self, plan: StepPlan) -> PreparedStep | ReplayStep:
        """Stage a step for the replay of a graph if possible; otherwise, `fill` the buffers."""
        if plan.images is not None:
            return self.fill(plan)
        self._read(plan)
        columns, inputs = StepColumns(plan, self._max_decode_rows), self._graph_inputs
        if inputs is None or not columns.is_decode or inputs.size_for(len(columns.rows)) is None:
            return self._fill(columns)
        return inputs.stage(
            columns.rows,
            columns.token_ids,
            columns.starts,
            self._block_tables,
            self._rows.kernel_parameters,
            self._rows.sampling_input(columns),
            self._rotary.deltas[columns.rows] if self._rotary.is_active else None,
        )

    def drafting_step(self, plan: StepPlan) -> DraftingStep:
        """Copy what the drafter needs of a plan; call right after `fill` or `fill_or_stage`."""
        return drafting_step(plan, self._rows, self._block_tables, self._block_size)

    def _fill_again(self, plan: StepPlan) -> PreparedStep | None:
        """Reuse the buffers of a decode step with the same requests; write only what changes.

        Most steps have the requests of the step before, and the unchanged parts take longest to
        make. Returns None if the requests differ, or if the buffers cannot be reused (see `_keep`).
        """
        buffers, token_ids = self._sets[0], plan.token_ids
        kept = buffers.decodes
        if (
            kept is None
            or kept.num_placed != self._rows.num_placed
            or len(token_ids) != len(kept.rows)
        ):
            return None
        shares = np.array(plan.shares, dtype=np.int64).reshape(-1, SHARE)
        if len(shares) != len(token_ids) or min(token_ids) < 0:
            return None
        if plan.constrained != kept.constrained:
            return None
        rows, starts, _, num_known = shares.T
        if (rows != kept.rows).any() or (starts + 1 != num_known).any():
            return None
        self._take_buffers()
        num, model = len(rows), kept.step.model
        buffers.input_ids.array[:num] = token_ids
        rotated = self._rotary.deltas[rows] + starts if self._rotary.is_active else starts
        buffers.positions.array[:num] = rotated
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
                model.adapters,
            ),
            self._rows.sample_again(kept.step.sampling, kept.rows, num_known),
            kept.step.prompt_rows,
            kept.step.sampling_rows,
            None,
        )
        return kept.step

    def _attend_again(
        self, kept: KeptDecodes, group: int, positions: Ints, seq_lens: tuple[int, ...]
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

    def _fill(self, columns: StepColumns, images: StepImages | None = None) -> PreparedStep:
        buffers = self._take_buffers()
        num_requests, num_tokens = len(columns.rows), len(columns.token_ids)
        rows, starts, query_lens = columns.rows, columns.starts, columns.query_lens
        np.maximum(columns.token_ids, 0, out=buffers.input_ids.array[:num_tokens])
        query_start_loc = buffers.query_start_loc.array[: num_requests + 1]
        query_start_loc[1:] = query_lens.cumsum()
        buffers.seq_lens.array[:num_requests] = columns.ends
        positions = buffers.positions.array[:num_tokens]
        if num_tokens == num_requests:  # each request has one token
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
        asks = self._rows.parameters["num_prompt_logprobs"][rows] >= 0
        row_ends = self._row_ends(images, positions)
        # The groups need positions in sequences, which `_rotary_positions` overwrites later.
        groups = self._groups(columns, token_rows, positions, row_ends)
        model_input = ModelInput(
            input_ids=self._to_device(buffers.input_ids.tensor[:num_tokens]),
            positions=self._rotary_positions(token_rows, positions),
            last_token_rows=self._to_device(buffers.last_token_rows.tensor[: len(sampling)]),
            groups=groups,
            adapters=self._rows.adapter_spans(columns),
        )
        step = PreparedStep(
            model_input,
            self._rows.sampling_input(columns),
            tuple(
                self._rows.prompt_rows(columns, index, int(query_start_loc[index]))
                for index in asks.nonzero()[0].tolist()
            ),
            self._to_device(buffers.sampling_rows.tensor[: len(sampling)]),
            self._pending_tokens(columns.token_ids, token_rows),
            self._rows.pooled_rows(columns),
        )
        self._keep(columns, step)
        return step

    def _take_buffers(self) -> StepBuffers:
        """Return the least recently used buffers, which no step in flight reads any more."""
        self._sets.rotate(-1)
        self._buffers = self._sets[-1]
        return self._buffers

    def _rotary_positions(self, token_rows: Ints, positions: Ints) -> Tensor:
        """Return positions for RoPE, on the device; see `ModelInput`.

        Overwrites the positions in the buffer; call this after all other uses of these positions.
        """
        num_tokens = len(positions)
        if self._rotary.is_active:
            rotated = self._rotary.rotate(token_rows, positions)
            if rotated.ndim > 1:
                return self._to_device(torch.from_numpy(rotated))
            positions[:] = rotated
        return self._to_device(self._buffers.positions.tensor[:num_tokens])

    def _keep(self, columns: StepColumns, step: PreparedStep) -> None:
        """Keep a step for `_fill_again`, if a later step can reuse its buffers."""
        is_simple = not (self._on_gpu or self._state_groups or step.prompt_rows)
        is_simple = is_simple and step.model.positions.dim() == 1
        if is_simple and columns.is_decode and columns.num_behind is None:
            num_changes = [block_table.num_changes for block_table in self._block_tables]
            self._buffers.decodes = KeptDecodes(
                self._rows.num_placed, columns.rows, num_changes, step, columns.constrained
            )
        else:
            self._buffers.decodes = None

    def _pending_tokens(self, token_ids: Ints, token_rows: Ints) -> tuple[Tensor, Tensor] | None:
        """Return `PreparedStep.pending_tokens`: places and rows of tokens not known on the host."""
        places = (token_ids < 0).nonzero()[0]
        if not len(places):
            return None
        buffer = self._buffers.pending_tokens
        pair = buffer.array[: 2 * len(places)].reshape(2, -1)
        pair[0], pair[1] = places, token_rows[places]
        on_device = self._to_device(buffer.tensor[: 2 * len(places)]).view(2, -1)
        return on_device[0], on_device[1]

    def _row_ends(self, images: StepImages | None, positions: Ints) -> Tensor | None:
        """Return `AttentionMetadata.row_ends`: embeddings of an image attend up to its last one.

        Args:
            images: the images of the step; the step computes the last embedding of each of them.
            positions: `[num_tokens]`, index of each token in its sequence.
        """
        if images is None or not images.placed or not self._whole_image_groups:
            return None
        ends = (positions + 1).astype(np.int32)
        for placed in images.placed:
            ends[placed.rows] = ends[placed.rows[-1]]
        return self._to_device(torch.from_numpy(ends))

    def _groups(
        self,
        columns: StepColumns,
        token_rows: Ints,
        positions: Ints,
        row_ends: Tensor | None = None,
    ) -> tuple[AttentionMetadata | StateMetadata, ...]:
        """Make the metadata of each KV cache group; the groups differ in their blocks.

        Args:
            row_ends: ends of the keys that tokens attend to in layers of `whole_image_groups`.
        """
        buffers, rows, ends = self._buffers, columns.rows, columns.ends
        num_requests, num_tokens = len(rows), len(positions)
        max_query_len, max_seq_len = int(columns.query_lens.max()), int(ends.max())
        query_lens_host, seq_lens_host = tuple(columns.query_lens.tolist()), tuple(ends.tolist())
        query_start_loc = self._to_device(buffers.query_start_loc.tensor[: num_requests + 1])
        seq_lens = self._to_device(buffers.seq_lens.tensor[:num_requests])
        segments = None
        if self._state_groups:
            segments = cut_segments(columns, buffers, self._block_size)
        groups: list[AttentionMetadata | StateMetadata] = []
        for index, (block_table, slot_mapping, gathered) in enumerate(
            zip(self._block_tables, buffers.slot_mappings, buffers.block_tables, strict=True)
        ):
            if segments is not None and index in self._state_groups:
                groups.append(
                    state_metadata(segments, block_table, buffers, index, self._to_device)
                )
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
                row_ends=row_ends if index in self._whole_image_groups else None,
            )
            groups.append(metadata)
        return tuple(groups)

    def _read(self, plan: StepPlan) -> None:
        """Apply the new rows and new blocks of a plan to the kept rows."""
        for new in plan.new_rows:
            self._rows.place(new)
            if self._has_three_axes:
                self._rotary.place(new)
            for block_table in self._block_tables:
                block_table.clear(new.row)
        for added in plan.new_blocks:
            for block_table in self._block_tables:
                block_table.extend(added.row, added.block_ids)
        if self._sliding_tables:
            for row, start in zip(plan.shares[::SHARE], plan.shares[1::SHARE], strict=True):
                for block_table in self._sliding_tables:
                    block_table.slide(row, start)
        if self._rows.has_known:
            self._rows.note_computed(plan)

    def _to_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, non_blocking=True) if self._on_gpu else tensor
