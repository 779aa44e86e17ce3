"""One suite for every registered routing policy."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.fleet.fleet import Fleet
from router.policies import POLICIES
from router.policies.base import Placement, RouteQuery
from tests.fakes.router.fleets import FleetBook, names

QUERY = RouteQuery(num_prompt_tokens=100, max_tokens=20)
EVERY = pytest.mark.parametrize("name", POLICIES.names())


@st.composite
def fleets(draw: st.DrawFn) -> Fleet:
    """A few nodes with any load and any reach; each prefill node reaches one at least."""
    book = FleetBook(draw(st.integers(1, 4)), draw(st.integers(1, 4)))
    ids = [decode.engine_id for decode in book.decodes]
    for prefill in book.prefills:
        reached = draw(st.sets(st.sampled_from(ids), min_size=1))
        book.reach[prefill.engine_id] = {
            engine_id: draw(st.sampled_from([0.0, 1e9, 4e10])) for engine_id in sorted(reached)
        }
    for node in (*book.prefills, *book.decodes):
        node.weight = draw(st.sampled_from([1.0, 0.5, 0.01]))
        for num_tokens in draw(st.lists(st.integers(0, 500), max_size=4)):
            node.note_opened(num_tokens, num_uncomputed=num_tokens)
    return book.fleet(may_self_prefill=draw(st.booleans()))


def assert_is_of(placement: Placement | None, fleet: Fleet) -> None:
    assert placement is not None
    if placement.prefill is None:
        assert placement.decode in fleet.self_prefilling
        return
    assert placement.prefill in fleet.prefills
    assert placement.decode in fleet.decodes
    assert fleet.reaches(placement.prefill, placement.decode)


@pytest.mark.medium
@EVERY
@given(fleet=fleets())
def test_it_picks_nodes_that_reach_each_other(name: str, fleet: Fleet) -> None:
    policy = POLICIES.load(name)()
    for _ in range(6):
        assert_is_of(policy.pick(QUERY, fleet), fleet)


@pytest.mark.medium
@EVERY
@given(fleet=fleets())
def test_it_is_deterministic(name: str, fleet: Fleet) -> None:
    one, other = POLICIES.load(name)(), POLICIES.load(name)()
    for _ in range(6):
        assert names(one.pick(QUERY, fleet)) == names(other.pick(QUERY, fleet))


@EVERY
def test_it_does_not_depend_on_the_order_in_which_nodes_joined(name: str) -> None:
    one, other, book = POLICIES.load(name)(), POLICIES.load(name)(), FleetBook(2, 3)
    forwards, backwards = book.fleet(), book.fleet(backwards=True)
    for _ in range(12):
        expected = names(other.pick(QUERY, backwards))
        assert names(book.place(one, QUERY, forwards)) == expected


@EVERY
@pytest.mark.parametrize(("num_prefill", "num_decode"), [(2, 3), (3, 3), (4, 2)])
def test_it_spreads_equal_requests_evenly_over_the_nodes_of_each_role(
    name: str, num_prefill: int, num_decode: int
) -> None:
    policy, book = POLICIES.load(name)(), FleetBook(num_prefill, num_decode)
    for _ in range(60):
        book.place(policy, QUERY, book.fleet())
    prefills = [book.num_placed[node.node_name] for node in book.prefills]
    decodes = [book.num_placed[node.node_name] for node in book.decodes]
    # (By chance of two it is nearly even, and with the others exactly.)
    spare = 3 if name == "power_of_two" else 0
    assert max(prefills) - min(prefills) <= spare
    assert max(decodes) - min(decodes) <= spare


@EVERY
def test_it_goes_on_when_nodes_come_and_go(name: str) -> None:
    policy, book = POLICIES.load(name)(), FleetBook(2, 3)
    for without in [(), ("p0",), ("p0", "d1", "d2"), ("d0",), ("p1", "d0", "d1"), ()]:
        fleet = book.fleet(without=without)
        for _ in range(4):
            assert_is_of(book.place(policy, QUERY, fleet), fleet)


@EVERY
def test_a_node_that_joins_gets_its_share_and_not_all_that_it_missed(name: str) -> None:
    policy, book = POLICIES.load(name)(), FleetBook(3, 3)
    for _ in range(30):
        book.place(policy, QUERY, book.fleet(without=["p2", "d2"]))
    for node, account in book.accounts:  # all is done
        node.note_closed(account)
    book.num_placed.clear()
    for _ in range(30):
        book.place(policy, QUERY, book.fleet())
    spare = 3 if name == "power_of_two" else 0
    for nodes in (book.prefills, book.decodes):
        assert all(abs(book.num_placed[node.node_name] - 10) <= spare for node in nodes)


@EVERY
def test_a_node_of_a_tenth_of_the_weight_gets_little_but_something(name: str) -> None:
    policy, book = POLICIES.load(name)(), FleetBook(2, 2)
    book["p0"].weight = book["d1"].weight = 0.1
    for _ in range(110):
        book.place(policy, QUERY, book.fleet())
    assert 5 <= book.num_placed["p0"] <= 25
    assert 5 <= book.num_placed["d1"] <= 25


@EVERY
def test_it_finds_no_place_where_there_is_none(name: str) -> None:
    policy, book = POLICIES.load(name)(), FleetBook(1, 1)
    assert policy.pick(QUERY, book.fleet(without=["d0"])) is None
    assert policy.pick(QUERY, book.fleet(without=["p0"])) is None


@EVERY
def test_it_copes_with_65536_pairs(name: str) -> None:
    policy, book = POLICIES.load(name)(), FleetBook(256, 256)
    fleet = book.fleet()
    for _ in range(512):
        assert_is_of(book.place(policy, QUERY, fleet), fleet)
    assert max(book.num_placed.values()) <= (6 if name == "power_of_two" else 2)


def test_least_tokens_avoids_the_busy_prefill_node_and_the_busy_decode_node() -> None:
    book = FleetBook(2, 3)
    for name, num_tokens in {"p0": 10, "d0": 5, "d2": 1}.items():
        book[name].note_opened(num_tokens)
    assert names(POLICIES.load("least_tokens")().pick(QUERY, book.fleet())) == ("p1", "d1")
