"""Passes: makes the forward contexts in which a drafter computes tokens of some requests.

A pass with few tokens per request is run as a decode step, in which each token is treated as a
request with the same blocks. The result is correct, because each layer writes the KV of all tokens
before it reads KV. On a CPU, a recorded tape can replay such a pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from baton_kernels.attention.base import AttentionBackend, AttentionMetadata
from engine.worker.drafting.base import Ints
from models.base import ForwardContext, LayerCache

# A pass with at least this many tokens of one request is not run as a decode step. The number is
# larger than any request's number of drafts.
MANY_TOKENS = 33
_MOST_ROWS = 64  # maximum number of rows of a pass that runs as a decode step


class Passes:
    """Makes the forward contexts of a drafter's passes.

    Args:
        backends: attention backend of each KV cache group.
        layer_groups: index of the KV cache group of each layer of the drafter.
        layer_caches: part of the cache of each layer of the drafter.
        block_size: tokens per block.
        device: device of the cache.
    """

    def __init__(
        self,
        backends: Sequence[AttentionBackend | None],
        layer_groups: Sequence[int],
        layer_caches: tuple[LayerCache, ...],
        block_size: int,
        device: torch.device,
    ) -> None:
        self._used = sorted(set(layer_groups))
        self._backends = [backends[group] for group in self._used]
        self._layer_groups = tuple(self._used.index(group) for group in layer_groups)
        self._layer_caches = layer_caches
        self._block_size, self._device = block_size, device

    def context(
        self,
        block_tables: Sequence[npt.NDArray[np.int32]],
        requests: Sequence[int],
        starts: Sequence[int],
        lens: Sequence[int],
    ) -> ForwardContext:
        """Describe a pass that computes tokens from ``starts`` on, at least one per request.

        Args:
            block_tables: one per group, `[num_requests, max_blocks]`.
            requests: `[n]`, rows of the block tables.
            starts: `[n]`, positions of the first tokens.
            lens: `[n]`, numbers of tokens.
        """
        rows, first, counts = (np.array(column) for column in (requests, starts, lens))
        token_rows, positions, total = rows, first, len(rows)
        most = max(lens)
        if most > 1:
            total = sum(lens)
            after_first = np.arange(total) - (counts.cumsum() - counts).repeat(counts)
            positions = first.repeat(counts) + after_first  # [num_tokens]
            token_rows = rows.repeat(counts)
            if total <= _MOST_ROWS and most < MANY_TOKENS:
                rows, first, counts = token_rows, positions, np.ones_like(positions)
                most = 1
        ends = first + counts
        blocks, offsets = np.divmod(positions, self._block_size)
        query_start_loc = np.zeros(len(rows) + 1, dtype=np.int32)
        counts.cumsum(out=query_start_loc[1:])
        starts_on_device = self._tensor(query_start_loc)
        ends_on_device = self._tensor(ends.astype(np.int32))
        query_lens, seq_lens = tuple(counts.tolist()), tuple(ends.tolist())
        max_seq_len = max(seq_lens)
        width = -(-max_seq_len // self._block_size)
        groups = []
        for group, backend in zip(self._used, self._backends, strict=True):
            table = block_tables[group]
            slots = table[token_rows, blocks].astype(np.int64) * self._block_size + offsets
            metadata = AttentionMetadata(
                num_requests=len(rows),
                num_tokens=total,
                query_start_loc=starts_on_device,
                seq_lens=ends_on_device,
                block_table=self._tensor(np.ascontiguousarray(table[rows, :width])),
                slot_mapping=self._tensor(slots),
                max_query_len=most,
                max_seq_len=max_seq_len,
                query_lens=query_lens,
                seq_lens_host=seq_lens,
            )
            assert backend is not None, "a drafter keeps no states"
            backend.plan(metadata)
            groups.append((metadata, backend))
        return ForwardContext(
            positions=self._tensor(positions),
            groups=tuple(groups),
            layer_groups=self._layer_groups,
            layer_caches=self._layer_caches,
        )

    def in_a_row(
        self,
        block_tables: Sequence[npt.NDArray[np.int32]],
        request: int,
        start: int,
        num_tokens: int,
        num_passes: int,
    ) -> ForwardContext:
        """Describe passes over one request: first ``num_tokens`` tokens, then one token per pass.

        Args:
            block_tables: one per group, `[num_requests, max_blocks]`.
            request: the request's row of the block tables.
            start: position of the first token.
            num_tokens: number of tokens of the first pass, each treated as a separate request.
            num_passes: number of passes; each has its own groups in the result, in order.
        """
        total = num_tokens + num_passes - 1
        positions = np.arange(start, start + total)
        blocks, offsets = np.divmod(positions, self._block_size)
        query_start_loc = self._tensor(np.arange(num_tokens + 1, dtype=np.int32))
        seq_lens = self._tensor((positions + 1).astype(np.int32))
        spans = [(0, num_tokens), *((end, end + 1) for end in range(num_tokens, total))]
        tables, slots = [], []
        for group in self._used:
            row = block_tables[group][request]
            slots.append(self._tensor(row[blocks].astype(np.int64) * self._block_size + offsets))
            width = -(-(start + total) // self._block_size)
            tables.append(self._tensor(np.tile(row[:width], (num_tokens, 1))))
        groups = []
        for first, end in spans:
            num, longest = end - first, start + end
            for table, slot_mapping, backend in zip(tables, slots, self._backends, strict=True):
                assert backend is not None, "a drafter keeps no states"
                metadata = AttentionMetadata(
                    num_requests=num,
                    num_tokens=num,
                    query_start_loc=query_start_loc[: num + 1],
                    seq_lens=seq_lens[first:end],
                    block_table=table[:num],
                    slot_mapping=slot_mapping[first:end],
                    max_query_len=1,
                    max_seq_len=longest,
                    query_lens=(1,) * num,
                    seq_lens_host=tuple(range(start + first + 1, longest + 1)),
                )
                groups.append((metadata, backend))
        return ForwardContext(
            positions=self._tensor(positions),
            groups=tuple(groups),
            layer_groups=self._layer_groups,
            layer_caches=self._layer_caches,
        )

    def _tensor(self, array: Ints | npt.NDArray[np.int32]) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self._device.type == "cpu" else tensor.to(self._device)
