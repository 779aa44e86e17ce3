"""Adapters' products in Triton against their definition, in any mix of slots."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from baton_kernels import LowRankSlots, RowTiles, reference
from baton_kernels.triton.low_rank import FEW_ROWS, MANY_ROWS, add_low_rank_by_slot
from tests.kernels.poison import poisoned_memory as poisoned_memory
from tests.numerics.tolerances import assert_close

NUM_SLOTS, DEPTH, MAX_RANK = 4, 72, 64
COLUMNS = (96, 40, 24)
# Rank of each slot's parts: any rank, a part without a module, an empty slot.
RANKS = ((64, 1, 33), (8, 0, 16), (0, 0, 0), (3, 64, 5))


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def draw_slots(dtype: torch.dtype, device: torch.device, *, has_gains: bool) -> LowRankSlots:
    like = torch.empty(0, dtype=dtype, device=device)
    slots = LowRankSlots.empty(like, NUM_SLOTS, MAX_RANK, DEPTH, COLUMNS, has_gains=has_gains)
    for slot, ranks in enumerate(RANKS):
        for part, (rank, num_columns) in enumerate(zip(ranks, COLUMNS, strict=True)):
            down = torch.randn(rank, DEPTH) / DEPTH**0.5
            up = torch.randn(num_columns, rank) / max(rank, 1) ** 0.5
            gains = 0.5 + torch.rand(num_columns) if has_gains and slot else None
            shifts = torch.randn(num_columns) if gains is not None else None
            slots.write(slot, part, down, up, gains, shifts)
    return slots


def added(
    slots: LowRankSlots, ids: Tensor, x: Tensor, out: Tensor, tile_rows: int = FEW_ROWS
) -> Tensor:
    found = out.clone()
    tiles = RowTiles.of(ids, NUM_SLOTS + 1, tile_rows)
    add_low_rank_by_slot(found, x, slots, ids, tiles)
    return found


def expected_of(slots: LowRankSlots, ids: Tensor, x: Tensor, out: Tensor) -> Tensor:
    expected = out.clone()
    tiles = RowTiles.of(ids, NUM_SLOTS + 1, FEW_ROWS)
    reference.add_low_rank_by_slot(expected, x, slots, ids, tiles)
    return expected


def draw_rows(
    num_rows: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw each row's slot, its input, and the layer's own result."""
    ids = torch.randint(NUM_SLOTS + 1, (num_rows,)).to(device)
    x = torch.randn(num_rows, DEPTH).to(device, dtype)
    return ids, x, torch.randn(num_rows, sum(COLUMNS)).to(device, dtype)


@pytest.mark.parametrize("has_gains", [False, True])
@pytest.mark.parametrize("tile_rows", [FEW_ROWS, MANY_ROWS])
@pytest.mark.parametrize("num_rows", [1, 9, 150])
def test_any_mix_of_slots(
    num_rows: int, tile_rows: int, has_gains: bool, dtype: torch.dtype, device: torch.device
) -> None:
    slots = draw_slots(dtype, device, has_gains=has_gains)
    ids, x, out = draw_rows(num_rows, dtype, device)
    found = added(slots, ids, x, out, tile_rows)
    assert_close(found, expected_of(slots, ids, x, out))
    unchanged = (ids == 2) | (ids == NUM_SLOTS)  # no adapter in the slot, or none for the row
    assert torch.equal(found[unchanged], out[unchanged])


@pytest.fixture
def equal_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Triton's interpreter sum each row in the same order, as GPUs do; some BLAS do not."""

    def matmul(a: Any, b: Any, dtype: Any = None) -> Any:
        return np.einsum("mk,kn->mn", a, b, dtype=dtype)

    monkeypatch.setattr(np, "matmul", matmul)


@pytest.mark.usefixtures("equal_rows")
def test_a_row_has_the_same_bits_alone_and_in_company(
    dtype: torch.dtype, device: torch.device
) -> None:
    slots = draw_slots(dtype, device, has_gains=True)
    ids, x, out = draw_rows(40, dtype, device)
    together = added(slots, ids, x, out)
    for row in range(0, 40, 7):
        one = slice(row, row + 1)
        assert torch.equal(added(slots, ids[one], x[one], out[one])[0], together[row])


def test_a_slot_gets_another_adapter_of_a_smaller_rank(device: torch.device) -> None:
    slots = draw_slots(torch.float32, device, has_gains=True)
    ids, x, out = draw_rows(20, torch.float32, device)
    slots.clear(0)
    slots.write(0, 1, torch.randn(2, DEPTH), torch.randn(COLUMNS[1], 2))
    found = added(slots, ids, x, out)
    assert_close(found, expected_of(slots, ids, x, out))
    assert torch.equal(found[ids == 0][:, : COLUMNS[0]], out[ids == 0][:, : COLUMNS[0]])


def test_no_rows(device: torch.device) -> None:
    slots = draw_slots(torch.float32, device, has_gains=False)
    ids, x, out = draw_rows(0, torch.float32, device)
    assert added(slots, ids, x, out).shape == out.shape


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_graph_computes_other_rows_and_other_adapters(
    dtype: torch.dtype, device: torch.device
) -> None:
    slots = draw_slots(dtype, device, has_gains=True)
    ids, x, out = draw_rows(24, dtype, device)
    before, result = out.clone(), out.clone()

    def step() -> None:
        result.copy_(before)
        add_low_rank_by_slot(result, x, slots, ids, RowTiles.of(ids, NUM_SLOTS + 1, FEW_ROWS))

    step()  # compiles the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    more_ids, more_x, _ = draw_rows(24, dtype, device)
    ids.copy_(more_ids)
    x.copy_(more_x)
    slots.clear(0)
    slots.write(2, 0, torch.randn(7, DEPTH), torch.randn(COLUMNS[0], 7))
    graph.replay()
    assert_close(result, expected_of(slots, ids, x, before))
