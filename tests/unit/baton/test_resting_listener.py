"""A listener has a timer only while some connection has a time limit."""

from __future__ import annotations

import asyncio

from baton.serving.connection_limits import ConnectionLimits
from baton.serving.connections import Listener


def test_a_listener_without_waiting_connections_has_no_timer() -> None:
    async def run() -> None:
        listener = Listener(asyncio.Protocol, ConnectionLimits(header_timeout_s=0.2))
        host, port = (await listener.start("listen", "127.0.0.1:0")).split(":")
        assert listener._sweep is None
        reader, writer = await asyncio.open_connection(host, int(port))
        assert await asyncio.wait_for(reader.read(), 20) == b""  # cut off, because it sends nothing
        assert listener.counts.timed_out == 1
        assert listener._sweep is None
        writer.close()
        listener.close()

    asyncio.run(run())


def test_a_connection_that_waits_again_gets_a_timer_again() -> None:
    async def run() -> None:
        protocol, is_accepted = asyncio.Protocol(), asyncio.Event()

        def make() -> asyncio.Protocol:
            is_accepted.set()
            return protocol

        limits = ConnectionLimits(header_timeout_s=60, idle_timeout_s=0.2)
        listener = Listener(make, limits)
        host, port = (await listener.start("listen", "127.0.0.1:0")).split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        await is_accepted.wait()
        with listener.working(protocol):
            await asyncio.sleep(0.2)  # the present timer ends
            assert listener._sweep is None
        assert await asyncio.wait_for(reader.read(), 20) == b""
        assert listener.counts.timed_out == 1
        writer.close()
        listener.close()

    asyncio.run(run())
