"""InputBatch: a step's requests as tensors. Buffers are made once and filled every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from baton_kernels.attention.base import AttentionMetadata
from engine.outputs import ScheduledRequest


@dataclass(frozen=True, slots=True)
class ModelInput:
    """What one forward reads."""

    input_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    last_token_rows: Tensor  # [num_sampling] int64, rows of the tokens whose logits are wanted
    attention: tuple[AttentionMetadata, ...]  # of each KV cache group


class InputBatch:
    """Persistent host buffers (pinned where there is a GPU) and the copy to the device.

    Args:
        max_num_requests: most requests in a step.
        max_num_tokens: most tokens in a step.
        num_groups: KV cache groups, each with its own blocks of a request.
        max_blocks: most blocks of one request in one group.
        block_size: tokens per block.
        device: where the model runs.
    """

    def __init__(
        self,
        *,
        max_num_requests: int,
        max_num_tokens: int,
        num_groups: int,
        max_blocks: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        self._block_size = block_size
        self._num_groups = num_groups
        self._device = device
        pin = device.type == "cuda"

        def buffer(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, pin_memory=pin)

        self._input_ids = buffer(max_num_tokens, dtype=torch.int64)
        self._positions = buffer(max_num_tokens, dtype=torch.int64)
        self._slot_mapping = buffer(num_groups, max_num_tokens, dtype=torch.int64)
        self._query_start_loc = buffer(max_num_requests + 1, dtype=torch.int32)
        self._seq_lens = buffer(max_num_requests, dtype=torch.int32)
        self._block_table = buffer(num_groups, max_num_requests, max_blocks, dtype=torch.int32)
        self._last_token_rows = buffer(max_num_requests, dtype=torch.int64)

    def fill(self, scheduled: Sequence[ScheduledRequest]) -> ModelInput:
        """Write the step's requests into the buffers and give views of them on the device."""
        input_ids, positions = self._input_ids.numpy(), self._positions.numpy()
        groups = list(zip(self._slot_mapping.numpy(), self._block_table.numpy(), strict=True))
        query_start_loc, seq_lens = self._query_start_loc.numpy(), self._seq_lens.numpy()
        last_token_rows = self._last_token_rows.numpy()
        row = num_sampling = max_num_blocks = 0
        for index, item in enumerate(scheduled):
            request, start = item.request, item.request.num_computed_tokens
            end = start + item.num_scheduled_tokens
            rows = slice(row, row + item.num_scheduled_tokens)
            block_ids = np.asarray(request.block_ids, dtype=np.int32)
            input_ids[rows] = request.token_ids[start:end]
            positions[rows] = token_positions = np.arange(start, end)
            block_of_token = token_positions // self._block_size
            offsets = token_positions % self._block_size
            for group, (slot_mapping, block_table) in enumerate(groups):
                blocks = block_ids[group :: self._num_groups]
                slot_mapping[rows] = (
                    blocks[block_of_token].astype(np.int64) * self._block_size + offsets
                )
                block_table[index, : len(blocks)] = blocks
            max_num_blocks = max(max_num_blocks, len(block_ids) // self._num_groups)
            row = rows.stop
            query_start_loc[index + 1] = row
            seq_lens[index] = end
            if item.samples:
                last_token_rows[num_sampling] = row - 1
                num_sampling += 1
        num_requests = len(scheduled)
        query_lens = tuple(item.num_scheduled_tokens for item in scheduled)
        seq_lens_host = tuple(int(length) for length in seq_lens[:num_requests])
        query_starts = self._to_device(self._query_start_loc[: num_requests + 1])
        seq_lens_device = self._to_device(self._seq_lens[:num_requests])
        return ModelInput(
            input_ids=self._to_device(self._input_ids[:row]),
            positions=self._to_device(self._positions[:row]),
            last_token_rows=self._to_device(self._last_token_rows[:num_sampling]),
            attention=tuple(
                AttentionMetadata(
                    num_requests=num_requests,
                    num_tokens=row,
                    query_start_loc=query_starts,
                    seq_lens=seq_lens_device,
                    block_table=self._to_device(table[:num_requests, :max_num_blocks]),
                    slot_mapping=self._to_device(slots[:row]),
                    max_query_len=max(query_lens),
                    max_seq_len=max(seq_lens_host),
                    query_lens=query_lens,
                    seq_lens_host=seq_lens_host,
                )
                for table, slots in zip(self._block_table, self._slot_mapping, strict=True)
            ),
        )

    def _to_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, non_blocking=True)
