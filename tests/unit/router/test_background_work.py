"""A failure of a router's background work is logged, and the rest goes on."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from router import program


class Pool:
    """A pool that fails the first time it counts missed beats."""

    def __init__(self) -> None:
        self.num_counts = 0

    def count_missed_beats(self) -> None:
        self.num_counts += 1
        if self.num_counts == 1:
            raise OSError(24, "Too many open files")


class Signals:
    """Counts ticks."""

    num_ticks = 0

    def tick(self) -> None:
        self.num_ticks += 1


def test_silent_nodes_are_noticed_though_counting_has_failed_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(program, "BEAT_INTERVAL_S", 0.0)
    pool, signals = Pool(), Signals()

    async def watch() -> None:
        async with program._watching(cast("Any", pool), cast("Any", signals)), asyncio.timeout(10):
            while signals.num_ticks < 3:  # noqa: ASYNC110
                await asyncio.sleep(0)

    asyncio.run(watch())
    assert pool.num_counts >= 4
    assert "missed beats could not be counted" in caplog.text


def test_work_in_the_background_that_fails_is_told_and_ends_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fail() -> None:
        raise OSError(24, "Too many open files")

    async def serve() -> str:
        async with program._in_background(fail()):
            await asyncio.sleep(0.01)
            return "served"

    assert asyncio.run(serve()) == "served"
    assert "has failed and is given up" in caplog.text
    assert "Too many open files" in caplog.text
