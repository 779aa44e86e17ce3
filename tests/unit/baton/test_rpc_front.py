"""Unit tests of RpcFront: accepted connections, and connections that gRPC has closed."""

from __future__ import annotations

import asyncio
import itertools
import socket
import time

import pytest
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from baton.serving import rpc
from baton.serving.connection_limits import RpcLimits
from baton.serving.http2 import rpc_front
from baton.serving.http2.call_pace import INTERVAL_S, MAX_AT_ONCE, CallPace
from baton.serving.http2.frames import cancel_frame
from baton.serving.http2.rpc_front import RpcFront
from baton.serving.rpc import RpcServer, open_channel
from tests.fakes.network.http2_tricks import block, headers
from tests.fakes.network.raw_http2 import PREFACE, SETTINGS, frame
from tests.fakes.router.http_scene import until
from tests.fakes.router.router_scene import asynchronous

pytestmark = pytest.mark.medium

PIECE = bytes(2**15)
MAX_PIECES = 2000


@asynchronous
async def test_a_client_that_takes_nothing_is_cut_off_when_grpc_has_closed_its_side() -> None:
    """Regression: the client's connection stayed open for ever and used up a place."""
    front = RpcFront(RpcLimits(idle_timeout_s=0.5))
    upstream: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()
    grpc = await asyncio.start_unix_server(
        lambda _, writer: upstream.put_nowait(writer), front.private_address.removeprefix("unix:")
    )
    host, _, port = (await front.start("127.0.0.1:0")).rpartition(":")
    _, client = await asyncio.open_connection(host, int(port))
    client.transport.pause_reading()  # type: ignore[attr-defined]  # of every socket
    client.write(PREFACE + frame(SETTINGS))
    server = await upstream.get()
    [side] = front._sides
    assert side._client is not None
    # A larger buffer takes megabytes; sending them may take longer than the idle timeout.
    sock = side._client.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**16)
    for _ in range(MAX_PIECES):  # fewer bytes than those that a stalled client is cut off for
        if side._client.get_write_buffer_size():
            break
        server.write(PIECE)
        await asyncio.sleep(0.002)
    assert front.listener.counts.open == 1
    server.close()
    await until(lambda: front.listener.counts.open == 0)
    client.close()
    grpc.close()
    await front.close()


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
@asynchronous
async def test_all_addresses_are_those_of_both_families() -> None:
    """Regression: a port at `[::]`, which gRPC serves to both families, was closed to IPv4."""
    front = RpcFront(RpcLimits())
    port = int((await front.start("[::]:0")).rpartition(":")[2])
    for address in ("127.0.0.1", "::1"):
        _, client = await asyncio.open_connection(address, port)
        await until(lambda: front._sides)
        [side] = front._sides
        assert front.listener.address_of(side) == address
        client.close()
        await until(lambda: not front._sides)
    await front.close()


@asynchronous
async def test_calls_of_a_client_that_is_gone_are_cancelled_a_few_at_a_time() -> None:
    """Regression: gRPC cancelled thousands of calls at once, which blocked the loop for seconds."""
    front = RpcFront(RpcLimits())
    passed, has_ended = bytearray(), asyncio.Event()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(2**16):
            passed.extend(data)
        writer.close()
        has_ended.set()

    grpc = await asyncio.start_unix_server(take, front.private_address.removeprefix("unix:"))
    host, _, port = (await front.start("127.0.0.1:0")).rpartition(":")
    _, client = await asyncio.open_connection(host, int(port))
    calls = b"".join(headers(stream, block()) for stream in range(1, 401, 2))
    client.write(PREFACE + frame(SETTINGS) + calls)
    await until(lambda: passed.endswith(headers(399, block())))
    del passed[:]
    began_at = asyncio.get_running_loop().time()
    client.transport.abort()
    await has_ended.wait()
    cancelled = range(399, 2 * 16, -2)  # the last 16 end with the connection
    assert bytes(passed) == b"".join(map(cancel_frame, cancelled))
    num_intervals = len(cancelled) / MAX_AT_ONCE - 1
    assert asyncio.get_running_loop().time() - began_at > num_intervals * INTERVAL_S
    grpc.close()
    await front.close()


@asynchronous
async def test_fewer_calls_begin_while_the_event_loop_is_late() -> None:
    pace = CallPace(64, 0.02)
    turns: list[float] = []
    loop = asyncio.get_running_loop()

    def begin() -> None:
        turns.append(loop.time())
        time.sleep(0.002)

    for _ in range(400):
        pace.wait_turn(begin)
    await until(lambda: len(turns) == 400)
    sizes = [1]
    for before, after in itertools.pairwise(turns):
        if after - before > 0.01:  # another interval
            sizes.append(0)
        sizes[-1] += 1
    assert max(sizes) <= 64
    assert min(sizes[:-1]) <= 16
    pace.close()


def test_a_healthy_connection_outlives_calls_that_wait_longer_than_a_ping_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before, answers to pings waited behind the calls, and gRPC ended all streams after 60 s."""
    pings = [
        ("grpc.keepalive_time_ms", 300),
        ("grpc.keepalive_timeout_ms", 300),
        ("grpc.http2.ping_timeout_ms", 900),
    ]
    monkeypatch.setattr(rpc, "_SERVER_OPTIONS", [*rpc._SERVER_OPTIONS, *pings])
    monkeypatch.setattr(rpc_front, "CallPace", lambda: CallPace(1, 0.1))

    async def serve() -> None:
        server = RpcServer([], lambda _: None)
        address = await server.start("127.0.0.1:0")
        async with open_channel(address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            open_stream = stub.Watch(HealthCheckRequest())
            await open_stream.read()
            calls = [asyncio.ensure_future(stub.Check(HealthCheckRequest())) for _ in range(40)]
            await asyncio.gather(*calls)  # four seconds of turns
            await server.set_serving(False)
            assert (await open_stream.read()).status == HealthCheckResponse.NOT_SERVING
        await server.stop(0)

    asyncio.run(asyncio.wait_for(serve(), 60))
