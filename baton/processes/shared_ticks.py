"""Shared ticks: periodic tasks wake together, so that an idle process sleeps.

Ticks are multiples of an interval on the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import asyncio

SOON = 0.1  # share of an interval: a timer that fires early does not fire twice for one tick


def next_tick(now: float, interval_s: float, least: float = 0.5) -> float:
    """Return the first multiple of ``interval_s`` that is at least ``least`` intervals after now.

    Intervals that are multiples of each other share ticks.
    """
    return (int(now / interval_s + least) + 1) * interval_s


async def sleep_until_tick(interval_s: float, least: float = 0.5) -> float:
    """Sleep until the first shared tick that is at least ``least`` intervals away.

    An interval of 0 only lets other tasks run. Returns the seconds until the tick; the sleep itself
    is longer if the process stood still.
    """
    if not interval_s:
        await asyncio.sleep(0)
        return 0.0
    now = asyncio.get_running_loop().time()
    pause_s = next_tick(now, interval_s, least) - now
    await asyncio.sleep(pause_s)
    return pause_s
