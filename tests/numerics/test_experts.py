"""Tests that routing and experts in C compute what the reference does, in any batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import baton_kernels as ops
from baton_kernels import (
    FORMATS_OF_ROWS,
    CodeLayout,
    ExpertShare,
    PackedWeight,
    Routing,
    Scoring,
    WeightFormat,
    reference,
)
from baton_kernels.dispatch import native_ops
from baton_kernels.native.ops import NativeOps
from tests.covering import covering
from tests.numerics.test_native_ops import draw_integers

ROUTINGS = {
    "softmax": Routing(3),
    "normalized": Routing(3, normalize=True, scale=2.5),
    "sigmoid": Routing(3, Scoring.SIGMOID, normalize=True),
    "of the chosen": Routing(2, Scoring.SOFTMAX_OF_CHOSEN),
    "groups by their best": Routing(3, num_groups=4, top_groups=2),
    "groups by their best two": Routing(
        4, Scoring.SIGMOID, num_groups=4, top_groups=2, group_best=2
    ),
}
NUM_EXPERTS = 12
# Tokens, hidden size, size of an expert, experts, those of a token.
SHAPES = [
    *((1, 64, 32, 4, 2), (7, 64, 96, 8, 3), (150, 64, 32, 5, 5), (33, 128, 64, 16, 1)),
    # Sizes that are no multiple of a panel's width.
    *((9, 20, 12, 4, 2), (40, 61, 45, 6, 3), (5, 100, 7, 1, 1)),
]
LAYOUTS = (
    CodeLayout(WeightFormat.INT4, 32, torch.bfloat16, is_e2m1=True),
    CodeLayout(WeightFormat.INT6, 16, torch.float16),
)


@pytest.fixture
def native() -> NativeOps:
    found = native_ops()
    if found is None:
        pytest.skip("no native kernels here")
    return found


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_tokens_choose_what_the_reference_chooses(
    native: NativeOps, name: str, dtype: torch.dtype, has_bias: bool
) -> None:
    torch.manual_seed(3)
    logits = torch.randn(300, NUM_EXPERTS).to(dtype)  # with equal ones in 16 bits
    bias, scales = torch.rand(2, NUM_EXPERTS) if has_bias else (None, None)
    ids, weights = native.route(logits, ROUTINGS[name], bias, scales)
    expected_ids, expected_weights = reference.route(logits, ROUTINGS[name], bias, scales)
    # Exponentials differ by a bit: two scores of nearly one size may change places.
    certain = (ids == expected_ids).all(dim=1)
    assert float(certain.float().mean()) > 0.98
    torch.testing.assert_close(weights[certain], expected_weights[certain], rtol=1e-5, atol=1e-6)
    assert ids.dtype == torch.int64


def test_equal_scores_go_to_the_first() -> None:
    for logits in (torch.zeros(2, 6), torch.tensor([[0.0, 2, 1, 2, 1, 0]])):
        ids, _ = ops.route(logits, Routing(3))
        assert ids.tolist() == ([[0, 1, 2]] * 2 if len(logits) == 2 else [[1, 3, 2]])


def packed(
    num_parts: int,
    size: int,
    num_columns: int,
    format_: WeightFormat,
    width: int,
    *,
    has_bias: bool = False,
) -> PackedWeight:
    """Draw parts of ``size`` rows, each filled up with zeros to whole panels."""
    weight = torch.randn(num_parts, size, num_columns) / num_columns**0.5
    filled = functional.pad(weight, (0, 0, 0, -size % width)).flatten(0, 1)
    bias = functional.pad(torch.randn(num_parts, size), (0, -size % width)).flatten()
    return PackedWeight.pack(filled, bias if has_bias else None, format_, width)


@pytest.mark.parametrize(
    ("dtype", "format_", "shape", "activation"),
    covering(
        [torch.float32, torch.bfloat16],
        FORMATS_OF_ROWS,
        SHAPES,
        ["silu", reference.CLAMPED_SWIGLU, reference.RELU2],
    ),
    ids=str,
)
def test_experts_in_c(
    native: NativeOps,
    shape: tuple[int, ...],
    format_: WeightFormat,
    dtype: torch.dtype,
    activation: str,
) -> None:
    """With biases where gates are clamped; some are, for inputs are large there."""
    torch.manual_seed(0)
    num_tokens, hidden, inner, num_experts, top_k = shape
    has_biases = activation == reference.CLAMPED_SWIGLU
    halves = 1 if activation == reference.RELU2 else 2
    x = (torch.randn(num_tokens, hidden) * (4 if has_biases else 1)).to(dtype)
    base, base_gate = torch.randn_like(x), torch.randn(num_tokens, 1)
    ids, weights = native.route(torch.randn(num_tokens, num_experts), Routing(top_k))
    width = native.panel_width
    gate_up = packed(halves * num_experts, inner, hidden, format_, width, has_bias=has_biases)
    down = packed(num_experts, hidden, inner, format_, width, has_bias=has_biases)

    def compute(rows: slice, *, shared: bool) -> Tensor:
        extra = (base[rows], base_gate[rows]) if shared else (None, None)
        chosen = (x[rows], ids[rows], weights[rows])
        return native.packed_experts(*chosen, gate_up, down, *extra, activation=activation)

    every = slice(None)
    for shared in (False, True):
        found = compute(every, shared=shared)
        extra = (base, base_gate) if shared else ()
        expected = reference.packed_experts(
            x, ids, weights, gate_up, down, *extra, activation=activation
        )
        # Where inputs are rounded to 8 bits, a sum's last bit may decide about a step.
        tolerance = 3e-2 if dtype == torch.bfloat16 else 2e-3 if format_.code_bits else 1e-5
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
        alone = [compute(slice(row, row + 1), shared=shared) for row in range(num_tokens)]
        assert torch.equal(found, torch.cat(alone))


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("num_tokens", [1, 7, 150])
def test_ranks_with_whole_experts(native: NativeOps, num_tokens: int, size: int) -> None:
    """The sum over the ranks is the mixture; with 8 ranks, some rows' ranks have one expert."""
    torch.manual_seed(0)
    hidden, inner, num_experts, top_k = 64, 32, 8, 3
    x, weights = torch.randn(num_tokens, hidden), torch.rand(num_tokens, top_k)
    ids = torch.rand(num_tokens, num_experts).argsort(1)[:, :top_k].contiguous()
    gate_up = torch.randn(num_experts, 2 * inner, hidden) / 8
    down = torch.randn(num_experts, hidden, inner) / 6
    expected = reference.experts(x, ids, weights, gate_up, down)
    counts = torch.stack([(ids % size == rank).sum() for rank in range(size)])
    total = torch.zeros_like(x)
    for rank in range(size):
        share = ExpertShare(rank, size)
        own = list(share.experts(num_experts))
        first, second = (
            PackedWeight.pack(one[own].flatten(0, 1), None, WeightFormat.FP32, native.panel_width)
            for one in (gate_up, down)
        )
        loads = torch.zeros(2, dtype=torch.int64)
        part = native.packed_experts(x, ids, weights, first, second, share=share, loads=loads)
        assert loads.tolist() == [counts.max(), num_tokens * top_k]
        plain = (x, ids, weights, gate_up[own], down[own])
        found = reference.experts(*plain, share=share, loads=loads)
        assert loads.tolist() == [2 * counts.max(), 2 * num_tokens * top_k]
        torch.testing.assert_close(part, found, rtol=1e-5, atol=1e-5)
        total += part
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-5)


