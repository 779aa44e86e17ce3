"""Segments: runs of tokens within blocks, for layers with one state per block, such as Mamba's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from baton_kernels.state_metadata import StateMetadata
from engine.worker.block_table import BlockTable
from engine.worker.inputs.step_buffers import StepBuffers
from engine.worker.inputs.step_columns import Ints, StepColumns


@dataclass(frozen=True, slots=True)
class Segments:
    """Runs of tokens, each of one request and within one block. Arrays have one entry per run.

    Attributes:
        num_requests: number of requests in the step.
        block_size: tokens per block.
        rows: row of the input batch that the run's request has.
        starts: position of the run's first token in its request.
        blocks: index of the logical block that contains the run.
        lens: number of tokens of the run.
    """

    num_requests: int
    block_size: int
    rows: Ints
    starts: Ints
    blocks: Ints
    lens: tuple[int, ...]


def cut_segments(columns: StepColumns, buffers: StepBuffers, block_size: int) -> Segments:
    """Cut the tokens of each request into runs at block boundaries."""
    assert columns.num_behind is None, "a state behind drafts cannot be taken back"
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
    return Segments(
        len(counts), block_size, columns.rows.repeat(counts), starts, blocks, tuple(lens.tolist())
    )


def state_metadata(
    segments: Segments,
    block_table: BlockTable,
    buffers: StepBuffers,
    group: int,
    to_device: Callable[[Tensor], Tensor],
) -> StateMetadata:
    """Return which states of one group the segments read and write."""
    num_segments = len(segments.lens)
    reads, writes = buffers.state_slots[group]
    before = np.maximum(segments.starts - 1, 0) // segments.block_size
    read_slots = block_table.blocks(segments.rows, before)
    reads.array[:num_segments] = np.where(segments.starts > 0, read_slots, -1)
    writes.array[:num_segments] = block_table.blocks(segments.rows, segments.blocks)
    return StateMetadata(
        num_segments=num_segments,
        num_tokens=sum(segments.lens),
        segment_start_loc=to_device(buffers.segment_start_loc.tensor[: num_segments + 1]),
        read_slots=to_device(reads.tensor[:num_segments]),
        write_slots=to_device(writes.tensor[:num_segments]),
        request_start_loc=to_device(buffers.request_start_loc.tensor[: segments.num_requests + 1]),
        segment_lens=segments.lens,
    )
