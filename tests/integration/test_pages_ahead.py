"""Tests that idle nodes populate the memory of KV blocks that no request has used yet."""

from __future__ import annotations

import psutil
import pytest
import torch

from baton.kv.layers import PagedKV
from engine.worker.host.pages_ahead import PagesAhead
from engine.worker.kv_cache import allocate_kv_cache, kv_cache_spec
from tests.fakes.processes.deployments import run_deployment
from tests.fakes.time.waiting import wait_until

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(200)]


def largest_resident(pid: int) -> int:
    """Bytes of memory that one mapping of a process has, the one with the most."""
    return max(one.rss for one in psutil.Process(pid).memory_maps(grouped=False))


def test_idle_nodes_find_memory_for_their_caches() -> None:
    spec = kv_cache_spec([PagedKV(4, 32)], 16, torch.float32)
    if not PagesAhead(allocate_kv_cache(spec, 1, torch.device("cpu"))).find(0):
        pytest.skip("a kernel without MADV_POPULATE_WRITE")
    with run_deployment("--kv-cache-memory", "300M", local_prefill=True) as running:
        for name in ("p0", "d0"):
            pid = running.child(name).process.pid
            wait_until(lambda pid=pid: largest_resident(pid) > 61 * 2**20)  # type: ignore[misc]
