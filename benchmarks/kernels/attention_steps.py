"""Makes the steps on which attention kernels are measured."""

from __future__ import annotations

import torch

from baton_kernels.attention.base import AttentionMetadata


def attention_step(
    batch: int, query_len: int, context: int, block_size: int, device: str = "cpu"
) -> AttentionMetadata:
    """Make the metadata of a step in which equal requests compute their last tokens.

    The requests' blocks are scattered over the cache.
    """
    blocks = -(-context // block_size)
    table = torch.randperm(batch * blocks, device=device).view(batch, blocks)
    positions = torch.arange(context - query_len, context, device=device)
    slots = table[:, positions // block_size] * block_size + positions % block_size
    return AttentionMetadata(
        num_requests=batch,
        num_tokens=batch * query_len,
        query_start_loc=torch.arange(batch + 1, dtype=torch.int32, device=device) * query_len,
        seq_lens=torch.full((batch,), context, dtype=torch.int32, device=device),
        block_table=table.to(torch.int32),
        slot_mapping=slots.flatten(),
        max_query_len=query_len,
        max_seq_len=context,
        query_lens=(query_len,) * batch,
        seq_lens_host=(context,) * batch,
    )
