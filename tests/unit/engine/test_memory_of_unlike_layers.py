"""Tests of the blocks that a long sequence holds with windows, full attention and states."""

from __future__ import annotations

import pytest
import torch

from baton.kv.block_hash import BlockHasher
from baton.kv.layers import LayerKV, PagedKV, StateArray, StateKV
from baton.kv.manifest import KVKind
from engine.core.kv_cache_manager import KVCacheManager
from engine.worker.kv_cache import KVCacheSpec, kv_cache_spec
from tests.fakes.engine.engine_parts import make_request

WINDOW = 1024
NUM_TOKENS = 32_768
STATE = StateKV((StateArray((64, 3)), StateArray((8, 16, 32), "float32")))
LAYERS: list[LayerKV] = [STATE, STATE, PagedKV(2, 32, WINDOW), PagedKV(2, 32)] * 6


def make_manager(spec: KVCacheSpec, num_tokens: int) -> KVCacheManager:
    num_blocks = -(-num_tokens // spec.block_size) * spec.num_groups + spec.num_null_blocks + 8
    return KVCacheManager(
        num_blocks,
        spec.block_size,
        sliding_windows=spec.sliding_windows,
        hasher=BlockHasher(spec.block_size),
    )


def needed_bytes(spec: KVCacheSpec, num_tokens: int) -> float:
    """Return the bytes that layers must keep of this many tokens: windows, full layers, states."""
    needed = 0.0
    for group in spec.manifest.groups:
        layers = len(group.layers) * group.layer_bytes()
        if group.kind is KVKind.STATE:
            needed += layers
        else:
            kept = min(num_tokens, group.window or num_tokens)
            needed += layers * kept / spec.block_size
    return needed


@pytest.mark.parametrize("chunk", [512, 8192])
def test_a_long_sequence_holds_little_more_than_its_layers_need(chunk: int) -> None:
    spec = kv_cache_spec(LAYERS, 0, torch.bfloat16)
    assert {group.kind for group in spec.manifest.groups} == {
        KVKind.PAGED,
        KVKind.WINDOW,
        KVKind.STATE,
    }
    manager = make_manager(spec, NUM_TOKENS + 1)
    num_free = manager.block_pool.num_free
    request = make_request("r", NUM_TOKENS, 64, max_model_len=NUM_TOKENS + 64)
    assert manager.allocate_with_prefix(request) == 0
    for end in range(chunk, NUM_TOKENS + 1, chunk):
        request.num_computed_tokens = end
        manager.cache_blocks(request)
        manager.free_slid_out(request)
    held = (num_free - manager.block_pool.num_free) * spec.block_bytes
    assert held <= 1.1 * needed_bytes(spec, NUM_TOKENS)
    manager.block_pool.check()
    # No orphans: what is referenced is in the request's table or stands for what slid out.
    own = {block_id for block_id in request.block_ids if block_id}
    assert set(manager.block_pool.ref_counts()) == own | set(range(spec.num_null_blocks))
    manager.free(request)
    assert manager.block_pool.num_free == num_free
    manager.block_pool.check()


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 1024, 4000, 4096])
def test_of_a_prompt_one_block_of_states_travels_for_each_of_their_groups(num_tokens: int) -> None:
    spec = kv_cache_spec(LAYERS, 64, torch.bfloat16)
    manager = make_manager(spec, num_tokens)
    last = -(-num_tokens // spec.block_size) - 1
    places = manager.handoff_places(num_tokens)
    for index, group in enumerate(spec.manifest.groups):
        blocks = [place // spec.num_groups for place in places if place % spec.num_groups == index]
        first = max(num_tokens - WINDOW + 1, 0) // spec.block_size
        expected = {
            KVKind.PAGED: list(range(last + 1)),
            KVKind.WINDOW: list(range(first, last + 1)),
            KVKind.STATE: [last],
        }
        assert blocks == expected[group.kind]


def test_a_prefix_is_found_where_its_last_block_has_a_snapshot() -> None:
    spec = kv_cache_spec([StateKV((StateArray((64, 3)),)), PagedKV(2, 32)], 64, torch.bfloat16)
    manager = make_manager(spec, 64 * 8)
    prompt = list(range(64 * 4 + 5))
    first = make_request("first", prompt=prompt)
    assert manager.allocate_with_prefix(first) == 0
    first.num_computed_tokens = 64 * 3  # three blocks are full, in one step
    manager.cache_blocks(first)
    manager.free_slid_out(first)
    held = first.block_ids[1:6:2]  # of states
    assert held[:2] == [0, 0]
    assert held[2] != 0
    second = make_request("second", prompt=prompt)
    assert manager.allocate_with_prefix(second) == 64 * 3
    assert second.block_ids[1:6:2] == held
    assert second.block_ids[:6:2] == first.block_ids[:6:2]
    manager.free(first)
    manager.free(second)
    manager.block_pool.check()
