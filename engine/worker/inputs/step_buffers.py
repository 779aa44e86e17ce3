"""StepBuffers: host memory of one step's inputs. KeptDecodes: a decode step to reuse."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from engine.worker.inputs.prepared_step import PreparedStep
from engine.worker.inputs.step_columns import Ints


@dataclass(slots=True)
class KeptDecodes:
    """A decode step whose buffers the next step with the same requests can reuse.

    Attributes:
        num_placed: `RequestRows.num_placed` when the step was made.
        rows: rows of the step's requests: `[num_requests]`.
        num_changes: `BlockTable.num_changes` of each group.
        step: the latest step whose inputs are in these buffers.
        constrained: ids of requests that sample by a grammar (`StepPlan.constrained`).
    """

    num_placed: int
    rows: Ints
    num_changes: list[int]
    step: PreparedStep
    constrained: tuple[str, ...]


class Buffer:
    """A host tensor, and a NumPy array over the same memory."""

    def __init__(self, size: int, dtype: torch.dtype, pin_memory: bool) -> None:
        self.tensor = torch.zeros(size, dtype=dtype, pin_memory=pin_memory)  # [size]
        self.array = self.tensor.numpy()


class StepBuffers:
    """Host buffers for all inputs of one step."""

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
        self.input_ids = Buffer(max_num_tokens, torch.int64, pin)
        self.positions = Buffer(max_num_tokens, torch.int64, pin)
        self.slot_mappings = [Buffer(max_num_tokens, torch.int64, pin) for _ in range(groups)]
        self.block_tables = [Buffer(tables, torch.int32, pin) for _ in range(groups)]
        self.query_start_loc = Buffer(max_rows + 1, torch.int32, pin)
        self.seq_lens = Buffer(max_rows, torch.int32, pin)
        self.last_token_rows = Buffer(max_num_tokens, torch.int64, pin)
        self.sampling_rows = Buffer(max_num_tokens, torch.int64, pin)
        self.pending_tokens = Buffer(2 * max_rows, torch.int64, pin)
        # set if a later decode step can reuse these buffers
        self.decodes: KeptDecodes | None = None
        max_segments = max_num_tokens if state_groups else 0
        self.segment_start_loc = Buffer(max_segments + 1, torch.int32, pin)
        self.request_start_loc = Buffer(max_rows + 1, torch.int32, pin)
        self.state_slots = {
            group: (
                Buffer(max_segments, torch.int32, pin),
                Buffer(max_segments, torch.int32, pin),
            )
            for group in state_groups
        }  # slots of the states to read and to write
