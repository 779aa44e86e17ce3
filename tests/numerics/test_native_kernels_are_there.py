"""Tests that native kernels exist if there is a compiler, so that other tests did not skip."""

from __future__ import annotations

import shutil

import pytest

from baton_kernels import dispatch


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here")
def test_native_kernels_are_there() -> None:
    assert dispatch.native_ops() is not None
