"""SimKVCache: the counts add up, prefixes are found again, the oldest go first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.block_hash import BlockHasher
from sim_node.kv_cache import Holding, SimKVCache


def names(text: str) -> list[bytes]:
    """Of the prefixes of a text, one block per letter."""
    return [text[: end + 1].encode() for end in range(len(text))]


def fill(cache: SimKVCache, text: str) -> Holding:
    holding = cache.take(names(text), len(text))
    assert holding is not None
    cache.name(holding, names(text))
    return holding


def test_a_prefix_is_found_again_and_shared() -> None:
    cache = SimKVCache(10)
    one = fill(cache, "abcd")
    other = cache.take(names("abxy"), 4)
    assert other is not None
    assert other.hashes == names("ab")
    assert cache.num_free_blocks == 10 - 6
    cache.free(one)
    assert cache.num_free_blocks == 10 - 4
    assert cache.num_cached(names("abcde")) == 4  # free, and there


def test_what_was_held_the_longest_ago_goes_first_and_tails_before_heads() -> None:
    cache = SimKVCache(6)
    cache.free(fill(cache, "abc"))
    cache.free(fill(cache, "xyz"))
    assert cache.take([], 2) is not None
    assert cache.num_cached(names("abc")) == 1
    assert cache.num_cached(names("xyz")) == 3


def test_there_is_no_room_where_all_is_held() -> None:
    cache = SimKVCache(4)
    holding = fill(cache, "abc")
    assert cache.take(names("x"), 2) is None
    assert cache.take(names("x"), 1, headroom=1) is None
    assert cache.take(names("abc"), 4) is not None  # three of them are shared
    assert not cache.grow(holding)


def test_revived_blocks_count_as_taken() -> None:
    cache = SimKVCache(4)
    cache.free(fill(cache, "abcd"))
    assert cache.take(names("ab"), 4) is not None  # evicts c and d
    assert cache.num_free_blocks == 0
    assert cache.num_cached(names("abcd")) == 2


def test_changes_are_told_once_and_taken_together() -> None:
    cache = SimKVCache(3)
    holding = fill(cache, "abc")
    assert cache.take_changes() == (tuple(names("abc")), ())
    cache.free(holding)
    assert cache.take([], 1) is not None
    assert cache.take_changes() == ((), (b"abc",))
    again = SimKVCache(1)
    again.free(fill(again, "a"))
    assert again.take([], 1) is not None  # came and went
    assert again.take_changes() == ((), ())


@given(st.lists(st.tuples(st.text("ab", min_size=1, max_size=8), st.booleans()), max_size=40))
def test_counts_add_up_and_a_reader_of_the_changes_knows_what_is_there(
    script: list[tuple[str, bool]],
) -> None:
    cache, hasher = SimKVCache(12), BlockHasher(1)
    held: list[Holding] = []
    known: set[bytes] = set()
    for text, is_kept in script:
        hashes: list[bytes] = []
        hasher.extend(hashes, text.encode())
        holding = cache.take(hashes, len(text))
        if holding is None:
            if held:
                cache.free(held.pop(0))
            continue
        cache.name(holding, hashes)
        cache.grow(holding)
        cache.check()
        held.append(holding) if is_kept else cache.free(holding)
        stored, removed = cache.take_changes()
        assert known.isdisjoint(stored)
        assert known.issuperset(removed)
        known = (known | set(stored)) - set(removed)
        assert known == set(cache.names())
    for holding in held:
        cache.free(holding)
    cache.check()
    assert cache.num_free_blocks == 12
