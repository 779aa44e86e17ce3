"""Divides a step into SDPA calls for the CPU backend: prompt chunks one by one, decodes in groups.

Refuses to know: layers, heads, dtypes; reads only lengths and block tables.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from baton_kernels.attention.base import AttentionMetadata

Ints = npt.NDArray[np.int_]

# Maximum number of tokens of one SDPA call for decodes. Decodes with equal numbers of blocks share
# a call. On a 2-core Xeon, padding requests with different numbers of blocks into one call was
# slower at every length (up to 1.4 times), and so was one call per request (up to 1.6 times). 1024
# to 8192 tokens per call took equally long.
MAX_GROUP_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """A request that computes several tokens in this step, which takes one SDPA call."""

    rows: slice  # the request's rows of the query tensor
    block_ids: Tensor  # [number of blocks for seq_len tokens]
    query_len: int
    seq_len: int


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decodes (requests that compute one token) of one SDPA call, with equally many blocks each.

    ::

        request 0   k k k k | k k . .        k: cached key,  .: pad slot
        request 1   k k k k | k k k .
                    |<-   padded_len   ->|   a whole number of blocks
                    |<-  max_len  ->|
    """

    rows: slice | Tensor  # rows of the query tensor; a slice if they are adjacent
    block_ids: Tensor  # [num_requests * blocks per request]
    seq_lens: Tensor  # [num_requests, 1] int64
    num_requests: int
    padded_len: int
    max_len: int
    same_len: bool
    pad_slots: Tensor | None  # [p] int64, in [num_requests * padded_len]; None: no pads


@dataclass(frozen=True, slots=True)
class StepPlan:
    """All SDPA calls of one step; the query's rows from ``num_rows`` on are padding."""

    prompts: tuple[PromptChunk, ...]
    decodes: tuple[DecodeGroup, ...]
    num_rows: int


def plan_step(metadata: AttentionMetadata, block_size: int) -> StepPlan:
    """Divide a step into SDPA calls, and make the index tensors for all layers."""
    query_lens, seq_lens = np.array(metadata.query_lens), np.array(metadata.seq_lens_host)
    ends = query_lens.cumsum()  # [num_requests], each request's first row of the query
    prompts: list[PromptChunk] = []
    for request in (query_lens > 1).nonzero()[0].tolist():
        query_len, seq_len, end = (int(of[request]) for of in (query_lens, seq_lens, ends))
        blocks = metadata.block_table[request, : -(-seq_len // block_size)]
        prompts.append(PromptChunk(slice(end - query_len, end), blocks, query_len, seq_len))
    decodes = (query_lens == 1).nonzero()[0]
    # numpy, because torch takes many times longer for so many small operations
    device = metadata.block_table.device
    table = metadata.block_table.cpu().numpy()
    return StepPlan(
        prompts=tuple(prompts),
        decodes=tuple(
            _decode_group(ends[group] - 1, seq_lens[group], table[group], block_size, device)
            for group in _group_by_blocks(decodes, -(-seq_lens[decodes] // block_size), block_size)
        ),
        num_rows=int(ends[-1]) if len(ends) else 0,
    )


def _group_by_blocks(decodes: Ints, num_blocks: Ints, block_size: int) -> Iterator[Ints]:
    """Group decodes with equal numbers of blocks, in batch order, up to `MAX_GROUP_TOKENS`."""
    if not len(decodes):
        return
    order = num_blocks.argsort(kind="stable")
    num_blocks = num_blocks[order]
    borders = np.flatnonzero(num_blocks[1:] != num_blocks[:-1]) + 1
    for alike in np.split(order, borders):
        size = max(1, MAX_GROUP_TOKENS // (int(num_blocks[0]) * block_size))
        num_blocks = num_blocks[len(alike) :]
        for start in range(0, len(alike), size):
            yield decodes[alike[start : start + size]]


def _decode_group(
    rows: Ints, lens: Ints, table: Ints, block_size: int, device: torch.device
) -> DecodeGroup:
    """Make a group of n decodes.

    Args:
        rows: ``[n]``, rows of the query tensor.
        lens: ``[n]``, tokens of each request.
        table: ``[n, max_blocks]``, blocks of each request.
        block_size: tokens per block.
        device: device of the tensors to make.
    """
    num_requests, max_len, min_len = len(lens), int(lens.max()), int(lens.min())
    num_blocks = -(-max_len // block_size)
    padded_len = num_blocks * block_size
    pad_slots = None
    if min_len < max_len:  # only the requests' last blocks have pad slots
        slots = np.arange(padded_len - block_size, padded_len)  # [block_size]
        requests, offsets = (slots >= lens[:, None]).nonzero()
        pad_slots = torch.from_numpy(requests * padded_len + slots[offsets]).to(device)
    first, last = int(rows[0]), int(rows[-1])
    return DecodeGroup(
        rows=slice(first, last + 1)
        if last - first == num_requests - 1
        else torch.from_numpy(rows).to(device),
        block_ids=torch.from_numpy(table[:, :num_blocks].reshape(-1)).to(device),
        seq_lens=torch.from_numpy(lens).to(device).unsqueeze(1),
        num_requests=num_requests,
        padded_len=padded_len,
        max_len=max_len,
        same_len=min_len == max_len,
        pad_slots=pad_slots,
    )
