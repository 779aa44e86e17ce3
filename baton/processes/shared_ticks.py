"""Shared ticks: periodic tasks of an event loop wake together, so that an idle process sleeps."""

from __future__ import annotations

import asyncio

from baton.processes.ticks import next_tick


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
