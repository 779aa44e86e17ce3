"""Attention within runs of rows, as encoders of images compute it: C against its definition."""

from __future__ import annotations

import pytest
import torch

from baton_kernels import dispatch, reference
from tests.numerics.test_native_ops import TYPES, close

pytestmark = pytest.mark.skipif(dispatch.native_ops() is None, reason="no native kernels here")


@TYPES
@pytest.mark.parametrize("head_dim", [8, 72])
@pytest.mark.parametrize("runs", [[(1, 1)], [(2, 410)], [(7, 64), (2, 24), (1, 3)]])
def test_attend_runs(
    threads_as_before: None, runs: list[tuple[int, int]], head_dim: int, dtype: torch.dtype
) -> None:
    native = dispatch.native_ops()
    assert native is not None
    torch.manual_seed(0)
    torch.set_num_threads(2)
    num_rows = sum(count * length for count, length in runs)
    query, *keys_values = torch.randn(3, num_rows, 3, head_dim).to(dtype)
    joined = torch.stack((query, *keys_values), dim=1)[:, 1:]  # strided
    found, expected = (ops.attend_runs(query, joined, runs) for ops in (native, reference))
    close(found, expected)
