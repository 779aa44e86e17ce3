"""Unit tests of beats at the router: which nodes are lost, and which beats are answered."""

from __future__ import annotations

import asyncio

import pytest

from baton.link.words import NodeBeat, RouterBeat
from router import program
from router.gate.scaling import ScalingSignals
from tests.fakes.router.nodes import join_pair, make_pool
from tests.fakes.time.virtual_clock import VirtualClock
from tests.fakes.time.virtual_loop import VirtualLoop


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


@pytest.mark.parametrize("at_s", [0.01, 0.2, 0.3, 0.49])
def test_a_router_counts_beats_rarely_while_all_nodes_rest_and_loses_silent_nodes_in_time(
    at_s: float,
) -> None:
    clock = VirtualClock()
    loop = VirtualLoop(clock)
    pool = make_pool(clock=clock)
    join_pair(pool)
    counted_at: list[float] = []
    count = pool.count_missed_beats

    def note_count(num_intervals: int = 1) -> None:
        counted_at.append(clock())
        count(num_intervals)

    async def run() -> float:
        async with program._watching(pool, ScalingSignals(pool, clock=clock)):
            await asyncio.sleep(at_s)
            for _ in range(10):
                for node in list(pool.members):
                    pool.on_event(node, NodeBeat())
                await asyncio.sleep(0.5)
            assert pool.num_nodes == 2
            before_s = clock() - 0.5
            for _ in range(1000):
                await asyncio.sleep(0.01)
                if not pool.num_nodes:
                    break
            return clock() - before_s

    pool.count_missed_beats = note_count  # type: ignore[method-assign]  # notes each call
    try:
        task = loop.create_task(run())
        loop.run_until_idle()
        while not task.done():
            clock.advance(loop.idle_s)
            loop.run_until_idle()
    finally:
        loop.close()
    assert 1.49 <= task.result() <= 1.77
    assert sum(1001 < one <= 1005 for one in counted_at) == 8
