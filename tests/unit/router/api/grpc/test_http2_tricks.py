"""Send hostile frames: the guard refuses or slows them down, and other clients are served."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from baton.access.tls import TlsFiles
from baton.client.client import AsyncClient
from baton.serving.http2.frames import FrameLimits
from baton.serving.rpc import RpcServer
from tests.fakes.network.certificates import Authority
from tests.fakes.network.http2_tricks import (
    CHECK,
    TRICKS,
    Trick,
    block,
    flood,
    headers,
    literal,
    long_blocks,
)
from tests.fakes.network.raw_http2 import (
    DATA,
    PING,
    PREFACE,
    SETTINGS,
    RawHttp2,
    call_frames,
    frame,
)
from tests.fakes.router.grpc_scene import params, served
from tests.fakes.router.http_scene import until
from tests.fakes.router.router_scene import asynchronous

pytestmark = pytest.mark.medium

SECONDS = 1.0
# Most processor time until an answer; client, server and attacker share one loop here.
SOON_CPU_S = 2.0
# Most time until an answer or the end of a connection, less than each timeout of the server.
PATIENCE_S = 8.0
MODELS = "/baton.v1.Inference/ListModels"
ATTACKER = "127.0.0.2"  # one address is one caller, so others have places of their own
MAX_BYTES = 32 * 2**20  # most bytes that an attacker may get sent


async def attack(address: str, trick: Trick) -> tuple[RawHttp2, int]:
    """Send a trick's frames for a second, or until the server closes; return the bytes sent."""
    raw = await RawHttp2.connect(address, window=trick.window, source=ATTACKER)
    if not trick.reads:
        raw.writer.transport.pause_reading()  # type: ignore[attr-defined]  # of every socket
    end_at, num_bytes = time.monotonic() + SECONDS, 0
    for data in trick.frames():
        if time.monotonic() > end_at or raw.is_closed.is_set() or num_bytes > MAX_BYTES:
            break
        raw.send(data)
        num_bytes += len(data)
        with contextlib.suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(0.2):
                await raw.writer.drain()
        await asyncio.sleep(0)
    return raw, num_bytes


@contextlib.asynccontextmanager
async def asking(client: AsyncClient) -> AsyncIterator[list[float]]:
    """Send requests until the block ends; yields each answer's seconds of processor time."""
    took_cpu_s: list[float] = []

    async def ask() -> None:
        while True:
            began_at = time.process_time()
            async with asyncio.timeout(PATIENCE_S):
                assert len((await client.generate([1, 2], params(2))).token_ids) == 2
            took_cpu_s.append(time.process_time() - began_at)
            await asyncio.sleep(0.02)

    task = asyncio.create_task(ask())
    try:
        yield took_cpu_s
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def until_served(address: str) -> None:
    """Ask from an attacker's address until the places of the attacker, which has gone, are free."""
    end_at = time.monotonic() + PATIENCE_S
    while True:
        raw = await RawHttp2.connect(address, source=ATTACKER)
        raw.send(call_frames(1, MODELS, b""))
        await until(lambda raw=raw: raw.ended or raw.is_closed.is_set())  # type: ignore[misc]
        await raw.close()
        if b"grpc-status\x010" in raw.trailers:
            return
        assert time.monotonic() < end_at
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("trick", TRICKS, ids=lambda trick: trick.name)
def test_a_trick_is_refused_or_slowed_down_and_others_are_served(trick: Trick) -> None:
    @asynchronous
    async def run() -> None:
        async with served() as (scene, client):
            await client.models()
            async with asking(client) as took_cpu_s:
                raw, num_bytes = await attack(scene.address, trick)
                if trick.is_refused:
                    await asyncio.wait_for(raw.is_closed.wait(), PATIENCE_S)
                await until(lambda: took_cpu_s)
            assert max(took_cpu_s) < SOON_CPU_S
            assert num_bytes < MAX_BYTES or trick.is_bulk, "neither refused nor slowed down"
            await raw.close()
            await client.models()
            await until_served(scene.address)

    run()


