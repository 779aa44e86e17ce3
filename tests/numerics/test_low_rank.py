"""Adapters' products in C against their definition; a row's bits depend on no other row.

Refuses to know: models, files of adapters.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from baton_kernels import LowRank, LowRankSpan, dispatch, reference
from baton_kernels.native.ops import NativeOps
from tests.covering import covering
from tests.numerics.low_rank import draw_low_rank
from tests.numerics.tolerances import assert_close

pytestmark = pytest.mark.skipif(dispatch.native_ops() is None, reason="no native kernels here")

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
QKV = (slice(0, 96), slice(96, 128), slice(128, 160))  # whole panels on every CPU
# Rows [first, end) of an adapter, by its place among three.
PIECES = (
    (0, 1, 0),
    (39, 40, 0),
    (40, 41, 1),
    (41, 42, 2),
    (299, 300, 2),
    (41, 56, 2),
    (100, 300, 2),
)
UNEVEN = (slice(3, 40), slice(40, 77))  # panels that end within a part


@pytest.fixture(autouse=True)
def seeded(threads_as_before: None) -> None:
    torch.manual_seed(0)


@pytest.fixture
def native() -> NativeOps:
    found = dispatch.native_ops()
    assert found is not None
    return found


def spans_of(ends: list[int], drawn: list[LowRank]) -> list[LowRankSpan]:
    """Give each adapter the rows between two neighbouring ends."""
    return [
        LowRankSpan(first, end, one)
        for (first, end), one in zip(pairwise(ends), drawn, strict=True)
    ]


def added(native: NativeOps, out: Tensor, x: Tensor, spans: list[LowRankSpan]) -> Tensor:
    """Return a sum of the native op after comparing it with the definition's."""
    found, expected = out.clone(), out.clone()
    native.add_low_rank(found, x, spans)
    reference.add_low_rank(expected, x, spans)
    assert_close(found, expected)
    return found


@pytest.mark.parametrize(
    ("ends", "num_threads", "dtype"),
    covering(
        [[0, 1], [2, 4, 4, 5, 8], [0, 30, 31, 200], [0, 700]],
        [1, 2, 3],
        [torch.float32, torch.bfloat16, torch.float16],
    ),
    ids=str,
)
def test_products_of_several_adapters(
    native: NativeOps, ends: list[int], num_threads: int, dtype: torch.dtype
) -> None:
    torch.set_num_threads(num_threads)
    x, out = torch.randn(ends[-1] + 2, 70).to(dtype), torch.randn(ends[-1] + 2, 160).to(dtype)
    drawn = [
        draw_low_rank(70, QKV, (rank, 8, 3), dtype, native.panel_width, has_gains=rank % 2 == 0)
        for rank in range(7, 6 + len(ends))
    ]
    found = added(native, out, x, spans_of(ends, drawn))
    assert torch.equal(found[: ends[0]], out[: ends[0]]), "rows of the base model"
    assert torch.equal(found[ends[-1] :], out[ends[-1] :]), "rows of the base model"


@DTYPES
def test_every_rank_with_columns_that_no_module_changes(
    native: NativeOps, dtype: torch.dtype
) -> None:
    x, out = torch.randn(5, 33).to(dtype), torch.randn(5, 80).to(dtype)
    for rank in range(1, 257):
        ranks = (rank, 257 - rank)
        one = draw_low_rank(33, UNEVEN, ranks, dtype, native.panel_width, has_gains=rank % 3 == 0)
        found = added(native, out, x, spans_of([1, 4], [one]))
        assert torch.equal(found[:, :3], out[:, :3])
        assert torch.equal(found[:, 77:], out[:, 77:])


@DTYPES
@pytest.mark.parametrize("columns", [QKV, UNEVEN], ids=["whole panels", "parts of panels"])
def test_rows_have_the_same_bits_alone_in_company_and_on_other_threads(
    native: NativeOps, columns: tuple[slice, ...], dtype: torch.dtype
) -> None:
    x, out = torch.randn(300, 200).to(dtype), torch.randn(300, 160).to(dtype)
    drawn = [
        draw_low_rank(
            200, columns, ranks[: len(columns)], dtype, native.panel_width, has_gains=gains
        )
        for ranks, gains in (((8, 1, 9), False), ((64, 16, 4), True), ((31, 256, 5), False))
    ]
    ends = [0, 40, 41, 300]
    torch.set_num_threads(1)
    together = added(native, out, x, spans_of(ends, drawn))
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        for first, end, which in PIECES:
            one = drawn[which]
            found = out[first:end].clone()
            native.add_low_rank(found, x[first:end], [LowRankSpan(0, end - first, one)])
            assert torch.equal(found, together[first:end]), (num_threads, first, end)
        again = out.clone()
        native.add_low_rank(again, x, spans_of(ends, drawn))
        assert torch.equal(again, together)


def test_inputs_and_outputs_may_be_columns_of_wider_tensors(native: NativeOps) -> None:
    x, out = torch.randn(6, 100)[:, 20:90], torch.randn(6, 200)[:, 8:168]
    spans = spans_of([0, 6], [draw_low_rank(70, QKV, (4, 4, 4), out.dtype, native.panel_width)])
    around = out.clone()
    native.add_low_rank(out, x, spans)
    reference.add_low_rank(around, x, spans)
    assert_close(out, around)


def test_nothing_is_computed_without_adapters(native: NativeOps) -> None:
    x, out = torch.randn(2, 3, 8)
    before = out.clone()
    native.add_low_rank(out, x, [])
    one = draw_low_rank(8, (slice(0, 8),), (2,), out.dtype, native.panel_width)
    native.add_low_rank(out, x, [LowRankSpan(1, 1, one)])
    assert torch.equal(out, before)


def test_a_tape_repeats_the_products_for_other_numbers(native: NativeOps) -> None:
    x, out = torch.randn(4, 70), torch.zeros(4, 160)
    spans = spans_of([0, 1, 4], [
        draw_low_rank(70, QKV, ranks, out.dtype, native.panel_width, has_gains=True)
        for ranks in ((8, 8, 8), (64, 1, 2))
    ])  # fmt: skip

    def compute() -> Tensor:
        native.add_low_rank(out, x, spans)
        return out

    tape, _ = native.record(compute)
    x.copy_(torch.randn(4, 70))
    expected = out.clone()
    reference.add_low_rank(expected, x, spans)
    tape.run()
    assert_close(out, expected)
