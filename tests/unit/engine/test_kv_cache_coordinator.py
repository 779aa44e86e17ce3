"""Unit tests of KVCacheCoordinator and of KVCacheManager over several groups."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.kv.block_hash import BlockHasher
from engine.core.block_pool import BlockPool, BlocksRemoved, BlocksStored
from engine.core.kv_cache_coordinator import KVCacheCoordinator
from engine.core.kv_cache_manager import KVCacheManager
from tests.fakes.engine.engine_parts import ContentRunner, make_request, make_scheduler, step

NUM_LOGICAL = 6
HASHES = [bytes([index]) * 16 for index in range(NUM_LOGICAL)]

group_windows = st.lists(st.sampled_from([None, 1, 2, 3, 4, 5, 9]), min_size=1, max_size=4)


def needed(num_tokens: int, window: int | None, block_size: int) -> set[int]:
    """The definition: logical blocks of the earlier tokens that the next token looks at."""
    oldest = 0 if window is None else max(num_tokens - (window - 1), 0)
    return {position // block_size for position in range(oldest, num_tokens)}


@given(
    windows=group_windows,
    block_size=st.sampled_from([1, 2, 4]),
    lost=st.sets(st.tuples(st.integers(0, 3), st.integers(0, NUM_LOGICAL - 1)), max_size=12),
    num_usable=st.integers(0, NUM_LOGICAL),
)
def test_the_hit_is_the_longest_prefix_of_which_every_group_has_what_it_needs(
    windows: list[int | None], block_size: int, lost: set[tuple[int, int]], num_usable: int
) -> None:
    pool = BlockPool(40)
    coordinator = KVCacheCoordinator(windows, block_size, pool)
    num_groups = len(windows)
    block_ids = pool.allocate(NUM_LOGICAL * num_groups) or []
    coordinator.cache(block_ids, HASHES, 0, NUM_LOGICAL)
    for group, index in lost:  # evicted: given out again to somebody else
        if group < num_groups:
            pool._forget(pool._blocks[block_ids[index * num_groups + group]])
    lost = {(group, index) for group, index in lost if group < num_groups}

    possible = [
        end
        for end in range(num_usable + 1)
        if all(
            (group, index) not in lost
            for group, window in enumerate(windows)
            for index in needed(end * block_size, window, block_size)
        )
    ]
    hit = coordinator.longest_hit(HASHES[:num_usable])
    assert len(hit) == max(possible) * num_groups
    for group, window in enumerate(windows):
        wanted = needed(max(possible) * block_size, window, block_size)
        for index, block_id in enumerate(hit[group::num_groups]):
            own = block_ids[index * num_groups + group]
            assert block_id == (own if index in wanted else coordinator.null_block)


@given(
    windows=group_windows,
    block_size=st.sampled_from([1, 2, 4]),
    num_tokens=st.integers(0, NUM_LOGICAL * 4),
)
def test_what_travels_is_what_the_next_token_looks_at_and_the_block_it_is_written_to(
    windows: list[int | None], block_size: int, num_tokens: int
) -> None:
    coordinator = KVCacheCoordinator(windows, block_size, BlockPool(2))
    num_blocks = -(-num_tokens // block_size)
    places = coordinator.kept_places(num_tokens, num_blocks)
    expected = [
        index * len(windows) + group
        for index in range(num_blocks)
        for group, window in enumerate(windows)
        if index in needed(num_tokens, window, block_size) or num_tokens < (index + 1) * block_size
    ]
    assert places == expected


def make_manager(windows: Sequence[int | None], num_blocks: int = 40) -> KVCacheManager:
    return KVCacheManager(
        num_blocks, 2, sliding_windows=windows, hasher=BlockHasher(2), record_events=True
    )


def test_each_group_drops_by_its_own_window_and_all_come_back_tail_first() -> None:
    manager = make_manager([None, 3, 5])
    request = make_request("a", 12)
    held = list(manager.allocate(request, 12) or [])
    assert len(held) == 18
    null_block = 0
    request.num_computed_tokens = 12  # the next token looks back to 0, 10 and 8
    manager.cache_blocks(request)
    manager.free_slid_out(request)
    assert request.block_ids[0::3] == held[0::3]
    assert request.block_ids[1::3] == [null_block] * 5 + held[16:17]
    assert request.block_ids[2::3] == [null_block] * 4 + held[14::3]
    assert manager.block_pool.num_free == 40 - 1 - (6 + 1 + 2)
    kept = [block_id for block_id in request.block_ids if block_id != null_block]
    manager.free(request)
    assert manager.block_pool.ref_counts() == {null_block: 1}
    everything = manager.block_pool.allocate(39) or []
    assert everything[-9:] == kept[::-1]


def test_groups_never_find_each_others_content_and_events_speak_of_the_first_only() -> None:
    manager = make_manager([None, 3])
    request = make_request("a", prompt=[5, 6, 7, 8])
    manager.allocate(request, 4)
    request.num_computed_tokens = 4
    manager.cache_blocks(request)
    pool = manager.block_pool
    first, second = request.block_hashes
    assert [pool.find(first), pool.find(second)] == request.block_ids[0::2]
    assert pool.num_cached == 4
    assert pool.take_events() == [BlocksStored((first, second), None)]
    manager.free(request)
    pool.allocate(39)
    removed = [event.hashes for event in pool.take_events() if isinstance(event, BlocksRemoved)]
    assert sorted(removed) == sorted([(first,), (second,)])
    assert pool.num_cached == 0


def test_a_prompt_that_arrives_gets_blocks_only_for_what_its_next_token_looks_at() -> None:
    manager = make_manager([None, 3], num_blocks=13)
    request = make_request("a", 16)
    assert not manager.allocate_for_handoff(request, 18 + 6)  # 12 full and 5 more: too many
    assert request.block_ids == []
    assert manager.allocate_for_handoff(request, 18)  # 8 + 1 of the prompt's 16, 2 behind it
    assert request.block_ids[1:15:2] == [0] * 7
    assert manager.block_pool.num_free == 13 - 1 - 11
    assert manager.num_tokens_held(request) == 18
    travelling = [request.block_ids[index] for index in manager.handoff_places(16)]
    assert travelling == [*request.block_ids[0:14:2], *request.block_ids[14:16]]
    manager.free(request)
    assert manager.block_pool.num_free == 12


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_long_output_of_a_mixed_model_holds_what_theory_says(prefix_cache: bool) -> None:
    windows = [None, 4, 4]
    scheduler = make_scheduler(
        100, 2, sliding_windows=windows, prefix_cache=prefix_cache, long_prefill_token_threshold=2
    )
    pool = scheduler.kv_cache_manager.block_pool
    request = make_request("a", 3, 40)
    scheduler.add_request(request)
    runner = ContentRunner(2, windows)
    while scheduler.has_work:
        step(scheduler, runner)
        if request.status.is_finished:
            break
        num_full = -(-request.num_computed_tokens // 2)
        # A window of 4 tokens touches 3 blocks of 2 at most, the one being written included.
        assert sum(pool.ref_counts().values()) - 1 <= num_full + 1 + 2 * 3
    assert request.num_output_tokens == 40
    assert request.num_preemptions == 0
    assert pool.num_free == 99


def test_a_hit_needs_every_group_and_takes_only_what_each_looks_at() -> None:
    windows = [None, 4]
    scheduler = make_scheduler(60, 2, sliding_windows=windows, prefix_cache=True)
    runner = ContentRunner(2, windows)
    prompt = list(range(10, 22))
    scheduler.add_request(make_request("a", prompt=prompt, max_tokens=1))
    step(scheduler, runner)
    again = make_request("b", prompt=prompt, max_tokens=2)
    scheduler.add_request(again)
    assert step(scheduler, runner)[0] == {"b": 2}
    assert again.num_hit_tokens == 10
    assert again.block_ids[1::2].count(0) >= 3
    while scheduler.has_work:
        step(scheduler, runner)
    assert scheduler.kv_cache_manager.block_pool.num_free == 59
