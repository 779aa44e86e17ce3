"""Random paged layouts for tests: permuted block tables over a poisoned, block-major cache.

Refuses to know: how backends and models compute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from baton_kernels.attention.base import AttentionBackend, AttentionMetadata
from models.base import ForwardContext


def make_tables(seq_lens: Sequence[int], block_size: int, num_blocks: int, seed: int = 0) -> Tensor:
    """``[num_requests, max_blocks]`` int32, blocks in random order, -1 behind the last one."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(num_blocks, generator=generator, device="cpu").tolist()
    counts = [-(-seq_len // block_size) for seq_len in seq_lens]
    table = torch.full((len(seq_lens), max(counts, default=0) + 1), -1, dtype=torch.int32)
    for row, count in zip(table, counts, strict=True):
        row[:count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)
    return table


def make_metadata(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    table: Tensor,
    block_size: int,
    num_padding: int = 0,
) -> AttentionMetadata:
    """The metadata of a step in which each request computes its last ``query_len`` tokens."""
    slots: list[int] = []
    for row, query_len, seq_len in zip(table.tolist(), query_lens, seq_lens, strict=True):
        positions = range(seq_len - query_len, seq_len)
        slots += [row[p // block_size] * block_size + p % block_size for p in positions]
    slots += [-1] * num_padding
    starts = torch.tensor([0, *query_lens]).cumsum(0)
    return AttentionMetadata(
        num_requests=len(query_lens),
        num_tokens=len(slots),
        query_start_loc=starts.to(torch.int32),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_table=table,
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        query_lens=tuple(query_lens),
        seq_lens_host=tuple(seq_lens),
    )


def make_cache(
    num_blocks: int, num_layers: int, num_kv_heads: int, block_size: int, head_dim: int
) -> Tensor:
    """A block-major cache full of NaN: whatever reads what was never written shows."""
    shape = (num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim)
    return torch.full(shape, torch.nan)


def make_context(
    positions: Tensor,
    metadata: AttentionMetadata,
    backend: AttentionBackend,
    cache: Tensor,
    after_layer: Callable[[int], None] | None = None,
) -> ForwardContext:
    """A step over one KV cache group with all layers in it; ``backend`` has planned it."""
    return ForwardContext(
        positions=positions,
        groups=((metadata, backend),),
        layer_groups=(0,) * cache.shape[1],
        layer_caches=cache.unbind(1),
        after_layer=after_layer,
    )
