"""Runs Triton kernels where there is no GPU: Triton's interpreter executes them on CPU tensors.

Triton asks for the interpreter once, when it is imported, so this must come before any import of
it. With a GPU the same tests run compiled. bfloat16 is wrong in the interpreter (Triton 3.6 to
3.9), so the ``dtype`` fixture gives it only on a GPU.
"""

from __future__ import annotations

import os
import sys

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
_IMPORTED_TOO_EARLY = DEVICE.type == "cpu" and (
    "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1"
)
if DEVICE.type == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def interpreter() -> None:
    """Skip what would need a GPU after all."""
    if _IMPORTED_TOO_EARLY:
        pytest.skip("triton was imported before tests/kernels could ask for its interpreter")


@pytest.fixture
def device() -> torch.device:
    """Where the tensors of a kernel test live."""
    return DEVICE


@pytest.fixture(
    params=[
        torch.float32,
        torch.float16,
        pytest.param(torch.bfloat16, marks=pytest.mark.gpu),
    ],
    ids=str,
)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """The dtypes that can be tested here."""
    if request.param is torch.bfloat16 and DEVICE.type == "cpu":
        pytest.skip("the interpreter computes bfloat16 wrongly")
    found: torch.dtype = request.param
    return found
