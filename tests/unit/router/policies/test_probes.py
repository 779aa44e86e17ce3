"""Unit tests of probes: a node that was not asked for long is measured again, at a bounded cost."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest

from baton.link.words import NodeBeat, NodeRole, StepTime
from router.fleet.load.node_load import NodeLoad
from router.policies import probes
from router.policies.base import Placement, RouteQuery
from router.policies.cost import Cost
from tests.fakes.router.fleets import FleetBook, names
from tests.fakes.router.nodes import make_registration

PROFILE = (StepTime(1, 0.01), StepTime(64, 0.07), StepTime(512, 0.5))


def pick(book: FleetBook, num_tokens: int = 100, **changes: Any) -> Placement:
    query = RouteQuery(num_prompt_tokens=num_tokens, max_tokens=64, now=book.now)
    fleet = book.fleet(may_self_prefill=True)
    placement = Cost().pick(dataclasses.replace(query, **changes), fleet)
    assert placement is not None
    return placement


def serve(load: NodeLoad, num_tokens: int, seconds: float, book: FleetBook) -> None:
    """Compute a prompt on a decode node alone."""
    account = load.note_opened(num_tokens, num_uncomputed=num_tokens, num_arriving=num_tokens)
    book.now += seconds
    load.note_begun(account)
    load.note_closed(account)


def learn(load: NodeLoad, seconds: float) -> None:
    """Have a node known for what prompts of 100 tokens take there."""
    for _ in range(24):
        load.prefill.measure(100, seconds)
    load.note_beat(NodeBeat(num_free_blocks=load.num_blocks))


@pytest.fixture
def book() -> FleetBook:
    """One node of each role; the prefill node looks five times as slow as it is."""
    book = FleetBook(1, 1)
    for role, nodes in ((NodeRole.PREFILL, book.prefills), (NodeRole.DECODE, book.decodes)):
        registration = dataclasses.replace(
            make_registration(nodes[0].node_name, role, max_model_len=10_000),
            num_blocks=20_000,
            step_times=PROFILE,
        )
        nodes[0] = NodeLoad(registration, book.shared, lambda: book.now)
    book.now = 1.0
    learn(book["p0"], 0.5)
    for _ in range(20):
        serve(book["d0"], 100, 0.1, book)
    return book


def test_a_node_that_looks_slow_is_asked_again_when_a_probe_may_cost_so_much(
    book: FleetBook,
) -> None:
    began = book["p0"].prefill_asked_at
    while not (placement := pick(book)).is_probe:
        assert names(placement) == ("", "d0")
        book.now += 1.0
        assert book.now - began < 60
    assert names(placement) == ("p0", "d0")
    extra_s = (placement.explain()[0].cost - placement.explain()[1].cost) / 1e3
    assert 0 < extra_s <= probes.PROBE_SHARE * (book.now - began)


def test_a_probe_is_one_prompt_and_the_node_is_the_choice_where_it_is_fast(
    book: FleetBook,
) -> None:
    book.now += 60.0
    assert pick(book).is_probe
    accounts = [book["p0"].note_opened(100, num_uncomputed=100)]
    assert not pick(book).is_probe
    for _ in range(20):  # and those that follow: it is twice as fast as the other
        book.now += 0.05
        book["p0"].note_begun(accounts[0])
        book["p0"].note_closed(accounts.pop())
        accounts.append(book["p0"].note_opened(100, num_uncomputed=100))
    book["p0"].note_closed(accounts.pop())
    book["d0"].prefill_asked_at = book.now  # else it were due itself
    placement = pick(book)
    assert names(placement) == ("p0", "d0")
    assert not placement.is_probe


def test_a_node_that_lacks_a_conversation_and_is_as_fast_is_not_probed() -> None:
    """The conversation would be computed again, and the estimate needs no correction."""
    book = FleetBook(1, 1)
    book.now = 100.0
    for name in ("p0", "d0"):
        learn(book[name], 0.1)
    book["d0"].prefill_asked_at = book.now
    cached = {"p0-0": 200, "d0-0": 580}
    placement = pick(book, 600, find_cached_tokens=lambda: cached)
    assert names(placement) == ("", "d0")
    learn(book["p0"], 0.15)
    assert pick(book, 600, find_cached_tokens=lambda: cached).is_probe


def test_a_long_prompt_is_no_probe(book: FleetBook) -> None:
    book.now += 60.0
    assert not pick(book, 8000).is_probe
    assert pick(book, 100).is_probe


@pytest.mark.parametrize("query", [{"timeout_s": 2.0}, {"leaves_room": True}, {"now": 0.0}])
def test_who_has_no_time_or_must_not_wait_is_no_probe(
    book: FleetBook, query: dict[str, Any]
) -> None:
    book.now += 60.0
    assert not pick(book, **query).is_probe


def test_decode_nodes_are_probed_only_where_nobody_is_held_up_much(book: FleetBook) -> None:
    """A longer prompt delays all that decode there."""
    learn(book["p0"], 0.02)
    book.now += 60.0
    book["p0"].prefill_asked_at = book.now
    assert names(pick(book, 500)) == ("", "d0")
    assert pick(book, 500).is_probe
    for _ in range(20):
        book["d0"].note_opened(400, num_arriving=100)
    assert names(pick(book, 500)) == ("p0", "d0")


def test_each_node_of_a_large_fleet_has_its_turn() -> None:
    book = FleetBook(9, 1)
    book.now = 100.0
    slow = {f"p{number}" for number in range(1, 9)}
    for name in slow:
        learn(book[name], 0.2)
    book["p0"].prefill_asked_at = book.now
    learn(book["p0"], 0.1)
    found = set()
    for _ in range(300):
        book.now += 0.37
        book["p0"].prefill_asked_at = book.now
        placement = pick(book)
        if placement.is_probe and placement.prefill is not None:
            found.add(placement.prefill.node_name)
            placement.prefill.prefill_asked_at = book.now
    assert found == slow


def test_all_nodes_of_a_large_fleet_are_looked_at_equally_often() -> None:
    nodes = FleetBook(9, 1).prefills
    looked_at = Counter(
        node.node_name for first in range(9) for node in probes._few_from(nodes, first)
    )
    assert looked_at == {node.node_name: probes.MAX_LOOKED_AT for node in nodes}
