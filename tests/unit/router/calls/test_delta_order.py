"""Unit tests of DeltaOrder: each delta is passed on once and in order, whatever a leg sends."""

from __future__ import annotations

import itertools
import time

from hypothesis import given
from hypothesis import strategies as st

from baton.api.outputs import RequestDelta
from baton.link.words import NodeRole
from router.calls.output_buffer import MAX_EARLY, DeltaOrder
from router.fleet.node import LegDelta


def tokens(first: int, number: int = 1) -> LegDelta:
    return LegDelta(
        NodeRole.DECODE, RequestDelta("a", first, tuple(range(first, first + number)), epoch=1)
    )


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 4))))
def test_tokens_come_in_their_order_and_once(said: list[tuple[int, int]]) -> None:
    order, told = DeltaOrder(0), list[int]()
    for first, number in said:
        for ready in order.push(tokens(first, number)):
            told += ready.delta.token_ids
    assert told == list(range(len(told)))
    assert order.next_index == len(told)


def test_what_one_says_again_and_again_ahead_of_the_other_costs_no_more_each_time() -> None:
    """A joined node could hold up a router for half a minute with one message of such rows."""
    order, again = DeltaOrder(0), tokens(9)
    for index in range(1, MAX_EARLY):
        assert not list(order.push(tokens(index)))
    began_at = time.process_time()
    for _ in itertools.repeat(None, 100_000):
        for _ in order.push(again):
            raise AssertionError("it is not next")
    assert time.process_time() - began_at < 3.0  # 11 s when all that is early was looked at
    assert len(list(order.push(tokens(0)))) == MAX_EARLY
