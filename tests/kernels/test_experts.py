"""The Triton experts against their definition, with any number of rows for an expert."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from baton_kernels import ExpertShare, Routing, Scoring, reference
from baton_kernels.row_tiles import RowTiles
from baton_kernels.triton.experts import FEW_ROWS, MANY_ROWS, experts
from tests.kernels.poison import poisoned_memory as poisoned_memory
from tests.numerics.tolerances import assert_close

# Tokens, hidden size, size of an expert, experts, those of a token.
SHAPES = [(1, 64, 48, 4, 2), (7, 40, 24, 8, 3), (70, 64, 32, 2, 2), (33, 72, 80, 16, 1)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_clamped_gates_and_biases(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    num_tokens, hidden, inner, num_experts, top_k = shape
    torch.manual_seed(0)
    x = 4 * torch.randn(num_tokens, hidden).to(device, dtype)  # so that gates are clamped
    gate_up = (torch.randn(num_experts, 2 * inner, hidden) / hidden**0.5).to(device, dtype)
    down = (torch.randn(num_experts, hidden, inner) / inner**0.5).to(device, dtype)
    biases = (
        torch.randn(num_experts, 2 * inner).to(device, dtype),
        torch.randn(num_experts, hidden).to(device, dtype),
    )
    logits = torch.randn(num_tokens, num_experts, device=device)
    ids, weights = reference.route(logits, Routing(top_k, Scoring.SOFTMAX_OF_CHOSEN))
    options: Any = {"biases": biases, "activation": reference.CLAMPED_SWIGLU}
    found = experts(x, ids, weights, gate_up, down, **options)
    assert_close(found, reference.experts(x, ids, weights, gate_up, down, **options))
    plain = reference.experts(x, ids, weights, gate_up, down)
    assert not torch.allclose(found, plain, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("has_base", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_experts(
    shape: tuple[int, ...], has_base: bool, dtype: torch.dtype, device: torch.device
) -> None:
    num_tokens, hidden, inner, num_experts, top_k = shape
    torch.manual_seed(0)
    x = torch.randn(num_tokens, hidden).to(device, dtype)
    gate_up = (torch.randn(num_experts, 2 * inner, hidden) / hidden**0.5).to(device, dtype)
    down = (torch.randn(num_experts, hidden, inner) / inner**0.5).to(device, dtype)
    ids, weights = reference.route(
        torch.randn(num_tokens, num_experts, device=device), Routing(top_k)
    )
    base = torch.randn_like(x) if has_base else None
    gate = torch.randn(num_tokens, 1, device=device) if has_base else None
    found = experts(x, ids, weights, gate_up, down, base, gate)
    assert_close(found, reference.experts(x, ids, weights, gate_up, down, base, gate))
    if has_base:
        found = experts(x, ids, weights, gate_up, down, base)
        assert_close(found, reference.experts(x, ids, weights, gate_up, down, base))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_experts_without_gates(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    num_tokens, hidden, inner, num_experts, top_k = shape
    torch.manual_seed(0)
    x = torch.randn(num_tokens, hidden).to(device, dtype)
    up = (torch.randn(num_experts, inner, hidden) / hidden**0.5).to(device, dtype)
    down = (torch.randn(num_experts, hidden, inner) / inner**0.5).to(device, dtype)
    logits = torch.randn(num_tokens, num_experts, device=device)
    chosen = reference.route(logits, Routing(top_k))
    found = experts(x, *chosen, up, down, activation=reference.RELU2)
    assert_close(found, reference.experts(x, *chosen, up, down, activation=reference.RELU2))


def test_all_rows_of_one_expert_and_none(device: torch.device) -> None:
    torch.manual_seed(0)
    gate_up, down = torch.randn(3, 32, 16, device=device), torch.randn(3, 16, 16, device=device)
    for num_tokens in (2 * MANY_ROWS, FEW_ROWS + 1, 0):
        x = torch.randn(num_tokens, 16, device=device)
        ids = torch.full((num_tokens, 1), 2, device=device)
        weights = torch.rand(num_tokens, 1, device=device)
        found = experts(x, ids, weights, gate_up, down)
        assert_close(found, reference.experts(x, ids, weights, gate_up, down))


def test_a_rank_with_some_experts(device: torch.device) -> None:
    torch.manual_seed(0)
    gate_up, down = torch.randn(6, 32, 16, device=device), torch.randn(6, 16, 16, device=device)
    x, weights = torch.randn(9, 16, device=device), torch.rand(9, 2, device=device)
    ids = torch.rand(9, 6, device=device).argsort(dim=1)[:, :2]
    total = torch.zeros_like(x)
    for rank in range(4):  # ranks 2 and 3 have one expert
        share, loads = ExpertShare(rank, 4), torch.zeros(2, dtype=torch.int64, device=device)
        own = list(share.experts(6))
        part = experts(x, ids, weights, gate_up[own], down[own], share=share, loads=loads)
        plain = reference.experts(x, ids, weights, gate_up[own], down[own], share=share)
        assert_close(part, plain)
        counts = (ids.reshape(-1, 1) % 4 == torch.arange(4, device=device)).sum(0)
        assert loads.tolist() == [counts.max(), 18]
        total += part
    assert_close(total, experts(x, ids, weights, gate_up, down))


@pytest.mark.parametrize("tile_rows", [4, 16])
def test_every_row_is_in_one_tile_of_its_expert(tile_rows: int, device: torch.device) -> None:
    torch.manual_seed(0)
    for num_tokens, num_experts, top_k in [(1, 8, 8), (50, 3, 2), (9, 40, 4)]:
        ids = torch.rand(num_tokens, num_experts, device=device).argsort(dim=1)[:, :top_k]
        tiles, seen = RowTiles.of(ids, num_experts, tile_rows), []
        for expert, first in zip(tiles.weights.tolist(), tiles.first_places.tolist(), strict=True):
            if expert < num_experts:
                last = min(first + tile_rows, int(tiles.ends[expert]))
                rows = tiles.order[first:last]
                assert ids.flatten()[rows].tolist() == [expert] * len(rows) != []
                seen += rows.tolist()
        assert sorted(seen) == list(range(ids.numel()))
