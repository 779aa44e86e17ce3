"""VirtualTimeLoop: time passes only while nothing can be done, and as much as was waited."""

from __future__ import annotations

import asyncio
import time

import pytest

from sim_node.virtual_time import VirtualTimeLoop


def test_an_hour_passes_at_once_and_timers_fire_in_their_order() -> None:
    seen: list[tuple[str, float]] = []

    async def sleep(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        seen.append((name, asyncio.get_running_loop().time()))

    async def run() -> None:
        await asyncio.gather(sleep("late", 3600.0), sleep("early", 0.5), sleep("next", 1.0))

    loop = VirtualTimeLoop()
    began_s = time.monotonic()
    loop.run_until_complete(run())
    loop.close()
    assert time.monotonic() - began_s < 60  # not an hour
    assert [name for name, _ in seen] == ["early", "next", "late"]
    assert [when for _, when in seen] == pytest.approx([0.5, 1.0, 3600.0])


def test_a_loop_on_which_nothing_can_ever_happen_says_so() -> None:
    loop = VirtualTimeLoop()
    with pytest.raises(RuntimeError, match="none for a timer"):
        loop.run_until_complete(asyncio.Event().wait())
    loop.close()
