"""Shared ticks: periodic tasks of one event loop wake together, so that an idle process sleeps."""

from __future__ import annotations

import asyncio


def next_tick(now: float, interval_s: float) -> float:
    """Return the first multiple of ``interval_s`` that is at least half an interval after ``now``.

    Intervals that are multiples of each other share ticks.
    """
    return (int(now / interval_s + 0.5) + 1) * interval_s


async def sleep_until_tick(interval_s: float) -> None:
    """Sleep until the next shared tick, for half an interval to one and a half.

    An interval of 0 only lets other tasks run.
    """
    if not interval_s:
        await asyncio.sleep(0)
        return
    now = asyncio.get_running_loop().time()
    await asyncio.sleep(next_tick(now, interval_s) - now)
