"""Unit tests of BeatPace and shared ticks: a process at rest wakes rarely."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

import pytest

from baton.link.beat_pace import (
    INTERVALS_AT_REST,
    MAX_INTERVALS_AT_REST,
    BeatPace,
    read_intervals_at_rest,
)
from baton.processes.shared_ticks import sleep_until_tick
from baton.processes.ticks import next_tick
from tests.fakes.time.virtual_clock import VirtualClock
from tests.fakes.time.virtual_loop import VirtualLoop

T = TypeVar("T")


def run_virtual(work: Coroutine[None, None, T]) -> T:
    """Run a coroutine on a virtual clock; return its result."""
    clock = VirtualClock()
    loop = VirtualLoop(clock)
    try:
        task = loop.create_task(work)
        loop.run_until_idle()
        while not task.done():
            clock.advance(loop.idle_s)
            loop.run_until_idle()
        return task.result()
    finally:
        loop.close()


def test_a_node_at_rest_beats_less_often() -> None:
    async def count(pause: int) -> tuple[int, int]:
        pace, loop = BeatPace(), asyncio.get_running_loop()
        num_beats, num_intervals, until = 0, 0, loop.time() + 10
        while loop.time() < until - 0.01:
            num_intervals += await pace.wait(pause)
            num_beats += 1
        return num_beats, num_intervals

    assert run_virtual(count(1)) == (40, 40)
    assert run_virtual(count(INTERVALS_AT_REST)) == (20, 40)
    assert run_virtual(count(MAX_INTERVALS_AT_REST)) == (10, 40)


def test_a_router_cannot_ask_for_beats_that_are_too_rare() -> None:
    assert [read_intervals_at_rest(told) for told in (0, 1, 3, 4, 2**32 - 1)] == [2, 2, 3, 4, 4]


@pytest.mark.parametrize(("after_s", "ends_s"), [(0.1, 0.25), (0.4, 0.4)])
def test_a_node_that_rests_no_longer_beats_after_one_interval(
    after_s: float, ends_s: float
) -> None:
    async def hurry() -> None:
        pace, loop = BeatPace(), asyncio.get_running_loop()
        pace.hurry()  # nobody waits: nothing to do
        began = loop.time()
        loop.call_later(after_s, pace.hurry)
        assert await pace.wait(INTERVALS_AT_REST) == 1
        assert loop.time() - began == pytest.approx(ends_s)

    run_virtual(hurry())


def test_a_late_timer_counts_as_one_in_time() -> None:
    async def be_late() -> None:
        pace, loop = BeatPace(), asyncio.get_running_loop()
        waiting = asyncio.create_task(pace.wait(INTERVALS_AT_REST))
        await asyncio.sleep(0)
        pace._began_at -= 60.0  # as if the process had stood still
        loop.call_later(0.25, pace.hurry)
        assert await waiting == INTERVALS_AT_REST

    run_virtual(be_late())


def test_tasks_whose_intervals_are_multiples_wake_together() -> None:
    async def wake_times(interval_s: float, start_s: float) -> list[float]:
        loop, found = asyncio.get_running_loop(), list[float]()
        await asyncio.sleep(start_s)
        for _ in range(round(4 / interval_s)):
            await sleep_until_tick(interval_s)
            found.append(round(loop.time(), 6))
        return found

    async def run() -> int:
        tasks = [wake_times(0.25, 0.01), wake_times(0.5, 0.13), wake_times(2.0, 0.31)]
        return len({one for times in await asyncio.gather(*tasks) for one in times})

    assert run_virtual(run()) <= 20  # of 26 wakes


def test_the_next_tick_is_half_an_interval_to_one_and_a_half_away() -> None:
    for now in (0.0, 0.1, 0.124, 0.126, 0.2499, 7.3, 1e6 + 0.2):
        assert 0.125 <= next_tick(now, 0.25) - now <= 0.375
