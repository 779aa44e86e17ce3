"""Send bytes that are not UTF-8 wherever gRPC lets a stranger put them."""

from __future__ import annotations

import logging
import struct

import grpc.aio
import pytest

from tests.fakes.network.raw_http2 import DATA, HEADERS, RawHttp2, frame, header_field
from tests.fakes.router.grpc_scene import served
from tests.fakes.router.http_scene import until
from tests.fakes.router.router_scene import asynchronous

pytestmark = pytest.mark.medium

LIST_MODELS = b"/baton.v1.Inference/ListModels"
# Not UTF-8: a lone byte, a cut character, half of a surrogate pair.
ODD = (b"\xff", b"\xe2\x82", b"\xed\xa0\x80")
NAMES = (
    b"authorization",
    b"x-request-id",
    b"traceparent",
    b"user-agent",
    b"grpc-timeout",
    b"a-bin",
)


def call_of(path: bytes, name: bytes = b"x", value: bytes = b"y") -> bytes:
    """Return the frames of a call with an empty message and one more header."""
    fields = [
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", path),
        (b":authority", b"x"),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
        (name, value),
    ]
    block = b"".join(header_field(*field) for field in fields)
    message = struct.pack(">BI", 0, 0)
    return frame(HEADERS, 4, 1, block) + frame(DATA, 1, 1, message)


def odd_calls() -> list[bytes]:
    """Return the frames of every call of this test."""
    paths = [form % odd for odd in ODD for form in (b"/%s", b"/%s/x", LIST_MODELS + b"%s")]
    in_values = [call_of(LIST_MODELS, name, odd) for name in NAMES for odd in ODD]
    in_names = [call_of(LIST_MODELS, b"x" + odd) for odd in ODD]
    return [*map(call_of, paths), *in_values, *in_names]


def test_odd_bytes_end_their_own_call_only(caplog: pytest.LogCaptureFixture) -> None:
    """Regression: one call of a method whose name is not UTF-8 stopped the whole server."""

    @asynchronous
    async def run() -> None:
        async with served() as (scene, client):
            for call in odd_calls():
                connection = await RawHttp2.connect(scene.address)
                connection.send(call)
                await until(lambda c=connection: 1 in c.ended or c.is_closed.is_set())  # type: ignore[misc]
                await connection.close()
            assert await client.models()

    caplog.set_level(logging.INFO)
    run()
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []


@asynchronous
async def test_a_server_stops_while_it_refuses_unknown_methods() -> None:
    async with served() as (scene, _), grpc.aio.insecure_channel(scene.address) as channel:
        for name in ("/a/b", "/c/d"):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary(name, bytes, bytes)(b"")
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
