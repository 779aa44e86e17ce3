"""Unit tests of BlockPool: references, order of reuse, and mistakes that must not pass."""

from __future__ import annotations

import pytest

from engine.core.block_pool import BlockPool, BlocksCleared, BlocksRemoved, BlocksStored


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
    assert sum(pool.ref_counts().values()) == 3
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
    assert sum(pool.ref_counts().values()) == 1
    pool.release(block_ids)
    assert pool.num_free == 2
    pool.check()


def test_cached_blocks_are_given_out_again_in_the_order_in_which_they_were_freed() -> None:
    pool = cached_pool(b"a", b"b", b"c", b"d")
    pool.release([2, 0])
    pool.release([3])
    assert pool.allocate(3) == [2, 0, 3]


def test_blank_blocks_go_first_and_of_them_the_one_that_was_freed_last() -> None:
    pool = cached_pool(b"a", num_blocks=6)
    assert pool.allocate(3) == [1, 2, 3]
    pool.release([0])
    pool.release([2, 3])
    pool.release([1])
    assert pool.allocate(5) == [1, 3, 2, 4, 5]
    assert pool.allocate(1) == [0]
    pool.check()


def test_new_blocks_are_made_when_too_few_are_blank() -> None:
    pool = BlockPool(8)
    assert pool.allocate(3) == [0, 1, 2]
    pool.release([1, 0])
    assert pool.allocate(2) == [0, 1]  # memory that was written before
    pool.release([1, 0])
    assert pool.allocate(3) == [3, 0, 1]
    pool.check()


@pytest.mark.parametrize("mistake", [BlockPool.hold, BlockPool.release])
def test_touching_a_free_block_is_a_programmers_error(mistake: object) -> None:
    pool = BlockPool(2)
    pool.release(pool.allocate(2) or [])
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


# ---------------------------------------------------------------- names of contents


def cached_pool(*hashes: bytes, num_blocks: int = 4) -> BlockPool:
    """A pool whose blocks 0, 1, ... are held and cache a chain of these contents."""
    pool = BlockPool(num_blocks, record_events=True)
    everything = pool.allocate(num_blocks)
    assert everything == list(range(num_blocks))
    block_ids = everything[: len(hashes)]
    pool.release(everything[: len(hashes) - 1 - num_blocks : -1])  # blank: the last goes first
    pool.cache(block_ids, hashes, None)
    pool.take_events()
    return pool


def test_a_named_content_is_found_while_it_is_held_and_after_it_was_freed() -> None:
    pool = cached_pool(b"a", b"b")
    assert [pool.find(b"a"), pool.find(b"b"), pool.find(b"c")] == [0, 1, None]
    pool.release([1, 0])
    assert [pool.find(b"a"), pool.find(b"b")] == [0, 1]
    assert pool.num_free == 4
    pool.check()


def test_a_content_is_forgotten_when_its_block_is_given_out_and_not_before() -> None:
    pool = cached_pool(b"a", b"b")
    pool.release([1, 0])
    assert pool.allocate(2) == [2, 3]  # freed longest ago: they cache nothing
    assert pool.take_events() == []
    assert pool.allocate(1) == [1]
    assert [pool.find(b"a"), pool.find(b"b")] == [0, None]
    assert pool.take_events() == [BlocksRemoved((b"b",))]
    pool.check()


def test_touching_a_free_block_takes_it_out_of_the_order_of_reuse() -> None:
    pool = cached_pool(b"a", b"b", b"c")
    pool.release([2, 1, 0])
    pool.touch([1])
    assert pool.ref_counts() == {1: 1}
    assert pool.num_free == 3
    assert pool.allocate(4) is None
    assert pool.allocate(3) == [3, 2, 0]
    assert pool.find(b"b") == 1
    pool.check()


def test_touching_a_held_block_adds_a_holder_who_can_let_go_alone() -> None:
    pool = cached_pool(b"a")
    pool.touch([0])
    pool.hold([0])
    assert pool.ref_counts() == {0: 3}
    pool.release([0])
    pool.release([0])
    assert pool.num_free == 3
    pool.release([0])
    assert pool.num_free == 4
    pool.check()


def test_touching_again_makes_a_block_the_newest() -> None:
    pool = cached_pool(b"a", b"b", num_blocks=2)
    pool.release([0])
    pool.release([1])
    pool.touch([0])
    pool.release([0])
    assert pool.allocate(2) == [1, 0]


def test_how_many_of_some_blocks_are_free() -> None:
    pool = cached_pool(b"a", b"b", b"c")
    pool.release([0, 2])
    assert [pool.num_free_among(ids) for ids in ([], [1], [0, 1, 2])] == [0, 0, 2]


def test_a_look_up_finds_no_block_of_a_higher_class() -> None:
    pool = cached_pool()
    assert pool.allocate(2) == [0, 1]
    pool.cache([0], [b"a"], None, cache_class=1)
    assert (pool.find(b"a", 1), pool.find(b"a")) == (0, None)
    pool.cache([1], [b"a"], None)
    assert (pool.find(b"a", 1), pool.find(b"a")) == (0, 1)
    pool.release([1, 0])
    assert pool.allocate(3) == [2, 3, 1]
    assert (pool.find(b"a", 1), pool.find(b"a")) == (0, None)
    pool.check()


