"""BlockTable: block ids of running requests in one host table. Refuses to know: requests.

row of a request   | b0 b1 b2 .  .  . |     kept between steps; steps add only new blocks
                     num_blocks = 3
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.core.kv_retention import NULL_BLOCK, SlidingWindow


class BlockTable:
    """Block ids of one KV cache group; a row belongs to one request until it is cleared.

    Args:
        max_num_requests: number of rows.
        max_blocks: maximum number of blocks of one request.
        block_size: tokens per block.
        group: index of the group. An interleaved list has the group's ids at this place and at
            every ``num_groups``-th place after it.
        num_groups: number of groups of the KV cache.
        sliding_window: the group's window, in tokens; None: full attention.

    Attributes:
        num_changes: number of writes since the start; while this number is unchanged, `gather`
            returns equal tables.
    """

    def __init__(
        self,
        max_num_requests: int,
        max_blocks: int,
        block_size: int,
        *,
        group: int = 0,
        num_groups: int = 1,
        sliding_window: int | None = None,
    ) -> None:
        self.num_changes = 0
        self._num_blocks = [0] * max_num_requests  # number of blocks in each row
        self._num_null = [0] * max_num_requests  # number of leading null blocks in each row
        self._block_size = block_size
        self._group = group
        self._num_groups = num_groups
        self._retention = (
            None
            if sliding_window is None
            else SlidingWindow(sliding_window, block_size, NULL_BLOCK)
        )
        self._table = torch.zeros(max_num_requests, max_blocks, dtype=torch.int32)
        self._rows = self._table.numpy()
        self._flat = self._rows.reshape(-1)

    def num_blocks(self, num_tokens: int) -> int:
        """Return the number of blocks that ``num_tokens`` tokens of one request need."""
        return -(-num_tokens // self._block_size)

    def num_held(self, row: int) -> int:
        """Return the number of tokens that fit into the blocks of a row."""
        return self._num_blocks[row] * self._block_size

    def clear(self, row: int) -> None:
        """Empty a row, because another request or other blocks will use it."""
        self._num_blocks[row] = self._num_null[row] = 0
        self.num_changes += 1

    def extend(self, row: int, block_ids: Sequence[int]) -> None:
        """Append blocks to a row.

        Args:
            block_ids: block ids, interleaved over groups.
        """
        written, added = self._num_blocks[row], block_ids[self._group :: self._num_groups]
        self._rows[row, written : written + len(added)] = added
        self._num_blocks[row] = written + len(added)
        self.num_changes += 1

    def slide(self, row: int, num_tokens: int) -> None:
        """Replace blocks that are outside the window after ``num_tokens`` by null blocks."""
        assert self._retention is not None
        num_expired = min(self._retention.num_expired_blocks(num_tokens), self._num_blocks[row])
        num_null = self._num_null[row]
        if num_null < num_expired:
            self._rows[row, num_null:num_expired] = NULL_BLOCK
            self._num_null[row] = num_expired
            self.num_changes += 1

    def slots(
        self,
        rows: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        out: npt.NDArray[np.int64],
    ) -> None:
        """Write each token's cache slot, which is block id * block_size + offset, to ``out``.

        Args:
            rows: `[num_tokens]`, row of each token's request.
            positions: `[num_tokens]`, position of each token in its request.
            out: receives the slots, `[num_tokens]`.
        """
        blocks, offsets = np.divmod(positions, self._block_size)
        blocks += rows * self._rows.shape[1]
        np.multiply(self._flat[blocks], self._block_size, out=out, dtype=np.int64)
        out += offsets

    def blocks(
        self, rows: npt.NDArray[np.int64], indices: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int32]:
        """Return the ids of the given logical blocks of the given rows: `[n]`.

        Args:
            rows: `[n]`.
            indices: `[n]`, indices of logical blocks in their rows.
        """
        blocks: npt.NDArray[np.int32] = self._flat[rows * self._rows.shape[1] + indices]
        return blocks

    def copy_rows(self, rows: Sequence[int], num_blocks: int) -> npt.NDArray[np.int32]:
        """Return a copy of the first blocks of some rows: `[n, num_blocks]`."""
        return self._rows[list(rows), :num_blocks]

    def gather(self, rows: npt.NDArray[np.int64], num_blocks: int, out: Tensor) -> Tensor:
        """Copy some rows' first blocks to ``out``; return `[num_requests, num_blocks]` int32.

        Args:
            rows: `[num_requests]`, in batch order.
            out: receives the ids; `[num_requests * num_blocks]` or longer, int32.
        """
        gathered = out[: len(rows) * num_blocks].view(len(rows), num_blocks)
        torch.index_select(self._table[:, :num_blocks], 0, torch.from_numpy(rows), out=gathered)
        return gathered
