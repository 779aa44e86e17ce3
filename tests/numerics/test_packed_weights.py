"""Weights that are packed for the kernels in C, and read again.

Refuses to know: what is multiplied with them.
"""

from __future__ import annotations

import itertools

import pytest
import torch

import baton_kernels as ops
from baton_kernels import WeightFormat, dispatch, reference
from baton_kernels.native.ops import NativeOps
from tests.numerics.packed import numbers_of

pytestmark = pytest.mark.skipif(dispatch.native_ops() is None, reason="no native kernels here")


@pytest.fixture
def native() -> NativeOps:
    found = dispatch.native_ops()
    assert found is not None
    torch.manual_seed(0)
    return found


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str
)
@pytest.mark.parametrize("storage", ops.FORMATS_OF_ROWS, ids=str)
@pytest.mark.parametrize(
    ("out_features", "in_features"), [(1, 1), (5, 3), (33, 300), (64, 64), (47, 130), (100, 65)]
)
def test_rows_are_packed_as_the_reference_packs_them(
    native: NativeOps,
    out_features: int,
    in_features: int,
    storage: WeightFormat,
    dtype: torch.dtype,
) -> None:
    """To the bit, and part by part; with zeros of both signs, ties, and very small numbers."""
    weight = torch.randn(out_features, in_features)
    weight[0] = -0.0
    if out_features > 4:
        weight[1], weight[2] = 0.0, weight[2] * 1e-6
        weight[3] = torch.randint(-3, 4, (in_features,))
    weight = weight.to(dtype)
    expected = ops.PackedWeight.pack(weight, None, storage, native.panel_width)
    found = ops.PackedWeight.empty(out_features, in_features, storage, native.panel_width)
    cuts = sorted({0, out_features // 3, out_features // 2, out_features})
    wide = torch.nn.functional.pad(weight, (0, 5))[:, :in_features]  # rows that do not touch
    for first, last in reversed(list(itertools.pairwise(cuts))):
        native.pack_rows(found, first, wide[first:last])
    for ours, theirs in zip(numbers_of(found), numbers_of(expected), strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert ours.shape == theirs.shape
            assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("storage", ops.FORMATS_OF_ROWS, ids=str)
def test_rows_are_unpacked(native: NativeOps, storage: WeightFormat) -> None:
    weight = torch.randn(37, 11).to(storage.element if storage.keeps_numbers else torch.float32)
    packed = ops.PackedWeight.pack(weight, None, storage, native.panel_width)
    ids = torch.tensor([[36, 0, 5], [5, 16, 15]])
    expected = weight[ids] if storage.keeps_numbers else packed.unpacked()[ids]
    assert torch.equal(native.unpack_rows(packed, ids), expected)
    assert torch.equal(reference.unpack_rows(packed, ids), expected)
    wide = native.unpack_rows(packed, ids, torch.float32)
    assert torch.equal(wide, expected.float())
    assert wide.dtype == torch.float32
    assert native.unpack_rows(packed, ids[:0]).shape == (0, 3, 11)
    with pytest.raises(IndexError):
        native.unpack_rows(packed, torch.tensor([37]))


def test_packing_and_unpacking() -> None:
    weight = torch.randn(37, 11)
    exact = ops.PackedWeight.pack(weight, None, WeightFormat.FP32, 16)
    assert torch.equal(exact.unpacked(), weight)
    small = ops.PackedWeight.pack(weight, None, WeightFormat.INT8, 16)
    half_a_step = weight.abs().amax(1, keepdim=True) / 127 / 2
    # And what the rounded scale cuts off.
    assert bool(((small.unpacked() - weight).abs() <= half_a_step * 1.5).all())
    zeros = ops.PackedWeight.pack(torch.zeros(3, 4), None, WeightFormat.INT8, 16)
    assert torch.equal(zeros.unpacked(), torch.zeros(3, 4))
