"""Unit tests of many outputs as one stream: order, back-pressure, errors, ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import pytest

from baton.errors import NodeUnavailableError
from baton.outputs import FinishReason, TextDelta
from router.http.choices import join_deltas, merge
from tests.fakes.router_scene import asynchronous


class Source:
    """Streams that know how far they were read and that they were closed."""

    def __init__(self, num_streams: int, num_deltas: int = 5) -> None:
        self.num_read = [0] * num_streams
        self.closed = [False] * num_streams
        self.fails: set[int] = set()
        self.waits: set[int] = set()
        self._num_deltas = num_deltas
        self.streams = [self._stream(index) for index in range(num_streams)]

    async def _stream(self, number: int) -> AsyncGenerator[TextDelta, None]:
        try:
            for index in range(self._num_deltas):
                if number in self.waits:
                    await asyncio.Event().wait()
                if number in self.fails and index == 1:
                    raise NodeUnavailableError("gone")
                self.num_read[number] += 1
                yield TextDelta(str(number), index, (index,), f"{index} ")
                await asyncio.sleep(0)
        finally:
            self.closed[number] = True


@pytest.mark.parametrize("num_streams", [1, 2, 5])
def test_every_delta_arrives_once_and_in_its_streams_order(num_streams: int) -> None:
    async def run() -> None:
        source = Source(num_streams)
        merged = [item async for item in merge(source.streams)]
        assert len(merged) == 5 * num_streams
        for number in range(num_streams):
            found = [delta.output_index for index, delta in merged if index == number]
            assert found == list(range(5))
        assert all(source.closed)

    asyncio.run(run())


@asynchronous
async def test_a_slow_reader_holds_the_streams_up() -> None:
    source = Source(2, num_deltas=1000)
    async with contextlib.aclosing(merge(source.streams)) as merged:
        for _ in range(5):
            await anext(merged)
            for _ in range(50):
                await asyncio.sleep(0)
        # Those that were taken, those that wait, and one in the hands of each stream.
        assert sum(source.num_read) <= 5 + 2 + 2
    assert all(source.closed)


@asynchronous
async def test_who_stops_reading_ends_all_streams() -> None:
    source = Source(3)
    source.waits = {1}
    async with contextlib.aclosing(merge(source.streams)) as merged:
        await anext(merged)
    assert all(source.closed)


@pytest.mark.parametrize("num_streams", [1, 3])
def test_the_error_of_one_ends_all(num_streams: int) -> None:
    async def run() -> None:
        source = Source(num_streams)
        source.fails, source.waits = {0}, {2}
        with pytest.raises(NodeUnavailableError, match=r"^gone$"):
            assert [item async for item in merge(source.streams)] == []
        assert all(source.closed)

    asyncio.run(asyncio.wait_for(run(), 10))


def test_joined_deltas_are_one_output() -> None:
    parts = [TextDelta("a", 0, (1,), "x"), TextDelta("a", 1, (2, 3), "yz", FinishReason.STOP)]
    assert join_deltas(parts) == TextDelta("a", 0, (1, 2, 3), "xyz", FinishReason.STOP)
