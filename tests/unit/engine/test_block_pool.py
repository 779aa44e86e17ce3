"""Unit tests of BlockPool: references, order of reuse, and mistakes that must not pass."""

from __future__ import annotations

import pytest

from engine.block_pool import BlockPool


def test_a_new_pool_gives_each_block_once_and_then_nothing() -> None:
    pool = BlockPool(4)
    assert sorted(pool.allocate(4) or []) == [0, 1, 2, 3]
    assert pool.num_free == 0
    assert pool.allocate(1) is None
    pool.check()


def test_a_refused_allocation_changes_nothing() -> None:
    pool = BlockPool(4)
    first = pool.allocate(3)
    assert pool.allocate(2) is None
    assert pool.num_free == 1
    assert pool.num_references() == 3
    pool.release(first or [])
    assert pool.num_free == 4


def test_allocating_nothing_works_even_when_nothing_is_free() -> None:
    pool = BlockPool(1)
    pool.allocate(1)
    assert pool.allocate(0) == []


def test_a_block_is_free_only_when_its_last_holder_lets_go() -> None:
    pool = BlockPool(2)
    block_ids = pool.allocate(1) or []
    pool.hold(block_ids)
    pool.release(block_ids)
    assert pool.num_free == 1
    assert pool.num_references() == 1
    pool.release(block_ids)
    assert pool.num_free == 2
    pool.check()


def test_blocks_are_given_out_again_in_the_order_in_which_they_were_freed() -> None:
    pool = BlockPool(4)
    pool.allocate(4)
    pool.release([2, 0])
    pool.release([3])
    assert pool.allocate(3) == [2, 0, 3]


@pytest.mark.parametrize("mistake", [BlockPool.hold, BlockPool.release])
def test_touching_a_free_block_is_a_programmers_error(mistake: object) -> None:
    pool = BlockPool(2)
    assert callable(mistake)
    with pytest.raises(AssertionError, match="free"):
        mistake(pool, [1])


def test_releasing_a_block_twice_in_one_call_is_noticed() -> None:
    pool = BlockPool(2)
    block_ids = pool.allocate(1) or []
    with pytest.raises(AssertionError, match="free already"):
        pool.release(block_ids * 2)


def test_check_notices_a_count_that_does_not_fit() -> None:
    pool = BlockPool(2)
    pool.num_free = 1
    with pytest.raises(AssertionError):
        pool.check()
