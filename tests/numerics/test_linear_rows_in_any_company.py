"""Tests that a row's bits do not depend on the number of rows: ops in C, 1 to 70 rows at a time.

Refuses to know: attention (``test_rows_in_any_company.py``), how weights are packed.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from baton_kernels import dispatch, reference
from baton_kernels.packed import (
    FORMATS_OF_ROWS,
    CodeLayout,
    Float8Rows,
    PackedWeight,
    WeightFormat,
)
from tests.numerics.tolerances import assert_close

MOST_ROWS = 70
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

pytestmark = [
    pytest.mark.usefixtures("threads"),
    pytest.mark.skipif(dispatch.native_ops() is None, reason="no native kernels here"),
]


def check(op: Callable[[Tensor], Tensor], rows: Tensor) -> None:
    """Compare each row alone with itself among the first n, and among the last n."""
    alone = torch.stack([op(row[None].contiguous())[0] for row in rows])
    for num_rows in range(2, len(rows) + 1):
        assert torch.equal(op(rows[:num_rows]), alone[:num_rows]), f"the first {num_rows}"
        assert torch.equal(op(rows[-num_rows:]), alone[-num_rows:]), f"the last {num_rows}"


@pytest.mark.parametrize("format_", FORMATS_OF_ROWS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out_features", "in_features"), [(40, 96), (150, 700)])
def test_linear(
    format_: WeightFormat, dtype: torch.dtype, out_features: int, in_features: int
) -> None:
    native = dispatch.native_ops()
    assert native is not None
    rows = torch.randn(MOST_ROWS, in_features).to(dtype)
    width = native.panel_width
    weight = torch.randn(out_features, in_features)
    packed = PackedWeight.pack(weight, torch.randn(out_features), format_, width)
    check(lambda x: native.packed_linear(x, packed), rows)
    gated = PackedWeight.pack(weight[: out_features // width * width], None, format_, width)
    if len(weight) // width % 2 == 0:
        check(lambda x: native.packed_gated_linear(x, gated), rows)
        check(lambda x: native.packed_gated_linear(x, gated, "gelu_tanh"), rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out_features", "in_features", "group"), [(40, 96, 128), (150, 700, 256)])
def test_float8_with_scales_of_groups(
    dtype: torch.dtype, out_features: int, in_features: int, group: int
) -> None:
    native = dispatch.native_ops()
    assert native is not None
    torch.manual_seed(0)
    layout = CodeLayout(WeightFormat.FP8, group, torch.float32)
    sizes = (out_features, in_features, WeightFormat.FP8, native.panel_width)
    packed = PackedWeight.empty(*sizes, layout=layout)
    numbers = torch.randn(out_features, in_features).clamp(-4, 4).to(torch.float8_e4m3fn)
    numbers.view(-1)[:3].copy_(
        torch.tensor([2**-9, -7 * 2**-9, 448.0])
    )  # the smallest, the largest
    scales = torch.rand(out_features, -(-in_features // group)) + 0.1
    written = Float8Rows(numbers, scales, group)
    for piece in (slice(0, 7), slice(7, out_features)):  # as parts of a layer are
        rows = written.part(piece, None)
        assert rows is not None
        native.pack_float8(packed, piece.start, rows)
    assert torch.equal(packed.unpacked(), written.dequantized())
    again = PackedWeight.empty(*sizes, layout=layout)
    again.write_float8(0, written)
    assert torch.equal(again.panels.view(torch.uint8), packed.panels.view(torch.uint8))
    rows = (torch.randn(MOST_ROWS, in_features) / in_features**0.5).to(dtype)
    found, expected = native.packed_linear(rows, packed), reference.packed_linear(rows, packed)
    assert_close(found, expected)
    check(lambda x: native.packed_linear(x, packed), rows)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_and_the_gated_middle(dtype: torch.dtype) -> None:
    native = dispatch.native_ops()
    assert native is not None
    rows, weight = torch.randn(MOST_ROWS, 152).to(dtype), torch.rand(152).to(dtype)
    check(lambda x: native.rms_norm(x, weight, 1e-6), rows)
    check(native.silu_mul, rows)
    check(lambda x: native.add_rms_norm(x, x * 2, weight, 1e-6)[0], rows)
    check(lambda x: native.add_rms_norm(x, x * 2, weight.float(), 1e-6, 0.22)[0], rows)
    check(lambda x: native.scaled_add(x, x * 2, 0.22), rows)
    check(lambda x: native.gated_mul(x, "gelu_tanh"), rows)
    check(lambda x: native.gated_mul(x, "gelu"), rows)
    check(lambda x: native.soft_cap(x, 3.0), rows)


@pytest.mark.parametrize("format_", [WeightFormat.BF16, WeightFormat.INT8, WeightFormat.INT4])
@pytest.mark.parametrize("in_features", [1024, 2700])
def test_more_rows_than_are_packed_at_a_time(format_: WeightFormat, in_features: int) -> None:
    """Outputs of more than a MiB, too, which are written past the cache."""
    native = dispatch.native_ops()
    assert native is not None
    rows = torch.randn(1100, in_features).to(torch.bfloat16)
    weight = torch.randn(1024, in_features)
    packed = PackedWeight.pack(weight, None, format_, native.panel_width)
    some = [*range(0, 1100, 97), 351, 352, 1098, 1099]
    for op in (native.packed_linear, native.packed_gated_linear):
        together = op(rows, packed)
        for row in some:
            assert torch.equal(op(rows[row : row + 1], packed)[0], together[row]), row
        assert torch.equal(op(rows[700:], packed), together[700:])
