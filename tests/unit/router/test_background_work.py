"""What a router does beside its requests: a failure there is told, and the rest goes on."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from router import program


class Pool:
    """Fails the first time that it is asked to count."""

    def __init__(self) -> None:
        self.num_counts = 0

    def count_missed_beats(self) -> None:
        self.num_counts += 1
        if self.num_counts == 1:
            raise OSError(24, "Too many open files")


class Signals:
    """Counts ticks, and tells when there were three."""

    def __init__(self) -> None:
        self.num_ticks = 0
        self.were_three = asyncio.Event()

    def tick(self) -> None:
        self.num_ticks += 1
        if self.num_ticks == 3:
            self.were_three.set()


def test_silent_nodes_are_noticed_though_counting_has_failed_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(program, "BEAT_INTERVAL_S", 0.0)
    pool, signals = Pool(), Signals()

    async def watch() -> None:
        async with program._watching(cast("Any", pool), cast("Any", signals)), asyncio.timeout(10):
            await signals.were_three.wait()

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
