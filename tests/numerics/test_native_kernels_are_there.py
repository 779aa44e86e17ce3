"""Where there is a compiler there are native kernels: tests that skip without them did not."""

from __future__ import annotations

import shutil

import pytest

from baton_kernels import dispatch


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here")
def test_native_kernels_are_there() -> None:
    assert dispatch.native_ops() is not None
