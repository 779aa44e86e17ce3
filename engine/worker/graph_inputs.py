"""GraphInputs: the device tensors that captured decode steps read; copies steps into them.

A captured step reads the same addresses in every replay. A step's inputs are written into one
pinned buffer and copied at once, except the last tokens, which are on the device already:

    source          | last_tokens by row ........ , spare | token_ids of this step .... |
    token_index       ^ sampled by the previous step        ^ known on the host

After the step's requests, padding rows fill the captured size. Padding rows have no query and no KV
slot, and their tokens are never read. Refuses to know: requests, models, graphs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from baton_kernels.attention.base import AttentionMetadata
from engine.sampling.device_sampling import PARAMETER_TYPES
from engine.sampling.sampling_input import SamplingInput
from engine.worker.block_table import BlockTable
from engine.worker.inputs.prepared_step import ReplayStep

_ALIGNMENT = 16  # bytes; vector loads need this alignment
_NO_SLOT = -1
Ints = npt.NDArray[np.int64]


class _Sections:
    """Named arrays that lie one after another in one buffer of bytes."""

    def __init__(self, memory: Tensor, sizes: dict[str, tuple[torch.dtype, int]]) -> None:
        self.memory = memory  # [num_bytes] uint8
        self.tensors: dict[str, Tensor] = {}
        self.offsets: dict[str, int] = {}
        offset = 0
        for name, (dtype, size) in sizes.items():
            num_bytes = size * dtype.itemsize
            self.tensors[name] = memory[offset : offset + num_bytes].view(dtype)
            self.offsets[name] = offset
            offset += _round_up(num_bytes)

    @staticmethod
    def num_bytes(sizes: dict[str, tuple[torch.dtype, int]]) -> int:
        return sum(_round_up(size * dtype.itemsize) for dtype, size in sizes.values())


class GraphInputs:
    """Static inputs of all captured sizes; a smaller size uses views of the largest size's tensors.

    Args:
        sizes: numbers of requests to capture, ascending.
        num_rows: rows of the input batch; ``last_tokens`` has a spare row that is never read.
        max_blocks: maximum number of blocks of one request in one group.
        num_groups: number of groups of the KV cache.
        max_seq_len: maximum number of tokens of one request.
        device: device of the model.
        num_steps: maximum number of steps in flight; each has a staging buffer of its own.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        num_rows: int,
        max_blocks: int,
        num_groups: int,
        max_seq_len: int,
        device: torch.device,
        num_steps: int = 2,
    ) -> None:
        self.sizes = tuple(sizes)
        self._capacity = capacity = self.sizes[-1]
        self._max_blocks, self._max_seq_len = max_blocks, max_seq_len
        self._spare_row = num_rows
        self._num_rows = -(-(num_rows + 1) // 2) * 2  # so that the bytes are a multiple of 16
        sizes_of = self._section_sizes(num_groups)
        num_bytes = _Sections.num_bytes(sizes_of)
        pin = device.type == "cuda"
        self._host = tuple(
            _Sections(torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=pin), sizes_of)
            for _ in range(num_steps)
        )
        self._arrays = tuple(
            {name: tensor.numpy() for name, tensor in sections.tensors.items()}
            for sections in self._host
        )
        head = self._num_rows * torch.int64.itemsize
        memory = torch.zeros(head + num_bytes, dtype=torch.uint8, device=device)
        self._device = _Sections(memory[head:], sizes_of)
        # [_num_rows + capacity] int64: `token_ids` is the first section.
        self.source = memory[: head + capacity * torch.int64.itemsize].view(torch.int64)
        self.last_tokens = self.source[: num_rows + 1]
        self.block_tables = tuple(
            torch.zeros(capacity, max_blocks, dtype=torch.int32, device=device)
            for _ in range(num_groups)
        )
        self._staging = 0
        self._counted = np.arange(capacity + 1)

    def _section_sizes(self, num_groups: int) -> dict[str, tuple[torch.dtype, int]]:
        capacity = self._capacity
        longs = ["token_ids", "token_index", "positions", "rows"]
        longs += [f"slots{group}" for group in range(num_groups)]
        per_request = {"keys": 2}
        return {
            **dict.fromkeys(longs, (torch.int64, capacity)),
            "seq_lens": (torch.int32, capacity),
            "query_start_loc": (torch.int32, capacity + 1),
            **{
                name: (dtype, capacity * per_request.get(name, 1))
                for name, dtype in PARAMETER_TYPES.items()
            },
            "block_tables": (torch.int32, num_groups * capacity * self._max_blocks),
        }

    # ------------------------------------------------------------------ on the host

    def size_for(self, num_requests: int) -> int | None:
        """Return the captured size to pad ``num_requests`` to; None if they are too many."""
        return next((size for size in self.sizes if size >= num_requests), None)

    def stage(
        self,
        rows: Ints,
        token_ids: Ints,
        positions: Ints,
        block_tables: Sequence[BlockTable],
        kernel_parameters: Mapping[str, npt.NDArray[np.generic]],
        sampling: SamplingInput,
        deltas: Ints | None = None,
    ) -> ReplayStep:
        """Write a step into a staging buffer that no step in flight uses.

        Args:
            rows: `[num_requests]`, each request's row of the input batch.
            token_ids: `[num_requests]`; negative if the previous step samples the token.
            positions: `[num_requests]`, positions of these tokens.
            block_tables: one per KV cache group.
            kernel_parameters: all arrays that `PARAMETER_TYPES` names except keys, with one value
                per row of the input batch.
            deltas: `[num_requests]`, each request's position for RoPE minus its position in
                ``positions``; None: all differences are 0.
        """
        self._staging = (self._staging + 1) % len(self._host)
        arrays = self._arrays[self._staging]
        num_requests = len(rows)
        size = self.size_for(num_requests)
        assert size is not None, f"{num_requests} requests, but {self.sizes[-1]} are captured"

        def write(name: str, values: npt.NDArray[np.generic], padding: int) -> None:
            array = arrays[name]
            array[:num_requests] = values
            if num_requests < size:
                array[num_requests:size] = padding

        on_host = self._counted[:num_requests] + self._num_rows
        write("token_ids", np.maximum(token_ids, 0), 0)
        write("token_index", np.where(token_ids < 0, rows, on_host), self._spare_row)
        write("positions", positions if deltas is None else positions + deltas, 0)
        write("rows", rows, self._spare_row)
        write("seq_lens", positions + 1, 0)
        starts = arrays["query_start_loc"]
        starts[: num_requests + 1] = self._counted[: num_requests + 1]
        starts[num_requests + 1 : size + 1] = num_requests
        for name, by_row in kernel_parameters.items():
            write(name, by_row.take(rows), int(name == "top_p"))
        arrays["keys"][: 2 * num_requests] = sampling.keys.view(np.int32).reshape(-1)
        num_blocks = block_tables[0].num_blocks(int(positions.max()) + 1)
        tables = self._host[self._staging].tensors["block_tables"]
        for group, block_table in enumerate(block_tables):
            slots = arrays[f"slots{group}"]
            block_table.slots(rows, positions, out=slots[:num_requests])
            slots[num_requests:size] = _NO_SLOT
            start = group * num_requests * num_blocks
            block_table.gather(rows, num_blocks, out=tables[start:])
        return ReplayStep(sampling, self._staging, num_requests, size, num_blocks)

    # ------------------------------------------------------------------ on the device

    def upload(self, staged: ReplayStep) -> None:
        """Launch the copies of a staged step into the static inputs, before its replay."""
        host, num_groups = self._host[staged.staging], len(self.block_tables)
        entries = staged.num_requests * staged.num_blocks
        used = host.offsets["block_tables"] + num_groups * entries * torch.int32.itemsize
        self._device.memory[:used].copy_(host.memory[:used], non_blocking=True)
        packed = self._device.tensors["block_tables"]
        for group, table in enumerate(self.block_tables):
            entry = group * entries
            table[: staged.num_requests, : staged.num_blocks].copy_(
                packed[entry : entry + entries].view(staged.num_requests, staged.num_blocks)
            )

    def section(self, name: str, size: int) -> Tensor:
        """Return the first ``size`` values of a static input, at the same address for all sizes."""
        return self._device.tensors[name][:size]

    def sampling_tensors(self, size: int) -> dict[str, Tensor]:
        """Return the tensors that `PARAMETER_TYPES` names, for a captured size."""
        tensors = {name: self.section(name, size) for name in PARAMETER_TYPES}
        tensors["keys"] = self.section("keys", 2 * size).view(size, 2)
        return tensors

    def metadata(self, size: int) -> tuple[AttentionMetadata, ...]:
        """Return a captured size's attention metadata, by group; lengths are the largest ones."""
        return tuple(
            AttentionMetadata(
                num_requests=size,
                num_tokens=size,
                query_start_loc=self.section("query_start_loc", size + 1),
                seq_lens=self.section("seq_lens", size),
                block_table=table[:size],
                slot_mapping=self.section(f"slots{group}", size),
                max_query_len=1,
                max_seq_len=self._max_seq_len,
                query_lens=(1,) * size,
                seq_lens_host=(self._max_seq_len,) * size,
            )
            for group, table in enumerate(self.block_tables)
        )


def _round_up(num_bytes: int) -> int:
    return math.ceil(num_bytes / _ALIGNMENT) * _ALIGNMENT
