"""Unit tests of beats at the router: which nodes are lost, and which beats are answered."""

from __future__ import annotations

import pytest

from baton.link.words import NodeBeat, RouterBeat
from tests.fakes.router.nodes import join_pair, make_pool
from tests.fakes.time.virtual_clock import VirtualClock


def test_whatever_a_node_says_is_a_sign_of_life() -> None:
    pool = make_pool()
    prefill, decode = join_pair(pool)
    for _ in range(20):
        prefill.say()
        decode.reach(prefill)
        pool.count_missed_beats()
    assert len(pool.nodes) == 2


@pytest.mark.parametrize(("num_running", "interval_s"), [(1, 0.25), (0, 0.5)])
def test_the_router_speaks_only_to_answer_beats_and_at_most_twice_a_second(
    num_running: int, interval_s: float
) -> None:
    clock = VirtualClock()
    pool = make_pool(clock=clock)
    _, decode = join_pair(pool)
    decode.commands.clear()
    for _ in range(20):
        pool.count_missed_beats()
        decode.say()
    assert decode.of(RouterBeat) == []
    for _ in range(round(10 / interval_s)):
        pool.on_event(decode.node, NodeBeat(num_running=num_running))
        clock.advance(interval_s)
    assert decode.of(RouterBeat) == [RouterBeat()] * 20
