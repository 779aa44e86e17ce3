"""Tests that freed memory stays in the process and is used again without new pages."""

from __future__ import annotations

import resource
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.worker.host.allocator import keep_freed_memory

MEBIBYTE = 2**20


def faults_of(call: Callable[[], object]) -> int:
    """Return the number of new pages that a call got."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    call()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def write_and_free(num_bytes: int) -> None:
    """A layer's activations, many times: none is there before the one before is gone."""
    for _ in range(20):
        torch.zeros(num_bytes, dtype=torch.uint8)


@pytest.fixture(autouse=True)
def _kept() -> None:
    if not keep_freed_memory():
        pytest.skip("another C library than glibc")


@pytest.mark.parametrize("size", [1, 24, 96])
def test_memory_that_was_freed_is_not_cleared_again(size: int) -> None:
    write_and_free(size * MEBIBYTE)

    new_pages = faults_of(lambda: write_and_free(size * MEBIBYTE))

    assert new_pages < size * MEBIBYTE // 4096 // 4, "of one time of twenty"


def test_a_thread_that_steps_has_it_too() -> None:
    found: list[int] = []

    def steps() -> None:
        write_and_free(24 * MEBIBYTE)
        found.append(faults_of(lambda: write_and_free(24 * MEBIBYTE)))

    thread = threading.Thread(target=steps)
    thread.start()
    thread.join()

    assert found[0] < 24 * MEBIBYTE // 4096 // 4


def test_the_end_of_the_heap_is_in_huge_pages() -> None:
    """The kernel need not grant huge pages; its flags show that they were asked for."""
    smaps = Path("/proc/self/smaps").read_text(encoding="ascii")

    areas = smaps.split("[heap]")[1:]
    flags = [next(x for x in area.splitlines() if x.startswith("VmFlags:")) for area in areas]

    assert any("hg" in words.split() for words in flags)


def test_calling_it_again_takes_no_more_memory() -> None:
    keep_freed_memory()

    new_pages = faults_of(keep_freed_memory)

    assert new_pages < 64
