"""The Triton norms and SwiGLU against their definitions, on odd shapes."""

from __future__ import annotations

import pytest
import torch

from baton_kernels import reference
from baton_kernels.triton.norm import add_rms_norm, rms_norm
from baton_kernels.triton.silu_mul import gate_mul, gated_mul, silu_mul
from tests.kernels.poison import poisoned_memory as poisoned_memory
from tests.kernels.poison import strided
from tests.numerics.tolerances import assert_close

SHAPES = [(1, 1), (3, 64), (5, 100), (2, 3, 24), (37, 7), (2, 2500), (0, 8)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    x, weight = torch.randn(shape).to(device, dtype), torch.randn(shape[-1]).to(device, dtype)
    assert_close(rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_add_rms_norm_and_its_sum(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    x, residual = (torch.randn(shape).to(device, dtype) for _ in range(2))
    weight, before = torch.randn(shape[-1]).to(device, dtype), residual.clone()
    normed, total = add_rms_norm(x, residual, weight, 1e-5)
    expected, expected_total = reference.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, before)
    assert torch.equal(total, expected_total)
    assert_close(normed, expected)


@pytest.mark.parametrize("factor", [1.0, 0.22])
def test_wide_weights_and_a_factor(factor: float, dtype: torch.dtype, device: torch.device) -> None:
    x, residual = (torch.randn(5, 100).to(device, dtype) for _ in range(2))
    weight = 1 + torch.randn(100, device=device) / 100
    for ours, meant in zip(
        add_rms_norm(x, residual, weight, 1e-5, factor),
        reference.add_rms_norm(x, residual, weight, 1e-5, factor),
        strict=True,
    ):
        assert ours.dtype == dtype
        assert_close(ours, meant)
    assert_close(rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))


def test_norms_of_rows_that_do_not_lie_side_by_side(device: torch.device) -> None:
    x, residual = (strided(torch.randn(4, 50).to(device)) for _ in range(2))
    weight = torch.randn(50, device=device)
    assert_close(rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))
    for ours, meant in zip(
        add_rms_norm(x, residual, weight, 1e-6),
        reference.add_rms_norm(x, residual, weight, 1e-6),
        strict=True,
    ):
        assert_close(ours, meant)
    columns = torch.randn(6, 9, device=device).T  # neighbours of a row are apart as well
    weight = torch.randn(6, device=device)
    assert_close(rms_norm(columns, weight, 1e-6), reference.rms_norm(columns, weight, 1e-6))


def test_the_norm_of_zeros_is_zero(device: torch.device) -> None:
    zeros, weight = torch.zeros(2, 16, device=device), torch.ones(16, device=device)
    assert torch.equal(rms_norm(zeros, weight, 1e-6), zeros)


@pytest.mark.parametrize("shape", [(1, 2), (3, 64), (2, 3, 14), (2, 4200), (0, 8)], ids=str)
def test_silu_mul(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    gate_up = (torch.randn(shape) * 5).to(device, dtype)
    assert_close(silu_mul(gate_up), reference.silu_mul(gate_up))
    if len(shape) == 2:
        assert_close(silu_mul(strided(gate_up)), reference.silu_mul(gate_up))


@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
def test_gated_mul(activation: str, dtype: torch.dtype, device: torch.device) -> None:
    gate_up = (torch.randn(3, 70) * 5).to(device, dtype)
    assert_close(gated_mul(gate_up, activation), reference.gated_mul(gate_up, activation))


@pytest.mark.parametrize("activation", ["sigmoid", "relu"])
def test_gate_mul(activation: str, dtype: torch.dtype, device: torch.device) -> None:
    gate, x = ((torch.randn(3, 77) * 5).to(device, dtype)[:, :70] for _ in range(2))
    for one, other in ((gate, x), (x, x)):
        assert_close(gate_mul(one, other, activation), reference.gate_mul(one, other, activation))


def test_silu_mul_of_large_gates_is_finite(device: torch.device) -> None:
    gate_up = torch.tensor([[-3e38, -200.0, 0.0, 200.0, 3e38, 1.0, 1.0, 1.0, 1.0, 1.0]]).to(device)
    expected = torch.tensor([[0.0, 0.0, 0.0, 200.0, 3e38]]).to(device)
    torch.testing.assert_close(silu_mul(gate_up).abs(), expected)