def test_a_content_in_two_blocks_is_found_until_both_are_given_out() -> None:
    pool = cached_pool(b"a")
    assert pool.allocate(2) == [1, 2]
    pool.cache([1], [b"a"], None)
    pool.cache([2], [b"a"], None)
    assert pool.num_cached == 1
    assert pool.take_events() == []  # the content was known
    pool.check()
    pool.release([0, 2, 1])
    assert pool.allocate(2) == [3, 0]
    assert pool.find(b"a") in (1, 2)
    assert pool.take_events() == []  # and it is known still
    pool.check()
    assert pool.allocate(1) == [2]
    assert pool.find(b"a") == 1
    assert pool.take_events() == []
    assert pool.allocate(1) == [1]
    assert pool.find(b"a") is None
    assert pool.take_events() == [BlocksRemoved((b"a",))]
    assert pool.num_cached == 0
    pool.check()


def test_naming_a_block_again_changes_nothing_and_renaming_it_is_a_programmers_error() -> None:
    pool = cached_pool(b"a")
    pool.cache([0], [b"a"], None)
    assert (pool.num_cached, pool.take_events()) == (1, [])
    with pytest.raises(AssertionError):
        pool.cache([0], [b"x"], None)


def test_naming_a_free_block_and_touching_one_without_a_name_are_programmers_errors() -> None:
    pool = cached_pool(b"a")
    with pytest.raises(AssertionError, match="block 1 is free"):
        pool.cache([1], [b"b"], b"a")
    with pytest.raises(AssertionError, match="block 1 caches nothing"):
        pool.touch([1])


def test_a_reset_forgets_all_and_takes_no_block_from_its_holder() -> None:
    pool = cached_pool(b"a", b"b")
    pool.release([1])
    pool.reset_prefix_cache()
    assert (pool.num_cached, pool.find(b"a"), pool.find(b"b")) == (0, None, None)
    assert pool.take_events() == [BlocksCleared()]
    assert pool.ref_counts() == {0: 1}
    pool.check()
    pool.cache([0], [b"x"], None)
    assert pool.find(b"x") == 0
    assert pool.allocate(3) == [2, 3, 1]
    assert pool.take_events() == [BlocksStored((b"x",), None)]  # and none was removed twice
    pool.check()


def test_stored_contents_are_told_in_order_behind_their_parent_and_only_once() -> None:
    pool = cached_pool(b"a", num_blocks=8)
    assert pool.allocate(2) == [1, 2]
    pool.cache([1, 2], [b"b", b"c"], b"a")
    assert pool.take_events() == [BlocksStored((b"b", b"c"), b"a")]
    assert pool.take_events() == []


def test_what_is_new_between_known_contents_is_told_behind_its_own_parent() -> None:
    pool = cached_pool(b"b", b"d", num_blocks=8)  # as if a and c had been given out since
    assert pool.allocate(5) == [2, 3, 4, 5, 6]
    pool.cache([2, 3, 4, 5, 6], [b"a", b"b", b"c", b"d", b"e"], None)
    assert pool.take_events() == [
        BlocksStored((b"a",), None),
        BlocksStored((b"c",), b"b"),
        BlocksStored((b"e",), b"d"),
    ]
    pool.check()


def test_a_pool_that_records_nothing_caches_all_the_same() -> None:
    pool = BlockPool(1)
    pool.allocate(1)
    pool.cache([0], [b"a"], None)
    assert pool.find(b"a") == 0
    pool.reset_prefix_cache()
    assert pool.take_events() == []


def test_events_can_start_late_with_what_is_there_already() -> None:
    pool = BlockPool(4)
    assert pool.allocate(3) == [0, 1, 2]
    pool.cache([0, 1], [b"a", b"b"], None)
    pool.cache([2], [b"silent"], None, silent=True)
    assert pool.start_events() == [b"a", b"b"]
    assert pool.take_events() == []
    pool.release([1, 0, 2])
    assert pool.allocate(4) == [3, 1, 0, 2]
    assert pool.take_events() == [BlocksRemoved((b"b",)), BlocksRemoved((b"a",))]


def test_events_that_nobody_took_are_part_of_the_next_start() -> None:
    pool = cached_pool(b"a", num_blocks=4)
    assert pool.allocate(2) == [1, 2]
    pool.cache([1, 2], [b"b", b"a"], None)  # the second has a duplicate
    assert pool.start_events() == [b"a", b"b"]
    assert pool.take_events() == []


@pytest.mark.parametrize("fault", ["name lost", "name made up", "empty entry"])
def test_check_notices_an_index_that_does_not_fit(fault: str) -> None:
    pool = cached_pool(b"a")
    if fault == "name lost":
        pool._blocks[0].block_hash = None
    elif fault == "name made up":
        pool._blocks[1].block_hash = b"a"
    else:
        pool._cached[b"b"] = {}
    with pytest.raises(AssertionError):
        pool.check()
