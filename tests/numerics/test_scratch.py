"""Tests of the kernels' scratch memory: a thread that ends frees it, as does its team."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from baton_kernels import PackedWeight, WeightFormat, dispatch

NUM_THREADS = 24
MEBIBYTE = 2**20

pytestmark = pytest.mark.skipif(dispatch.native_ops() is None, reason="no native kernels here")


def resident_bytes() -> int:
    """Return the process's resident memory in bytes; Linux only."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096
    except OSError:
        pytest.skip("needs procfs")


def test_threads_that_end_leave_no_memory() -> None:
    native = dispatch.native_ops()
    assert native is not None
    rows = torch.randn(2 * native.panel_width, 1024)
    weight = PackedWeight.pack(rows, None, WeightFormat.FP32, native.panel_width)
    x = torch.randn(512, 1024)  # takes more than a MiB of scratch

    def compute() -> None:
        native.packed_linear(x, weight)

    def in_threads(count: int) -> None:
        for _ in range(count):
            thread = threading.Thread(target=compute)
            thread.start()
            thread.join()

    in_threads(4)
    before = resident_bytes()
    in_threads(NUM_THREADS)

    assert resident_bytes() - before < NUM_THREADS * MEBIBYTE // 2
