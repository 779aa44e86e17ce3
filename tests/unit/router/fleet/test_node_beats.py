"""Unit tests of beats at the router: which nodes are lost, and which beats are answered."""

from __future__ import annotations

import pytest

from baton.link.words import NodeBeat, RouterBeat
from tests.fakes.router.nodes import join_pair, make_pool
from tests.fakes.time.virtual_clock import VirtualClock


def test_any_message_of_a_node_is_a_sign_of_life() -> None:
    pool = make_pool()
    prefill, decode = join_pair(pool)
    for _ in range(20):
        prefill.say()
        decode.reach(prefill)
        pool.count_missed_beats()
    assert len(pool.nodes) == 2


@pytest.mark.parametrize(("num_running", "interval_s"), [(1, 0.25), (0, 0.5)])
def test_the_router_only_answers_beats_and_at_most_twice_a_second(
    num_running: int, interval_s: float
) -> None:
    clock = VirtualClock()
    pool = make_pool(clock=clock)
    _, decode = join_pair(pool)
    for _ in range(round(10 / interval_s)):
        pool.on_event(decode.node, NodeBeat(num_running=num_running))
        for _ in range(round(interval_s / 0.25)):
            clock.advance(0.25)
            num_before = len(decode.of(RouterBeat))
            pool.count_missed_beats()
            assert len(decode.of(RouterBeat)) == num_before
    assert decode.of(RouterBeat) == [RouterBeat()] * 20


def test_the_router_sends_beats_to_a_node_whose_beats_are_late() -> None:
    """In a storm of joins, beats wait in queues; nodes must not take the router for dead."""
    clock = VirtualClock()
    pool = make_pool(clock=clock)
    _, decode = join_pair(pool)
    pool.on_event(decode.node, NodeBeat())
    decode.commands.clear()
    for _ in range(20):
        clock.advance(0.25)
        decode.say()
        pool.count_missed_beats()
    assert len(decode.of(RouterBeat)) == 6  # every 0.75 s