@pytest.mark.parametrize(
    ("kind", "payload", "cost"),
    [(PING, bytes(8), 4), (SETTINGS, b"", 32)],
    ids=["ping", "settings"],
)
def test_only_so_many_control_frames_are_answered_each_second(
    kind: int, payload: bytes, cost: int
) -> None:
    @asynchronous
    async def run() -> None:
        async with served() as (scene, client):
            frames, began_at = flood(kind, payload), time.monotonic()
            raw = await RawHttp2.connect(scene.address)
            for _ in range(60):
                raw.send(next(frames))  # 500
            await asyncio.sleep(1.0)
            await client.models()
            limits, elapsed_s = FrameLimits(), time.monotonic() - began_at
            most_cost = limits.small_burst + limits.small_per_s * elapsed_s
            # Each answer has up to 17 bytes, which allow less than a fifth more cost.
            assert 0 < raw.num_answered < 1.2 * most_cost / cost
            await raw.close()

    run()


@pytest.mark.parametrize("num_bytes", [4000, 8000, 15_000])
def test_headers_of_many_kilobytes_are_served(num_bytes: int) -> None:
    @asynchronous
    async def run() -> None:
        async with served() as (scene, _):
            raw = await RawHttp2.connect(scene.address)
            long = block(more=literal(b"x-long", b"y" * num_bytes))
            raw.send(headers(1, long) + frame(DATA, 1, 1, bytes(5)))
            await until(lambda: raw.ended == {1})
            assert b"grpc-status\x010" in raw.trailers
            await raw.close()

    run()


@asynchronous
async def test_frames_may_come_byte_by_byte() -> None:
    async with served() as (scene, _):
        host, _, port = scene.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        for byte in PREFACE + frame(SETTINGS) + call_frames(1, CHECK, b""):
            writer.write(bytes([byte]))
            await asyncio.sleep(0)
        await asyncio.wait_for(reader.readuntil(b"grpc-status"), PATIENCE_S)
        writer.close()


@asynchronous
async def test_who_speaks_no_http2_is_told_so() -> None:
    async with served() as (scene, _):
        host, _, port = scene.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        answer = await reader.read()
        assert answer.startswith(frame(SETTINGS))
        assert answer.endswith(b"does not speak HTTP/2")
        writer.close()


# ------------------------------------------------------------------ with TLS


@contextlib.asynccontextmanager
async def tls_server(
    folder: Path, *, require_client_certs: bool
) -> AsyncIterator[tuple[str, ssl.SSLContext]]:
    """Yield a server's address, and a TLS context for a client without a certificate."""
    authority = Authority(folder)
    files = TlsFiles(authority.issue("router"))
    server = RpcServer([], lambda _: None, tls=files, require_client_certs=require_client_certs)
    address = await server.start("127.0.0.1:0")
    context = ssl.create_default_context(cafile=authority.ca_file)
    context.set_alpn_protocols(["h2"])
    yield address, context
    await server.stop(0)


def test_tricks_over_tls_are_refused(tmp_path: Path) -> None:
    @asynchronous
    async def run() -> None:
        async with tls_server(tmp_path, require_client_certs=False) as (address, context):
            raw = await RawHttp2.connect(address, tls=context)
            raw.send(call_frames(1, CHECK, b""))
            await until(lambda: raw.ended == {1})
            for _, data in zip(range(40), long_blocks(), strict=False):
                raw.send(data)
            await asyncio.wait_for(raw.is_closed.wait(), PATIENCE_S)
            await raw.close()

    run()


def test_where_certificates_are_required_no_frame_of_a_stranger_is_read(tmp_path: Path) -> None:
    @asynchronous
    async def run() -> None:
        async with tls_server(tmp_path, require_client_certs=True) as (address, context):
            raw = await RawHttp2.connect(address, tls=context)
            raw.send(call_frames(1, CHECK, b""))
            await asyncio.wait_for(raw.is_closed.wait(), PATIENCE_S)
            assert raw.num_settings == 0
            await raw.close()

    run()