def test_experts_that_are_no_whole_panels_mean_what_plain_ones_mean(native: NativeOps) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 20)
    ids, weights = native.route(torch.randn(5, 4), Routing(2))
    gate_up = packed(2 * 4, 12, 20, WeightFormat.FP32, native.panel_width)
    down = packed(4, 20, 12, WeightFormat.FP32, native.panel_width)
    found = native.packed_experts(x, ids, weights, gate_up, down)
    gates_and_ups = gate_up.unpacked().view(8, -1, 20)[:, :12].reshape(4, 24, 20)
    downs = down.unpacked().view(4, -1, 12)[:, :20]
    torch.testing.assert_close(found, reference.experts(x, ids, weights, gates_and_ups, downs))


@pytest.mark.parametrize("num_tokens", [1, 7, 150])
@pytest.mark.parametrize("layout", LAYOUTS, ids=["e2m1", "int6"])
def test_experts_of_a_checkpoints_codes(
    native: NativeOps, layout: CodeLayout, num_tokens: int
) -> None:
    torch.manual_seed(0)
    hidden, inner, num_experts = 64, 96, 8
    bits = layout.format.code_bits
    assert bits is not None

    def draw(shape: tuple[int, int]) -> PackedWeight:
        weight = PackedWeight.empty(*shape, layout.format, native.panel_width, layout=layout)
        native.pack_integers(weight, 0, draw_integers(bits, shape, layout))
        return replace(weight, bias=torch.randn(shape[0]))

    gate_up = draw((2 * num_experts * inner, hidden))
    down = draw((num_experts * hidden, inner))
    x = torch.randn(num_tokens, hidden)
    routing = Routing(4, Scoring.SOFTMAX_OF_CHOSEN)
    ids, weights = native.route(torch.randn(num_tokens, num_experts), routing)
    kind = reference.CLAMPED_SWIGLU

    def compute(rows: slice) -> Tensor:
        chosen = (x[rows], ids[rows], weights[rows])
        return native.packed_experts(*chosen, gate_up, down, activation=kind)

    found = compute(slice(None))
    expected = reference.packed_experts(x, ids, weights, gate_up, down, activation=kind)
    # Where inputs are rounded to 8 bits, a sum's last bit may decide about a step.
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
    alone = [compute(slice(row, row + 1)) for row in range(num_tokens)]
    assert torch.equal(found, torch.cat(alone))
