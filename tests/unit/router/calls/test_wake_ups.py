"""Unit tests of WakeUps: an idle router wakes readers at once, a busy router in waves."""

from __future__ import annotations

import asyncio

from router.calls.wake_ups import BUSY_SHARE, LONGEST_REST_S, WakeUps
from tests.fakes.router.router_scene import asynchronous


class Clocks:
    """Three clocks: time, the process's busy time, and its time of waiting for a CPU."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.busy_s = 10.0
        self.waited_s = 20.0

    def make(self) -> WakeUps:
        return WakeUps(
            clock=lambda: self.now_s,
            cpu_clock=lambda: self.busy_s,
            wait_clock=lambda: self.waited_s,
        )


def sleeper(wake_ups: WakeUps) -> asyncio.Future[None]:
    waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    wake_ups.add_waiter(waiter)
    return waiter


async def pause() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@asynchronous
async def test_all_that_were_added_together_are_woken_together_behind_what_runs_now() -> None:
    wake_ups = Clocks().make()
    waiters = [sleeper(wake_ups) for _ in range(3)]
    assert not any(waiter.done() for waiter in waiters)
    await asyncio.sleep(0)
    assert all(waiter.done() for waiter in waiters)


@asynchronous
async def test_with_time_to_spare_the_next_wave_is_at_once() -> None:
    clocks = Clocks()
    wake_ups = clocks.make()
    await sleeper(wake_ups)
    clocks.now_s += 0.010
    clocks.busy_s += 0.010 * BUSY_SHARE * 0.9
    waiter = sleeper(wake_ups)
    await pause()
    assert waiter.done()


@asynchronous
async def test_waiting_for_a_cpu_puts_off_the_next_wave() -> None:
    clocks = Clocks()
    wake_ups = clocks.make()
    await sleeper(wake_ups)
    clocks.now_s += 0.010
    clocks.waited_s += 0.009  # 15 ms at the allowed share
    waiter = sleeper(wake_ups)
    await pause()
    assert not waiter.done()
    clocks.now_s += 0.006
    await waiter


@asynchronous
async def test_a_busy_router_lets_tokens_pile_up_until_it_has_rested() -> None:
    clocks = Clocks()
    wake_ups = clocks.make()
    await sleeper(wake_ups)
    clocks.now_s += 0.010
    clocks.busy_s += 0.009  # 15 ms at the allowed share
    first = sleeper(wake_ups)
    await pause()
    second = sleeper(wake_ups)
    await asyncio.sleep(0.02)
    assert not first.done()  # by its clock no time has passed
    clocks.now_s += 0.006
    async with asyncio.timeout(5):
        await asyncio.gather(first, second)


@asynchronous
async def test_no_rest_is_longer_than_its_limit_however_busy_the_router() -> None:
    clocks = Clocks()
    wake_ups = clocks.make()
    await sleeper(wake_ups)
    clocks.busy_s += 1000.0
    clocks.now_s += LONGEST_REST_S
    waiter = sleeper(wake_ups)
    await pause()
    assert waiter.done()


@asynchronous
async def test_who_left_in_the_meantime_is_not_woken() -> None:
    wake_ups = Clocks().make()
    gone, there = sleeper(wake_ups), sleeper(wake_ups)
    gone.cancel()
    await there
    assert gone.cancelled()
