"""Unit tests of KV retention: which blocks a pattern needs, against a definition token by token."""

from __future__ import annotations

import itertools

import pytest

from baton.kv.block_hash import BlockHasher
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.kv_retention import Find, FullAttention, SlidingWindow
from tests.fakes.engine.engine_parts import ContentRunner, make_request, make_scheduler, step

HASHES = [bytes([index]) for index in range(6)]
NULL = 99

every_window = pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 8, 9])
every_block_size = pytest.mark.parametrize("block_size", [1, 2, 4])


def needed_blocks(num_computed_tokens: int, window: int, block_size: int) -> set[int]:
    """The definition: blocks of the earlier tokens that the next token looks at."""
    oldest = max(num_computed_tokens - (window - 1), 0)
    return {position // block_size for position in range(oldest, num_computed_tokens)}


def finding(cached: set[int]) -> Find:
    """A cache that holds some of HASHES: content ``i`` is in block ``i``."""
    return lambda block_hash: block_hash[0] if block_hash[0] in cached else None


def test_full_attention_needs_every_block_for_ever() -> None:
    assert [FullAttention().num_expired_blocks(n) for n in (0, 1, 10**6)] == [0, 0, 0]


@pytest.mark.parametrize(
    "cached", [set(c) for n in range(5) for c in itertools.combinations(range(4), n)]
)
def test_the_hit_of_full_attention_ends_before_the_first_block_that_is_not_there(
    cached: set[int],
) -> None:
    hit = FullAttention().longest_hit(HASHES[:4], finding(cached))
    first_missing = min(set(range(5)) - cached)
    assert hit == list(range(first_missing))


@every_window
@every_block_size
def test_a_block_has_slid_out_exactly_when_no_later_token_looks_at_it(
    window: int, block_size: int
) -> None:
    retention = SlidingWindow(window, block_size, NULL)
    for num_computed in range(25):
        later = set().union(
            *(needed_blocks(n, window, block_size) for n in range(num_computed, 40))
        )
        later |= {num_computed // block_size}  # the next token's own
        assert retention.num_expired_blocks(num_computed) == min(later)


@every_window
@every_block_size
def test_the_hit_of_a_window_is_the_longest_whose_needed_blocks_are_all_there(
    window: int, block_size: int
) -> None:
    retention = SlidingWindow(window, block_size, NULL)
    for bits in range(2 ** len(HASHES)):
        cached = {index for index in range(len(HASHES)) if bits >> index & 1}
        hit = retention.longest_hit(HASHES, finding(cached))
        possible = [
            end
            for end in range(len(HASHES) + 1)
            if needed_blocks(end * block_size, window, block_size) <= cached
        ]
        assert len(hit) == max(possible)
        needed = needed_blocks(len(hit) * block_size, window, block_size)
        assert [index for index, block in enumerate(hit) if block != NULL] == sorted(needed)
        assert all(block in (index, NULL) for index, block in enumerate(hit))


def test_a_request_gives_back_what_slid_out_and_keeps_what_it_looks_at() -> None:
    manager = KVCacheManager(8, 2, sliding_windows=[3])
    request = make_request("a", 12)
    held = list(manager.allocate(request, 12) or [])
    null_block = 0
    assert null_block not in held
    for num_computed, num_kept in ((2, 6), (3, 6), (4, 5), (5, 5), (6, 4), (12, 1)):
        request.num_computed_tokens = num_computed
        manager.free_slid_out(request)
        num_slid = 6 - num_kept
        assert request.block_ids == [null_block] * num_slid + held[num_slid:]
        assert manager.block_pool.num_free == 7 - num_kept
    manager.free(request)
    assert manager.block_pool.ref_counts() == {null_block: 1}


def test_what_slid_out_together_is_given_out_again_tail_first() -> None:
    manager = KVCacheManager(5, 1, sliding_windows=[1], hasher=BlockHasher(1))
    request = make_request("a", 4)
    held = list(manager.allocate(request, 4) or [])
    request.num_computed_tokens = 4
    manager.cache_blocks(request)
    manager.free_slid_out(request)
    assert manager.block_pool.allocate(4) == held[::-1]


def test_a_window_lets_a_long_output_run_in_few_blocks() -> None:
    scheduler = make_scheduler(12, 2, sliding_windows=[4])
    request = make_request("a", 3, 18)
    scheduler.add_request(request)
    runner = ContentRunner(2, sliding_windows=[4])
    most_held = 0
    while scheduler.has_work:
        step(scheduler, runner)
        most_held = max(
            most_held, sum(scheduler.kv_cache_manager.block_pool.ref_counts().values()) - 1
        )
    assert request.num_output_tokens == 18
    assert most_held <= 3
    assert request.num_preemptions == 0


def test_a_prefix_hit_under_a_window_takes_only_the_blocks_in_the_window() -> None:
    scheduler = make_scheduler(20, 2, prefix_cache=True, sliding_windows=[4])
    prompt = list(range(10, 22))
    runner = ContentRunner(2, sliding_windows=[4])
    scheduler.add_request(make_request("a", prompt=prompt, max_tokens=1))
    step(scheduler, runner)
    again = make_request("b", prompt=prompt, max_tokens=1)
    scheduler.add_request(again)
    assert step(scheduler, runner)[0] == {"b": 2}
    assert again.num_hit_tokens == 10


def test_remote_kv_that_slides_out_before_the_prompt_ends_gets_no_block_and_is_never_found() -> (
    None
):
    scheduler = make_scheduler(20, 2, prefix_cache=True, sliding_windows=[4])
    runner = ContentRunner(2, sliding_windows=[4])
    prompt = list(range(10, 22))
    remote = make_request("remote", prompt=prompt, max_tokens=2)
    scheduler.park(remote)
    granted = scheduler.grant("remote")
    assert granted is not None
    # Of positions 8 to 11; the next token, at 12, looks back to 9.
    assert len(granted.block_ids) == 2
    assert remote.block_ids == [0] * 4 + [*granted.block_ids, remote.block_ids[-1]]
    assert scheduler.kv_cache_manager.block_pool.num_free == 20 - 1 - 3
    runner.write_what_travels(remote)
    scheduler.commit("remote", 5)
    scheduler.check()
    step(scheduler, runner)
    scheduler.add_request(make_request("shorter", prompt=prompt[:7], max_tokens=2))
    while scheduler.has_work:
        step(scheduler, runner)
