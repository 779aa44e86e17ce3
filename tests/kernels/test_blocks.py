"""Moving whole KV blocks, against indexing."""

from __future__ import annotations

import pytest
import torch

from baton_kernels.triton.blocks import copy_blocks, gather_blocks, scatter_blocks

# Bytes of a block: less than one program moves, more than one, and no multiple of it.
SHAPES = [(2, 2, 1, 4, 2), (3, 2, 2, 16, 24), (1, 2, 5, 16, 64)]


def make_blocks(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(7, *shape).to(device, dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_copy_blocks(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    cache = make_blocks(shape, dtype, device)
    expected = cache.clone()
    expected[[0, 5]] = expected[[6, 2]]
    source_ids = torch.tensor([6, -1, 2, 3], device=device)
    copy_blocks(cache, source_ids, torch.tensor([0, 1, 5, -1], device=device))
    assert torch.equal(cache, expected)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gather_and_scatter_blocks(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    cache = make_blocks(shape, dtype, device)
    block_ids = torch.tensor([4, -1, 0], device=device)
    out = torch.full((3, *shape), torch.nan).to(cache)
    gather_blocks(cache, block_ids, out)
    assert torch.equal(out[[0, 2]], cache[[4, 0]])
    assert out[1].isnan().all()
    target, places = make_blocks(shape, dtype, device), torch.tensor([6, -1, 1], device=device)
    expected = target.clone()
    expected[[6, 1]] = out[[0, 2]]
    scatter_blocks(out, target, places)
    assert torch.equal(target, expected)


def test_no_blocks_are_nothing_to_do(device: torch.device) -> None:
    cache = make_blocks(SHAPES[0], torch.float32, device)
    before, none = cache.clone(), torch.empty(0, dtype=torch.int64, device=device)
    copy_blocks(cache, none, none)
    scatter_blocks(cache[:0], cache, none)
    assert torch.equal(cache, before)
