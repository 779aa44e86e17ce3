"""Runs Triton kernels where there is no GPU: Triton's interpreter executes them on CPU tensors.

Triton asks for the interpreter once, when it is imported, so this must come before any import of
it. With a GPU the same tests run compiled. bfloat16 is wrong in the interpreter (Triton 3.6 to
3.9), so the ``dtype`` fixture gives it only on a GPU.
"""

from __future__ import annotations

import os
import sys
import warnings
from importlib.metadata import PackageNotFoundError, version

import numpy as np
import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
_IMPORTED_TOO_EARLY = DEVICE.type == "cpu" and (
    "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1"
)
if DEVICE.type == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"


def reason_against_interpreter(triton_version: str) -> str | None:
    """Why the interpreter of a release fails with the NumPy that is here; None: it does not.

    Triton 3.6 takes an array of one element for a number, which NumPy 2.4 does not any more.
    """
    if tuple(map(int, triton_version.split(".")[:2])) >= (3, 7):
        return None
    try:
        with warnings.catch_warnings():  # older ones announce it
            warnings.simplefilter("ignore")
            int(np.zeros(1))
    except TypeError:
        return f"the interpreter of Triton {triton_version} needs numpy<2.4, got {np.__version__}"
    return None


def _installed_triton() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        return "3.7"


_CLASH = reason_against_interpreter(_installed_triton()) if DEVICE.type == "cpu" else None


@pytest.fixture(autouse=True)
def interpreter() -> None:
    """Skip tests that need a GPU, or another interpreter."""
    if _CLASH is not None:
        pytest.skip(_CLASH)
    if _IMPORTED_TOO_EARLY:
        pytest.skip("triton was imported before tests/kernels could ask for its interpreter")


@pytest.fixture
def device() -> torch.device:
    """Device of a kernel test's tensors."""
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
