"""Unit tests of the purpose of each simple policy; the contract suite tests common rules."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from router.policies.base import RouteQuery
from router.policies.power_of_two import PowerOfTwo
from router.policies.prefix_aware import PrefixAware
from router.policies.session_affinity import SessionAffinity
from tests.fakes.router.fleets import FleetBook, names


def query_of(session_id: str = "", **cached: int) -> RouteQuery:
    hits = {f"{name}-0": num_tokens for name, num_tokens in cached.items()}
    return RouteQuery(
        num_prompt_tokens=1000,
        max_tokens=100,
        session_id=session_id,
        find_cached_tokens=lambda: hits,
    )


# ---------------------------------------------------------------- session affinity


def test_a_session_keeps_its_nodes_and_sessions_are_spread() -> None:
    book, policy = FleetBook(4, 4), SessionAffinity()
    places = {f"s{i}": names(policy.pick(query_of(f"s{i}"), book.fleet())) for i in range(200)}
    for session_id, place in places.items():
        assert names(SessionAffinity().pick(query_of(session_id), book.fleet())) == place
    for role in (0, 1):
        counts = Counter(place[role] for place in places.values())
        assert len(counts) == 4
        assert min(counts.values()) > 25


def test_when_a_node_goes_only_its_own_sessions_move_and_they_come_back() -> None:
    book, policy = FleetBook(4, 1), SessionAffinity()
    for i in range(100):
        query = query_of(f"s{i}")
        before, _ = names(policy.pick(query, book.fleet()))
        after, _ = names(policy.pick(query, book.fleet(without=["p2"])))
        assert after == before or before == "p2"
        assert names(policy.pick(query, book.fleet()))[0] == before


def test_a_node_that_is_loaded_too_much_passes_a_session_on() -> None:
    book, policy = FleetBook(4, 1), SessionAffinity()
    home, _ = names(policy.pick(query_of("s"), book.fleet()))
    book[home].note_opened(10_000, num_uncomputed=10_000)
    assert names(policy.pick(query_of("s"), book.fleet()))[0] != home


# ---------------------------------------------------------------- prefix aware


def test_the_longest_hit_is_taken_and_without_one_the_fewest_tokens() -> None:
    book = FleetBook(3, 3)
    book["p0"].note_opened(500)
    assert names(PrefixAware().pick(query_of(p0=160, p1=320, d2=160), book.fleet())) == ("p1", "d2")
    assert names(PrefixAware().pick(query_of(), book.fleet())) == ("p1", "d0")


def test_a_node_that_is_overloaded_loses_its_own_hit_and_nobody_elses() -> None:
    book = FleetBook(3, 1)
    book["p0"].note_opened(50_000)
    assert names(PrefixAware().pick(query_of(p0=960, p2=160), book.fleet()))[0] == "p2"


def test_a_hit_counts_as_computed() -> None:
    placement = PrefixAware().pick(query_of(p1=320), FleetBook(2, 1).fleet())
    assert placement is not None
    assert placement.num_cached_tokens == 320


# ---------------------------------------------------------------- power of two choices


def test_the_lighter_of_two_is_taken_so_that_the_heaviest_of_all_never_is() -> None:
    book, policy = FleetBook(8, 1), PowerOfTwo()
    book["p3"].note_opened(1000)
    assert "p3" not in {names(policy.pick(query_of(), book.fleet()))[0] for _ in range(200)}


def test_two_choices_are_far_more_even_than_one() -> None:
    """The fullest of n bins has log log n more than the mean, not log n / log log n."""
    book, policy = FleetBook(64, 1), PowerOfTwo()
    for _ in range(64):
        book.place(policy, query_of(), book.fleet())
    fullest = max(book.num_placed[node.node_name] for node in book.prefills)
    assert fullest <= 2 + math.log2(math.log2(64))


@pytest.mark.parametrize("seed", [1, 2])
def test_another_seed_draws_others(seed: int) -> None:
    book = FleetBook(16, 16)
    draws = [
        [names(policy.pick(query_of(), book.fleet())) for _ in range(10)]
        for policy in (PowerOfTwo(), PowerOfTwo(seed))
    ]
    assert draws[0] != draws[1]
