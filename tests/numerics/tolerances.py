"""The largest allowed errors of kernels against their definitions, in one table.

Both compute in float32 and round to the dtype, at places that can differ by one: a few units in
the last place, and as an absolute error where terms cancel. Refuses to know: kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Tolerance as in ``torch.testing.assert_close``: ``abs(a - b) <= atol + rtol * abs(b)``."""

    rtol: float
    atol: float


TOLERANCES = {
    torch.float32: Tolerance(rtol=1e-5, atol=1e-5),
    torch.float16: Tolerance(rtol=2e-3, atol=2e-3),
    torch.bfloat16: Tolerance(rtol=1.6e-2, atol=1.6e-2),
}


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Assert that values have the same dtype, and are equal within its tolerance."""
    tolerance = TOLERANCES[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance.rtol, atol=tolerance.atol)
