"""Tests of memory in huge pages: tensors follow each other and never overlap."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from baton_kernels.huge_pages import WeightMemory, huge_pages

MEBIBYTE = 2**20
HUGE_PAGE = 2**21


def span(tensor: Tensor) -> tuple[int, int]:
    begin = tensor.data_ptr()
    return begin, begin + tensor.numel() * tensor.itemsize


def test_tensors_lie_one_behind_another_and_keep_what_they_hold() -> None:
    memory = WeightMemory()
    shapes = [(3, 5, 7), (1,), (64, 64), (2, 1000)]
    dtypes = [torch.float32, torch.uint8, torch.bfloat16, torch.int8]

    tensors = [memory.empty(*s, dtype=d) for s, d in zip(shapes, dtypes, strict=True)]
    for value, tensor in enumerate(tensors):
        tensor.fill_(value)

    assert [(tuple(t.shape), t.dtype) for t in tensors] == list(zip(shapes, dtypes, strict=True))
    assert all(bool((tensor == value).all()) for value, tensor in enumerate(tensors))
    spans = [span(tensor) for tensor in tensors]
    assert all(begin % 64 == 0 for begin, _ in spans)
    assert all(0 <= b - a < 64 for (_, a), (b, _) in pairwise(spans))


def test_one_that_finds_no_room_begins_on_a_huge_page() -> None:
    memory = WeightMemory()
    first = memory.empty(50 * MEBIBYTE, dtype=torch.uint8)
    second = memory.empty(50 * MEBIBYTE, dtype=torch.uint8)
    larger = memory.empty(100 * MEBIBYTE, dtype=torch.uint8)

    assert [t.data_ptr() % HUGE_PAGE for t in (first, second, larger)] == [0, 0, 0]


@pytest.mark.parametrize("shape", [(0,), (4, 0, 16)])
def test_one_of_nothing_takes_nothing(shape: tuple[int, ...]) -> None:
    assert tuple(WeightMemory().empty(*shape).shape) == shape


def test_it_is_free_when_its_tensors_are() -> None:
    """Nothing else is left that keeps it: models come and go in one process."""
    status = Path("/proc/self/statm")
    if not status.exists():
        pytest.skip("needs procfs")

    def resident() -> int:
        return int(status.read_text(encoding="ascii").split()[1]) * 4096

    def make_and_drop() -> None:
        memory = WeightMemory()
        for _ in range(4):
            memory.empty(16 * MEBIBYTE, dtype=torch.uint8).fill_(1)

    make_and_drop()
    before = resident()
    for _ in range(5):
        make_and_drop()

    assert resident() - before < 64 * MEBIBYTE


def test_bytes_are_zero_and_as_many_as_wanted() -> None:
    memory = huge_pages(3 * MEBIBYTE + 5)

    assert len(memory) == 3 * MEBIBYTE + 5
    assert not memory.any()


def test_more_than_there_can_be_is_an_error() -> None:
    with pytest.raises((OSError, OverflowError)):
        huge_pages(2**62)
