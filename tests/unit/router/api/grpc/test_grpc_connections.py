"""Connections and calls of the gRPC API that say nothing, send bombs, or take nothing."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import logging
from collections.abc import Sequence
from pathlib import Path

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.access.tls import TlsFiles
from baton.api.errors import OverloadedError
from baton.api.outputs import Completion
from baton.client.client import AsyncClient
from baton.link.words import CancelCommand
from baton.serving import held_calls
from baton.serving.connection_limits import RpcLimits
from baton.serving.rpc import RpcServer, open_channel
from baton.v1 import inference_pb2, types_pb2
from baton.wire import types as wire_types
from tests.fakes.network.certificates import Authority
from tests.fakes.network.raw_http2 import (
    DATA,
    PREFACE,
    RST_STREAM,
    RawHttp2,
    call_frames,
    frame,
)
from tests.fakes.router.grpc_scene import params, served
from tests.fakes.router.http_scene import until
from tests.fakes.router.router_scene import asynchronous

pytestmark = pytest.mark.medium

GENERATE = "/baton.v1.Inference/Generate"
LIST_MODELS = "/baton.v1.Inference/ListModels"
SHORT = RpcLimits(handshake_timeout_s=0.3, idle_timeout_s=0.5, stall_timeout_s=0.4)
# Without a short handshake timeout: a busy machine delays clients that do connect.
PATIENT = RpcLimits(idle_timeout_s=0.5, stall_timeout_s=0.4)


def generate(max_tokens: int, *, resumable: bool = False) -> bytes:
    """A serialized request."""
    return inference_pb2.GenerateRequest(
        request_id="one",
        token_ids=types_pb2.TokenIds(ids=[1, 2]),
        sampling_params=wire_types.sampling_params_to_proto(params(max_tokens)),
        resumable=resumable,
    ).SerializeToString()


async def is_closed(address: str, data: bytes) -> bool:
    """Whether the server ends a connection that sends so much and no more."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    try:
        while await reader.read(2**16):
            pass
    except ConnectionResetError:
        pass
    writer.close()
    return True


# ------------------------------------------------------------------ who takes nothing


@pytest.mark.parametrize("resumable", [False, True])
@pytest.mark.parametrize("deadline", [(), (("grpc-timeout", "99999999H"),)], ids=["none", "huge"])
def test_who_takes_nothing_is_cut_off_and_its_request_ended(
    deadline: Sequence[tuple[str, str]], resumable: bool, caplog: pytest.LogCaptureFixture
) -> None:
    @asynchronous
    async def run() -> None:
        async with served(limits=RpcLimits(stall_timeout_s=0.4)) as (scene, client):
            silent = await RawHttp2.connect(scene.address, window=0)
            message = generate(10**6 if not resumable else 64, resumable=resumable)
            silent.send(call_frames(1, GENERATE, message, headers=deadline))
            await until(lambda: scene.dispatcher.num_open == 1)
            assert (await client.generate([1, 2], params(8))).token_ids
            await until(lambda: any("took nothing for 0.4 s" in text for text in caplog.messages))
            await until(lambda: scene.dispatcher.num_open == 0)
            for hand in (scene.prefill, scene.decode):
                assert hand.node.legs == {}
                assert hand.node.load.num_open_requests == 0
            if not resumable:  # it is not finished: its nodes are told
                assert scene.decode.of(CancelCommand)
            # Should it read on, it hears what was said before, and how it ended.
            silent.open_window(1, 2**20)
            await until(lambda: 1 in silent.ended)
            assert b"the client took nothing for 0.4 s" in silent.trailers
            await silent.close()

    caplog.set_level(logging.INFO)
    run()
    assert [record for record in caplog.records if record.levelno > logging.INFO] == []


def test_nothing_is_left_of_one_that_goes_away_behind_it(caplog: pytest.LogCaptureFixture) -> None:
    @asynchronous
    async def run() -> None:
        async with served(limits=PATIENT) as (scene, _):
            before = len(asyncio.all_tasks())
            silent = await RawHttp2.connect(scene.address, window=0)
            silent.send(call_frames(1, GENERATE, generate(10**6)))
            await until(lambda: scene.dispatcher.num_open == 1)
            await until(lambda: scene.dispatcher.num_open == 0)
            await silent.close()
            await until(lambda: len(asyncio.all_tasks()) <= before)

    run()
    assert caplog.records == []


@asynchronous
async def test_one_that_waits_for_tokens_is_not_cut_off() -> None:
    async with served(limits=PATIENT) as (scene, client):
        scene.talks.clear()  # as while a long prompt is computed
        reading = asyncio.create_task(client.generate([1, 2], params(8)))
        await asyncio.sleep(1.5)
        assert not reading.done()
        scene.talks.set()
        assert len((await reading).token_ids) == 8


@asynchronous
async def test_a_deadline_of_years_is_the_longest_that_is_allowed() -> None:
    async with served(max_timeout_s=7) as (scene, client):
        await client.generate([1, 2], params(2), timeout_s=10**6)
        await client.generate([1, 2], params(2), timeout_s=5)
        long, short = (call.timeout_s for call in scene.dispatcher.calls)
        assert long == 7
        assert 4 < short < 6


