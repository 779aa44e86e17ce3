"""Tests that a failure in the router's background work is logged, and the router goes on."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from baton.api.errors import NodeUnavailableError
from router import program


class Pool:
    """Fails the first time that it is asked to count."""

    def __init__(self) -> None:
        self.num_counts = 0

    members = ()

    def count_missed_beats(self, num_intervals: int) -> None:
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


class Workers:
    """Fails to prepare the first time, and waits the second time until a test lets it end."""

    def __init__(self) -> None:
        self.num_tries = 0
        self.waits, self.may_end = asyncio.Event(), asyncio.Event()

    async def prepare(self) -> None:
        self.num_tries += 1
        if self.num_tries == 1:
            raise NodeUnavailableError("no process can be started to read requests")
        self.waits.set()
        await self.may_end.wait()


class Server:
    """Notes what its health checks say."""

    def __init__(self) -> None:
        self.is_serving = False

    async def set_serving(self, serving: bool) -> None:
        self.is_serving = serving


@pytest.mark.parametrize("is_stopping", [False, True])
def test_a_router_is_healthy_once_its_workers_read_requests(
    is_stopping: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(program, "_RETRY_S", 0.0)
    servers = [Server(), Server()]

    async def start() -> None:
        workers, stopping = Workers(), asyncio.Event()
        becoming = asyncio.create_task(
            program._become_ready(
                [cast("Any", SimpleNamespace(reader=workers))], cast("Any", servers), stopping
            )
        )
        async with asyncio.timeout(10):
            await workers.waits.wait()
            assert not any(server.is_serving for server in servers)
            if is_stopping:
                stopping.set()
            workers.may_end.set()
            await becoming

    asyncio.run(start())
    assert [server.is_serving for server in servers] == [not is_stopping] * 2
    assert "not ready: no process can be started" in caplog.text
