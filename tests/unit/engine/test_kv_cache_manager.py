"""Unit tests of KVCacheManager: blocks for tokens, all or nothing, tail first."""

from __future__ import annotations

import pytest

from baton.kv.block_hash import BlockHasher
from engine.core.kv_cache_manager import KVCacheManager
from tests.fakes.engine.engine_parts import make_request


@pytest.mark.parametrize(("num_tokens", "expected"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_blocks_for_tokens_round_up(num_tokens: int, expected: int) -> None:
    assert KVCacheManager(4, 4).num_blocks_for(num_tokens) == expected


def test_allocate_adds_only_what_is_missing_and_says_what_it_added() -> None:
    manager = KVCacheManager(4, 4)
    request = make_request("a")
    first = manager.allocate(request, 5)
    assert first is not None
    assert len(first) == 2
    assert manager.allocate(request, 8) == []
    more = manager.allocate(request, 9)
    assert more is not None
    assert request.block_ids == first + more


def test_allocate_never_takes_blocks_back() -> None:
    manager = KVCacheManager(4, 4)
    request = make_request("a")
    manager.allocate(request, 12)
    assert manager.allocate(request, 1) == []
    assert len(request.block_ids) == 3


def test_a_request_that_does_not_fit_gets_nothing_at_all() -> None:
    manager = KVCacheManager(4, 4)
    one, other = make_request("a"), make_request("b")
    manager.allocate(one, 12)
    assert manager.allocate(other, 5) is None
    assert other.block_ids == []
    assert manager.block_pool.num_free == 1


def test_free_gives_the_tail_of_what_is_cached_back_first() -> None:
    manager = KVCacheManager(3, 4, hasher=BlockHasher(4))
    request = make_request("a", 12)
    held = list(manager.allocate(request, 12) or [])
    request.num_computed_tokens = 12
    manager.cache_blocks(request)
    manager.free(request)
    assert request.block_ids == []
    assert manager.block_pool.allocate(3) == held[::-1]


def test_freeing_twice_is_harmless_since_the_request_holds_nothing_then() -> None:
    manager = KVCacheManager(3, 4)
    request = make_request("a")
    manager.allocate(request, 12)
    manager.free(request)
    manager.free(request)
    assert manager.block_pool.num_free == 3
