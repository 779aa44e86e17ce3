"""Unit tests of PagesAhead: it populates the wanted memory, and keeps the contents of blocks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from baton.kv.layers import PagedKV
from engine.worker.host import pages_ahead
from engine.worker.host.host_memory import HostMemory
from engine.worker.host.pages_ahead import STEP_BYTES, PagesAhead
from engine.worker.kv_cache import allocate_kv_cache, kv_cache_spec

NUM_BLOCKS = 4096  # of 16 KiB


@pytest.fixture
def cache() -> Tensor:
    spec = kv_cache_spec([PagedKV(4, 32)], 16, torch.float32)
    if not PagesAhead(allocate_kv_cache(spec, 1, torch.device("cpu"))).find(0):
        pytest.skip("a kernel without MADV_POPULATE_WRITE")
    return allocate_kv_cache(spec, NUM_BLOCKS, torch.device("cpu"))


def resident_bytes(tensor: Tensor) -> int:
    """Return the resident bytes of a tensor's pages, as the kernel counts them."""
    found = 0
    with Path("/proc/self/pagemap").open("rb") as file:
        file.seek(tensor.data_ptr() // 4096 * 8)
        for page in memoryview(file.read(tensor.nbytes // 4096 * 8)).cast("Q"):
            found += 4096 * (page >> 63)
    return found


def find_all(pages: PagesAhead, num_used: int) -> int:
    """Find pages until none is left; return the number of rounds."""
    count = 0
    while pages.find(num_used):
        count += 1
    return count


def test_so_much_ahead_of_what_is_used_has_memory(
    cache: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages_ahead, "AHEAD_BYTES", 8 * STEP_BYTES)
    cache[5] = 7.0
    pages = PagesAhead(cache)
    assert find_all(pages, 0) == 8
    assert resident_bytes(cache) == 8 * STEP_BYTES
    assert find_all(pages, 0) == 0
    assert find_all(pages, 300) == 3  # 4.7 MB on
    # blocks in use may wait for KV from a prefill node, so they get memory, too
    num_rounds = find_all(pages, 3000)
    assert 8 + 3 + num_rounds == 3000 * cache[0].nbytes // STEP_BYTES + 1 + 8
    assert resident_bytes(cache) == (8 + 3 + num_rounds) * STEP_BYTES
    assert (cache[5] == 7.0).all()
    assert not cache[6:].any()


def test_expected_blocks_have_memory_ahead(cache: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages_ahead, "AHEAD_BYTES", 2 * STEP_BYTES)
    per_step = STEP_BYTES // cache[0].nbytes
    pages = PagesAhead(cache)
    for _ in range(5):
        pages.find(0, 3 * per_step)
    assert resident_bytes(cache) == 5 * STEP_BYTES
    assert not pages.find(0, 3 * per_step)
    assert pages.find(per_step, 3 * per_step)
    left = HostMemory(total=2**40, available=8 * pages_ahead.SHARE * STEP_BYTES)
    monkeypatch.setattr(pages_ahead, "read_host_memory", lambda: left)
    pages = PagesAhead(cache)
    while pages.find(0, 20 * per_step):
        pass
    assert pages._next == 8 * STEP_BYTES, "expected blocks leave memory for others, too"


def test_it_leaves_most_of_what_the_machine_has_left(
    cache: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = HostMemory(total=2**40, available=3 * pages_ahead.SHARE * STEP_BYTES)
    monkeypatch.setattr(pages_ahead, "read_host_memory", lambda: left)
    assert find_all(PagesAhead(cache), 0) == 3


def test_it_ends_with_the_cache(cache: Tensor) -> None:
    pages = PagesAhead(cache)
    assert find_all(pages, 0) == cache.nbytes // STEP_BYTES
    assert resident_bytes(cache) == cache.nbytes
    assert not pages.find(NUM_BLOCKS)


def test_a_kernel_that_cannot_is_asked_once(
    cache: Tensor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pages_ahead, "_POPULATE_WRITE", 12345)
    pages = PagesAhead(cache)
    with caplog.at_level("INFO"):
        assert not pages.find(0)
        assert not pages.find(0)
    assert len(caplog.records) == 1
