"""How the CPU backend cuts one step into SDPA calls: prompt chunks one by one, decodes in groups.

Refuses to know: layers, heads, dtypes; it sees lengths and block tables only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from baton_kernels.attention.base import AttentionMetadata

# Decodes with the same number of blocks are gathered into one buffer before one SDPA call. Joining
# requests of different block counts by padding lost on a 2-core Xeon at every length (up to 1.4x);
# 1024 to 8192 tokens per call measured alike, and one call per request up to 1.6x slower.
MAX_GROUP_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """One request that computes several tokens: its rows of the query, and its blocks."""

    rows: slice  # of the query tensor
    block_ids: Tensor  # [blocks of seq_len]
    query_len: int
    seq_len: int


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Requests with equally many blocks that compute one token each, gathered together.

    ::

        request 0   k k k k | k k . .        k: cached key,  .: pad slot
        request 1   k k k k | k k k .
                    |<-   padded_len   ->|   a whole number of blocks
                    |<-  max_len  ->|
    """

    rows: slice | Tensor  # of the query tensor; a slice when they are neighbours
    block_ids: Tensor  # [num_requests * blocks per request]
    seq_lens: Tensor  # [num_requests, 1] int64
    num_requests: int
    padded_len: int
    max_len: int
    same_len: bool
    pad_slots: Tensor | None  # [p] int64 into [num_requests * padded_len], None when there are none


@dataclass(frozen=True, slots=True)
class StepPlan:
    """All SDPA calls of one step; ``num_rows`` is where padding tokens begin."""

    prompts: tuple[PromptChunk, ...]
    decodes: tuple[DecodeGroup, ...]
    num_rows: int


def plan_step(metadata: AttentionMetadata, block_size: int) -> StepPlan:
    """Cut one step into SDPA calls; every index tensor that the layers share is made here."""
    prompts: list[PromptChunk] = []
    decodes: list[tuple[int, int, int]] = []  # (seq_len, request, row)
    row = 0
    lens = zip(metadata.query_lens, metadata.seq_lens_host, strict=True)
    for request, (query_len, seq_len) in enumerate(lens):
        if query_len == 1:
            decodes.append((seq_len, request, row))
        elif query_len > 1:
            blocks = metadata.block_table[request, : -(-seq_len // block_size)]
            prompts.append(PromptChunk(slice(row, row + query_len), blocks, query_len, seq_len))
        row += query_len
    groups = _group_by_blocks(decodes, block_size)
    return StepPlan(
        prompts=tuple(prompts),
        decodes=tuple(_decode_group(group, metadata.block_table, block_size) for group in groups),
        num_rows=row,
    )


def _group_by_blocks(
    decodes: list[tuple[int, int, int]], block_size: int
) -> list[list[tuple[int, int, int]]]:
    """Requests with the same number of blocks, in batch order, in groups of limited size."""
    by_blocks: dict[int, list[tuple[int, int, int]]] = {}
    for decode in decodes:
        by_blocks.setdefault(-(-decode[0] // block_size), []).append(decode)
    groups: list[list[tuple[int, int, int]]] = []
    for num_blocks, alike in by_blocks.items():
        size = max(1, MAX_GROUP_TOKENS // (num_blocks * block_size))
        groups += [alike[start : start + size] for start in range(0, len(alike), size)]
    return groups


def _decode_group(
    group: list[tuple[int, int, int]], block_table: Tensor, block_size: int
) -> DecodeGroup:
    lens = [decode[0] for decode in group]
    rows = [decode[2] for decode in group]
    neighbours = rows[-1] - rows[0] == len(rows) - 1
    device = block_table.device
    blocks_each = -(-max(lens) // block_size)
    padded_len = blocks_each * block_size
    seq_lens = torch.tensor(lens, device=device).unsqueeze(1)  # [num_requests, 1]
    requests = torch.tensor([decode[1] for decode in group], device=device)  # [num_requests]
    table = block_table[requests, :blocks_each]  # [num_requests, blocks_each]
    slots = torch.arange(padded_len, device=device)  # [padded_len]
    pad_slots = (slots >= seq_lens).flatten().nonzero().squeeze(1)  # [p]
    return DecodeGroup(
        rows=slice(rows[0], rows[-1] + 1) if neighbours else torch.tensor(rows, device=device),
        block_ids=table.flatten(),
        seq_lens=seq_lens,
        num_requests=len(group),
        padded_len=padded_len,
        max_len=max(lens),
        same_len=min(lens) == max(lens),
        pad_slots=None if min(lens) == max(lens) else pad_slots,
    )
