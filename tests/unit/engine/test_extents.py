"""Unit tests of extents: the wanted number of blocks, each once, in few runs."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.kv.block_hash import BlockHash
from engine.core.block_pool import WINDOW_FACTOR, BlockPool, choose_extents


def num_runs(block_ids: list[int]) -> int:
    return sum(b != a + 1 for a, b in zip([-2, *block_ids], block_ids, strict=False))


@pytest.mark.parametrize(
    ("candidates", "num_blocks", "expected"),
    [
        ([40, 41, 7, 90, 8, 9, 42], 5, [7, 8, 9, 40, 41]),
        ([9, 8, 7], 3, [7, 8, 9]),  # a tail is freed backwards
        ([1, 2, 3, 4, 5, 20, 21], 2, [20, 21]),  # the shortest run with room
        ([1, 3, 5], 2, [1, 5]),
        ([4], 1, [4]),
    ],
)
def test_the_longest_runs_first_and_the_rest_where_it_just_fits(
    candidates: list[int], num_blocks: int, expected: list[int]
) -> None:
    assert choose_extents(candidates, num_blocks) == expected


@given(st.sets(st.integers(0, 60), min_size=1), st.data())
def test_no_choice_of_that_many_blocks_has_fewer_runs(
    candidates: set[int], data: st.DataObject
) -> None:
    num_blocks = data.draw(st.integers(1, len(candidates)))
    shuffled = data.draw(st.permutations(sorted(candidates)))
    chosen = choose_extents(shuffled, num_blocks)
    assert len(set(chosen)) == len(chosen) == num_blocks
    assert set(chosen) <= candidates
    lengths: list[int] = []
    for block_id in sorted(candidates):
        if block_id - 1 in candidates:
            lengths[-1] += 1
        else:
            lengths.append(1)
    fewest, room = 0, 0
    for length in sorted(lengths, reverse=True):
        if room < num_blocks:
            fewest, room = fewest + 1, room + length
    assert num_runs(chosen) <= fewest  # runs may adjoin nowhere, or they would be one


@pytest.mark.parametrize(("extents", "expected"), [(False, [5, 0]), (True, [0, 1])])
def test_the_pool_gives_extents_only_to_who_asks(extents: bool, expected: list[int]) -> None:
    pool = BlockPool(16)
    pool.allocate(16)
    pool.release([3, 11, 13, 7, 1, 9, 0, 5])  # the last goes first
    assert pool.allocate(2, extents=extents) == expected
    assert pool.num_free == 6
    pool.check()


def test_what_was_freed_last_is_not_taken_for_an_extent() -> None:
    pool = BlockPool(200)
    pool.allocate(200)
    old = list(range(0, 4 * WINDOW_FACTOR * 3, 2))  # no two of them adjoin
    names = [BlockHash(index.to_bytes(2, "big")) for index in range(200)]
    pool.cache(range(200), names, None)
    pool.release(old)
    pool.release([191, 192, 193])  # these do, but somebody may still come back for them
    assert set(pool.allocate(3, extents=True) or []) <= set(old)


def test_an_extent_forgets_what_its_blocks_had_cached_and_only_that() -> None:
    pool = BlockPool(6)
    pool.allocate(6)
    hashes = [BlockHash(bytes([index])) for index in range(6)]
    pool.cache(range(6), hashes, None)
    pool.release([5, 3, 1, 2, 0, 4])
    taken = pool.allocate(3, extents=True)
    assert taken is not None
    for block_id, block_hash in enumerate(hashes):
        assert (pool.find(block_hash) is None) == (block_id in taken)
    pool.check()


def test_blocks_of_a_prompt_that_ended_are_given_to_the_next_before_new_ones() -> None:
    pool = BlockPool(64)
    first = pool.allocate(8, extents=True)
    pool.release(reversed(first or []))
    assert pool.allocate(8, extents=True) == first


def test_new_blocks_are_given_where_blank_ones_are_far_apart() -> None:
    pool = BlockPool(64)
    first = pool.allocate(32, extents=True) or []
    pool.release(first[::2])
    assert pool.allocate(8, extents=True) == list(range(32, 40))
    assert set(pool.allocate(2, extents=True) or []) <= set(first)  # two are few
    pool.check()


def test_the_pool_stays_right_when_extents_come_and_go() -> None:
    draw = random.Random(0)
    pool, held = BlockPool(64), list[list[int]]()
    for _ in range(500):
        wanted = draw.randint(1, 12)
        block_ids = pool.allocate(wanted, extents=draw.random() < 0.7)
        if block_ids is None:
            pool.release(reversed(held.pop(draw.randrange(len(held)))))
        else:
            assert len(block_ids) == wanted
            held.append(block_ids)
        pool.check()
    assert sorted(pool.ref_counts()) == sorted(b for block_ids in held for b in block_ids)
