"""How long blocks live, idle and wait for reuse, on a clock that the test turns; peak and waste."""

from __future__ import annotations

from engine.core.block_pool import BlockPool
from tests.fakes.time.virtual_clock import VirtualClock

HASHES = [bytes([number]) * 16 for number in range(4)]


def test_times_of_a_block_that_is_cached_reused_and_evicted() -> None:
    clock = VirtualClock()
    pool = BlockPool(2, clock=clock)
    block_ids = pool.allocate(2)
    assert block_ids is not None
    clock.advance(2.0)
    pool.cache(block_ids, HASHES[:2], None)
    clock.advance(3.0)
    pool.release(reversed(block_ids))
    clock.advance(0.5)
    pool.touch(block_ids[:1])
    pool.release(block_ids[:1])
    clock.advance(20.0)
    assert pool.allocate(2) == [block_ids[1], block_ids[0]]
    residency = pool.residency
    assert (sum(residency.lifetime.counts), residency.lifetime.sum_s) == (2, 47.0)
    assert (sum(residency.idle_before_eviction.counts), residency.idle_before_eviction.sum_s) == (
        2,
        40.5,
    )
    assert (sum(residency.reuse_gap.counts), residency.reuse_gap.sum_s) == (1, 0.5)
    assert residency.reuse_gap.counts[2] == 1  # up to 1 s


def test_a_block_that_never_left_its_holder_has_no_gap() -> None:
    pool = BlockPool(3, clock=VirtualClock())
    block_ids = pool.allocate(1)
    assert block_ids is not None
    pool.cache(block_ids, HASHES[:1], None)
    pool.touch(block_ids)
    assert sum(pool.residency.reuse_gap.counts) == 0


def test_the_peak_stays_when_blocks_are_free_again() -> None:
    pool = BlockPool(5)
    block_ids = pool.allocate(4)
    assert block_ids is not None
    pool.release(block_ids)
    assert (pool.num_free, pool.least_free) == (5, 1)


def test_a_copy_does_not_change() -> None:
    pool = BlockPool(1, clock=VirtualClock())
    copied = pool.residency.copy()
    pool.residency.lifetime.note(1.0)
    assert sum(copied.lifetime.counts) == 0
