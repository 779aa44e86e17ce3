"""ChunkInputs: the device tensors that captured steps with prompts read; copies steps into them.

A step is padded to the captured size with tokens of earlier steps, which have no KV slot and no
attention tile. Refuses to know: graphs, how a step's tensors were made.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from baton_kernels.attention.base import AttentionMetadata
from engine.worker.inputs.prepared_step import ModelInput

_NO_SLOT = -1


class ChunkInputs:
    """The inputs of all captured sizes; smaller sizes use views of the largest size's tensors.

    Args:
        sizes: captured numbers of tokens, ascending.
        max_num_requests: maximum number of requests in one of these steps.
        max_blocks: maximum number of blocks of one request in one group.
        num_groups: number of groups of the KV cache.
        max_seq_len: maximum number of tokens of one request.
        device: device of the model.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        max_num_requests: int,
        max_blocks: int,
        num_groups: int,
        max_seq_len: int,
        device: torch.device,
    ) -> None:
        self.sizes = tuple(sizes)
        self._max_num_requests, self._max_seq_len = max_num_requests, max_seq_len
        most = self.sizes[-1]

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self._input_ids = zeros(most, dtype=torch.int64)
        self._positions = zeros(most, dtype=torch.int64)
        self._slot_mappings = [zeros(most, dtype=torch.int64) for _ in range(num_groups)]
        self._query_start_loc = zeros(max_num_requests + 1, dtype=torch.int32)
        self._seq_lens = zeros(max_num_requests, dtype=torch.int32)
        self._block_tables = [
            zeros(max_num_requests, max_blocks, dtype=torch.int32) for _ in range(num_groups)
        ]
        for slot_mapping in self._slot_mappings:  # valid slots: a capture first runs the step
            slot_mapping.fill_(_NO_SLOT)

    def size_for(self, inputs: ModelInput) -> int | None:
        """Return the captured size to pad a step to, or None if the step is too large."""
        first = inputs.groups[0]
        assert isinstance(first, AttentionMetadata)
        if first.num_requests > self._max_num_requests:
            return None
        return next((size for size in self.sizes if size >= first.num_tokens), None)

    def write(self, inputs: ModelInput, size: int) -> None:
        """Launch the copies of a step's inputs for the next replay of ``size`` tokens."""
        num_tokens = len(inputs.input_ids)
        to = [self._input_ids[:num_tokens], self._positions[:num_tokens]]
        source = [inputs.input_ids, inputs.positions]
        for group, (slots, table) in enumerate(
            zip(self._slot_mappings, self._block_tables, strict=True)
        ):
            step = inputs.groups[group]
            assert isinstance(step, AttentionMetadata)
            num_requests, num_blocks = step.block_table.shape
            if not group:  # all groups have the same lengths
                to += [self._query_start_loc[: num_requests + 1], self._seq_lens[:num_requests]]
                source += [step.query_start_loc, step.seq_lens]
            to += [slots[:num_tokens], table[:num_requests, :num_blocks]]
            source += [step.slot_mapping, step.block_table]
            if num_tokens < size:
                slots[num_tokens:size].fill_(_NO_SLOT)
        torch._foreach_copy_(to, source)

    def input_ids(self, size: int) -> Tensor:
        """Return `[size]` int64, at the same address for every size."""
        return self._input_ids[:size]

    def positions(self, size: int) -> Tensor:
        """Return `[size]` int64, at the same address for every size."""
        return self._positions[:size]

    def metadata(self, size: int) -> tuple[AttentionMetadata, ...]:
        """Return the attention metadata of a captured size, by KV cache group.

        The lengths of requests are not known yet; see `TritonAttention.plan_captured`.
        """
        return tuple(
            AttentionMetadata(
                num_requests=self._max_num_requests,
                num_tokens=size,
                query_start_loc=self._query_start_loc,
                seq_lens=self._seq_lens,
                block_table=block_table,
                slot_mapping=slot_mapping[:size],
                max_query_len=size,
                max_seq_len=self._max_seq_len,
                query_lens=(),
                seq_lens_host=(),
            )
            for block_table, slot_mapping in zip(
                self._block_tables, self._slot_mappings, strict=True
            )
        )