# ------------------------------------------------------------------ who says nothing


@pytest.mark.parametrize(
    "data", [b"", PREFACE[:10], PREFACE, b"GET / HTTP/1.1\r\n"], ids=["", "half", "whole", "HTTP"]
)
def test_who_says_nothing_is_cut_off(data: bytes) -> None:
    @asynchronous
    async def run() -> None:
        async with served(limits=SHORT) as (scene, _):
            assert await asyncio.wait_for(is_closed(scene.address, data), 8)

    run()


@pytest.mark.parametrize("data", [b"", b"\x16\x03\x01\x02\x00\x01"], ids=["", "half a hello"])
def test_a_tls_handshake_that_does_not_end_is_cut_off(data: bytes, tmp_path: Path) -> None:
    files = TlsFiles(Authority(tmp_path).issue("router"))

    @asynchronous
    async def run() -> None:
        server = RpcServer([], lambda _: None, limits=SHORT, tls=files)
        address = await server.start("127.0.0.1:0")
        assert await asyncio.wait_for(is_closed(address, data), 8)
        await server.stop(0)

    run()


@asynchronous
async def test_an_idle_connection_is_closed_and_a_client_comes_again_unasked() -> None:
    async with served(limits=PATIENT) as (scene, client):
        idle = await RawHttp2.connect(scene.address)
        idle.send(call_frames(1, LIST_MODELS, b""))
        await client.models()
        await asyncio.wait_for(idle.is_closed.wait(), 8)
        await idle.close()
        await client.models()


async def is_answered(address: str) -> bool:
    """Whether a new connection gets an answer; closed otherwise."""
    one = await RawHttp2.connect(address)
    one.send(call_frames(1, LIST_MODELS, b""))
    await until(lambda: 1 in one.ended or one.is_closed.is_set())
    await one.close()
    return 1 in one.ended


@asynchronous
async def test_more_connections_than_allowed_are_closed_as_they_come() -> None:
    async with served(limits=RpcLimits(max_connections=4)) as (scene, client):
        await client.models()  # holds one of them
        held = [await RawHttp2.connect(scene.address) for _ in range(3)]
        await until(lambda: all(one.reader.at_eof() is False for one in held))
        for _ in range(20):
            assert await asyncio.wait_for(is_closed(scene.address, b""), 8)
        await client.models()
        for one in held:
            await one.close()
        async with asyncio.timeout(20):  # there is room again, when the server has seen them go
            while not await is_answered(scene.address):
                pass


# ------------------------------------------------------------------ bombs


@asynchronous
async def test_a_compressed_message_is_refused_and_not_inflated() -> None:
    async with served() as (scene, client):
        bomb = gzip.compress(bytes(7 * 2**20))  # 7 KB
        raw = await RawHttp2.connect(scene.address)
        for stream in range(1, 200, 2):
            headers = [("grpc-encoding", "gzip")]
            raw.send(call_frames(stream, GENERATE, bomb, headers=headers, compressed=True))
        await until(lambda: len(raw.ended) == 100)
        assert b"is disabled" in raw.trailers
        assert scene.dispatcher.calls == []
        await raw.close()
        await client.models()


# ------------------------------------------------------------------ calls that are no requests


async def generate_once_there_is_room(client: AsyncClient) -> Completion:
    """Ask again until the server has seen that another connection's call was cancelled."""
    async with asyncio.timeout(8):
        while True:
            with contextlib.suppress(OverloadedError):
                return await client.generate([1, 2], params(2))


@pytest.mark.parametrize(
    ("path", "what"),
    [
        ("/grpc.health.v1.Health/Watch", "health watches"),
        ("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", "reflection streams"),
        (GENERATE, "calls without a message"),
    ],
)
def test_a_caller_holds_only_so_many_calls_that_are_no_requests(
    path: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: 16,000 such calls took 400 MiB for as long as the client liked."""
    for name in ("MAX_STREAMS", "MAX_MESSAGE_STREAMS", "MAX_WAITING"):
        monkeypatch.setattr(held_calls, name, 3)

    @asynchronous
    async def run() -> None:
        async with served() as (scene, client):
            raw = await RawHttp2.connect(scene.address)
            for stream in (1, 3, 5, 7):
                whole = call_frames(stream, path, b"")
                is_whole = path.endswith("Watch")
                raw.send(whole if is_whole else whole[: -len(frame(DATA, payload=bytes(5)))])
            await until(lambda: 7 in raw.ended)
            assert f"{what}: one caller may have 3 at once".encode() in raw.trailers
            assert raw.ended == {7}
            raw.send(frame(RST_STREAM, 0, 1, bytes(4)))
            assert await generate_once_there_is_room(client)
            await raw.close()

    run()


@asynchronous
async def test_a_watched_name_has_only_so_many_bytes() -> None:
    """The name is kept as long as the stream is open."""
    async with served() as (scene, _), open_channel(scene.address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch
        call = watch(health_pb2.HealthCheckRequest(service="x" * 1000))
        assert (await call.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        with pytest.raises(grpc.aio.AioRpcError, match="must have at most 65536 bytes"):
            await watch(health_pb2.HealthCheckRequest(service="x" * 70_000)).read()
