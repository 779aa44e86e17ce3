"""Latent attention in Triton against its definition: decodes, prompts, chunks, padding."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from baton_kernels import reference
from baton_kernels.attention.base import AttentionMetadata, AttentionOptions, as_keys_and_values
from baton_kernels.attention.triton_latents import TritonLatentAttention
from tests.kernels.poison import poisoned_memory as poisoned_memory
from tests.numerics.paged import make_metadata, make_tables
from tests.numerics.tolerances import assert_close

BLOCK_SIZE = 8
# Heads, rank, numbers that carry the position: some heads are no power of two, some are two tiles.
SHAPES = ((2, 32, 8), (9, 20, 6), (32, 48, 16))
# New tokens and all tokens of each request; a decode of 700 tokens is split and merged.
STEPS = {
    "decodes": ([1, 1, 1], [1, 17, 700]),
    "prompts": ([5, 33], [5, 40]),
    "both": ([1, 12, 1, 2], [300, 12, 9, 2]),
    "padding": ([1, 0, 3], [20, 0, 3]),
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    "shape", [pytest.param(SHAPES[0], marks=pytest.mark.thorough), *SHAPES[1:]], ids=str
)
def test_latent_attention(
    shape: tuple[int, int, int], step: str, dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(0)
    num_heads, rank, rotary_dim = shape
    query_lens, seq_lens = STEPS[step]
    num_blocks = sum(-(-length // BLOCK_SIZE) for length in seq_lens) + 2
    table = make_tables(seq_lens, BLOCK_SIZE, num_blocks)
    width = rank + rotary_dim
    # Blocks of two layers, of which this is the second one; NaN where nothing was written.
    cache = torch.full((num_blocks, 2, BLOCK_SIZE, width), torch.nan, dtype=dtype)[:, 1]
    slots = make_metadata(seq_lens, seq_lens, table, BLOCK_SIZE).slot_mapping
    cache[slots // BLOCK_SIZE, slots % BLOCK_SIZE] = torch.randn(len(slots), width).to(dtype)
    num_padding = 2 if step == "padding" else 0
    metadata = make_metadata(query_lens, seq_lens, table, BLOCK_SIZE, num_padding)
    query = torch.randn(metadata.num_tokens, num_heads, width).to(dtype)
    expected = reference.paged_attention(
        query, as_keys_and_values(cache), table, query_lens, seq_lens, scale=0.2, value_dim=rank
    )
    found = attend(query, cache, metadata, rank, device)
    assert_close(found, expected)
    if num_padding:
        assert not found[-num_padding:].any()


def attend(
    query: Tensor, cache: Tensor, metadata: AttentionMetadata, rank: int, device: torch.device
) -> Tensor:
    on_device = replace(
        metadata,
        query_start_loc=metadata.query_start_loc.to(device),
        seq_lens=metadata.seq_lens.to(device),
        block_table=metadata.block_table.to(device),
    )
    backend = TritonLatentAttention()
    backend.plan(on_device)
    keys = as_keys_and_values(cache.to(device))
    found = backend.run(
        query.to(device), keys, on_device, AttentionOptions(scale=0.2, value_dim=rank)
    )
    if query.shape[1] < 32:  # interpreted, the most heads take seconds: a second layer of them, too
        again = backend.run(
            query.to(device), keys, on_device, AttentionOptions(scale=0.2, value_dim=rank)
        )
        assert torch.equal(found, again)  # it finds the plan of the first
    return found.cpu()
