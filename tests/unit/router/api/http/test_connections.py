"""Connections of the HTTP API that send nothing, half of something, too much, or take nothing."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import zlib

import pytest

from baton.api.outputs import FinishReason
from baton.serving.connection_limits import ConnectionLimits
from baton.serving.connections import Listener
from router.api.http import exchange
from tests.fakes.router.http_scene import HttpScene, on_http, until
from tests.fakes.router.router_scene import asynchronous

pytestmark = pytest.mark.medium

HALF = b"GET /health HTTP/1.1\r\nHost: x\r\nX-Slow: "
WHOLE = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
CHUNKED = (
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
SHORT = ConnectionLimits(header_timeout_s=0.2, idle_timeout_s=0.4)
FEW = ConnectionLimits(max_connections=6, max_connections_per_address=6)
FEW_OF_ONE = ConnectionLimits(max_connections=100, max_connections_per_address=3)

Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connect(scene: HttpScene, data: bytes = b"", *, of: str = "127.0.0.1") -> Ends:
    """A connection of this address that has sent so much."""
    host, _, port = scene.url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), local_addr=(of, 0))
    writer.write(data)
    return reader, writer


async def status_of(scene: HttpScene, data: bytes) -> tuple[int, bytes]:
    """The answer to some bytes, from a connection of its own; 0 for none."""
    reader, writer = await connect(scene, data)
    head = await reader.readuntil(b"\r\n\r\n")
    writer.close()
    return int(head.split()[1]), head


async def is_cut(reader: asyncio.StreamReader) -> bool:
    """Whether a connection ends; what came before does not matter."""
    try:
        while await reader.read(2**16):
            pass
    except ConnectionResetError:
        pass
    return True


def request(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", *headers]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body


# ------------------------------------------------------------------ that send nothing


@pytest.mark.parametrize("data", [b"", HALF, b"\r\n"], ids=["silent", "half", "empty line"])
@on_http(limits=SHORT)
async def test_who_sends_no_request_in_time_is_cut_off(scene: HttpScene, data: bytes) -> None:
    reader, writer = await connect(scene, data)
    assert await asyncio.wait_for(is_cut(reader), 5)
    writer.close()


@on_http(limits=SHORT)
async def test_a_header_that_comes_byte_by_byte_does_not_keep_a_connection(
    scene: HttpScene,
) -> None:
    reader, writer = await connect(scene, HALF)

    async def drip() -> None:
        while True:
            writer.write(b"a")
            await asyncio.sleep(0.02)

    dripping = asyncio.create_task(drip())
    assert await asyncio.wait_for(is_cut(reader), 5)
    dripping.cancel()
    writer.close()


@pytest.mark.parametrize("second", [b"", HALF], ids=["silent", "half"])
@on_http(limits=SHORT)
async def test_who_sends_no_second_request_in_time_is_cut_off(
    scene: HttpScene, second: bytes
) -> None:
    reader, writer = await connect(scene, WHOLE + second)
    await reader.readuntil(b"ok\n")
    assert await asyncio.wait_for(is_cut(reader), 5)
    writer.close()


@on_http(limits=ConnectionLimits(idle_timeout_s=0.4))
async def test_a_request_may_take_longer_than_a_connection_may_be_idle(scene: HttpScene) -> None:
    reply = scene.post(stream=False)
    command = await scene.command()
    await asyncio.sleep(1)  # of its idle time, 0.4 s
    scene.say(command, 0, "x", last=FinishReason.STOP)
    assert (await reply).status == 200


# ------------------------------------------------------------------ that are too many


@on_http(limits=FEW)
async def test_idle_and_half_open_connections_make_way_for_new_ones(scene: HttpScene) -> None:
    waiting = [await connect(scene, data) for data in [b"", HALF, WHOLE] * 5]
    for _ in range(20):
        assert (await status_of(scene, WHOLE))[0] == 200
    for reader, _ in waiting[:9]:  # those that waited longest
        assert await asyncio.wait_for(is_cut(reader), 5)
    assert scene.server.connections.refused == 0
    for _, writer in waiting:
        writer.close()


@on_http(limits=FEW)
async def test_a_connection_at_work_makes_way_for_nobody(scene: HttpScene) -> None:
    replies = [scene.post(stream=True) for _ in range(6)]
    commands = [await scene.command(number + 1) for number in range(6)]
    reader, writer = await connect(scene, WHOLE)
    assert await asyncio.wait_for(is_cut(reader), 5)
    writer.close()
    for command in commands:
        scene.say(command, 0, "x", last=FinishReason.STOP)
    for reply in replies:
        response = await reply
        assert "[DONE]" in await response.text()
    assert (await status_of(scene, WHOLE))[0] == 200  # in the place of one that is idle now


@on_http(limits=FEW_OF_ONE)
async def test_one_address_has_its_share_and_another_ones_stay(scene: HttpScene) -> None:
    others = [await connect(scene, of="127.0.0.2") for _ in range(3)]
    mine = [await connect(scene, HALF) for _ in range(30)]
    for reader, _ in mine[:27]:
        assert await asyncio.wait_for(is_cut(reader), 5)
    for reader, writer in others:
        writer.write(WHOLE)
        assert b" 200 " in await reader.readline()
    for _, writer in (*mine, *others):
        writer.close()


@on_http(limits=FEW)
async def test_nothing_is_kept_of_connections_that_ended(scene: HttpScene) -> None:
    for _ in range(30):
        _, writer = await connect(scene, HALF)
        writer.close()
    counts = scene.server.connections
    await until(lambda: counts.accepted == 30 and counts.open == 0)
    assert scene.server.connections.at_work == 0


# ------------------------------------------------------------------ bodies


@pytest.mark.parametrize("path", ["/v1/completions", "/nowhere", "/health"])
@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "x-unknown"])
@on_http()
async def test_a_compressed_body_is_refused_before_it_is_read(
    scene: HttpScene, path: str, coding: str
) -> None:
    body = json.dumps({"model": "demo", "prompt": "x"}).encode()
    packed = zlib.compress(body) if coding == "deflate" else gzip.compress(body)
    head = request(path, packed, f"Content-Encoding: {coding}")
    status, text = await status_of(scene, head[: -len(packed)])  # all but the body
    assert status == 415
    assert scene.dispatcher.num_open == 0
    assert b"Connection: keep-alive" not in text


@pytest.mark.parametrize(
    ("content_type", "expected"),
    [
        ("application/json" + ";" * 7_900, 400),  # read for 2 s and more, with nobody else served
        ("application/json; " + 'a="' * 2_600, 400),
        ("Application/JSON ; charset=utf-8", 400),
        (";" * 8_000, 415),
        ("application/jsonx", 415),
    ],
    ids=["many", "quotes", "usual", "none", "other"],
)
@on_http()
async def test_of_a_content_type_only_its_beginning_is_read(
    scene: HttpScene, content_type: str, expected: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("aiohttp.helpers.parse_content_type", None)  # quadratic
        body = b"{"  # which is no JSON
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: {content_type}\r\n"
        data = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        assert (await status_of(scene, data))[0] == expected


@on_http()
async def test_few_long_bodies_of_one_caller_come_at_once(scene: HttpScene) -> None:
    """Regression: five hundred connections could hold four gigabytes of half-sent bodies."""
    body = json.dumps({"model": "demo", "prompt": "x", "stop": ["s" * 1001]}).encode()
    long = body + b" " * 2**16
    callers = scene.server._runner.app[exchange.BODIES]._coming._callers
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("baton.serving.held_calls.MAX_COMING", 2)
        slow = [await connect(scene, request("/v1/completions", long)[:-2]) for _ in range(2)]
        await until(lambda: [one.turns.locked() for one in callers.values()] == [True])
        reader, writer = await connect(scene, request("/v1/completions", long))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await reader.readuntil(b"\r\n\r\n")
        assert (await status_of(scene, request("/v1/completions", body)))[0] == 400  # a short one
        patch.setattr(exchange, "BODY_TIMEOUT_S", 0.1)  # in force from the next byte on
        for slow_reader, slow_writer in slow:
            slow_writer.write(b" ")
            assert b" 408 " in await slow_reader.readuntil(b"\r\n\r\n")
            slow_writer.close()
        assert b" 400 " in await reader.readuntil(b"\r\n\r\n")
        writer.close()


@on_http()
async def test_an_unknown_path_or_method_is_answered_before_its_body(scene: HttpScene) -> None:
    for method, path, expected in (
        ("POST", "/nowhere", 404),
        ("POST", "/health", 405),
        ("PUT", "/v1/completions", 405),
        ("BREW", "/v1/completions", 400),
    ):
        head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 4000000\r\n\r\n"
        assert (await status_of(scene, head.encode()))[0] == expected


@on_http()
async def test_a_chunked_body_without_end_is_refused_at_the_limit(scene: HttpScene) -> None:
    reader, writer = await connect(scene, CHUNKED)
    chunk = b"100000\r\n" + b" " * 2**20 + b"\r\n"

    async def send() -> None:
        for _ in range(40):
            writer.write(chunk)
            await writer.drain()

    sending = asyncio.create_task(send())
    assert b" 413 " in await reader.readline()
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    writer.close()


@on_http()
async def test_a_body_that_comes_too_slowly_is_refused(scene: HttpScene) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "BODY_TIMEOUT_S", 0.3)
        patch.setattr(exchange, "MIN_BODY_BYTES_PER_S", 1000)
        reader, writer = await connect(scene, request("/v1/completions", b" " * 4000)[:-3900])
        writer.write(b" " * 400)  # of its own half a second more
        line = await asyncio.wait_for(reader.readuntil(b"}"), 10)
        assert b" 408 " in line
        assert b"500 bytes came" in line
        writer.close()


@pytest.mark.parametrize("data", [b"1;" + b"a" * 2**20, b"0" * 2**20], ids=["extension", "size"])
@on_http()
async def test_a_chunk_whose_first_line_has_no_end_is_no_body(
    scene: HttpScene, data: bytes
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "BODY_TIMEOUT_S", 0.3)
        reader, writer = await connect(scene, CHUNKED + data)
        line = await asyncio.wait_for(reader.readuntil(b"}"), 10)
        assert b" 408 " in line
        assert b"0 bytes came" in line
        writer.close()


@on_http()
async def test_what_a_chunk_has_beside_its_bytes_is_not_kept(scene: HttpScene) -> None:
    body = json.dumps({"model": "demo", "prompt": "x", "max_tokens": 1}).encode()
    chunks = b"".join(b"1;" + b"a" * 4000 + b"\r\n%c\r\n" % byte for byte in body)
    reader, writer = await connect(scene, CHUNKED + chunks + b"0\r\nX-Behind: y\r\n\r\n")
    scene.say(await scene.command(), 0, "x", last=FinishReason.LENGTH)
    assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
    writer.close()


# ------------------------------------------------------------------ odd requests


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 9000 + b"\r\n\r\n", 400),
        (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"X-A: b\r\n" * 500 + b"\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost : x\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\n folded: x\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 40 + b"\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            400,
        ),
        (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n"
            b"Content-Length: 6\r\n\r\nhello",
            400,
        ),
        (b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"X-A: b\r\n" * 128 + b"\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"X-A: b\r\n" * 126 + b"\r\n", 200),
        (b"GET /" + b"a" * 2**20, 400),
        (b"GET /health HTTP/1.1\r\nX-Long: " + b"a" * 2**20, 400),
        (b"GET /health HTTP/1.1\nHost: x\n\n", 400),
        (b"GET /health HTTP/1.2\r\nHost: x\r\n\r\n", 400),
        (CHUNKED + b"1ffffffffffffffff\r\n", 400),
        (CHUNKED + b"-1\r\n", 400),
        (CHUNKED + b"0\r\n" + b"X-A: b\r\n" * 500 + b"\r\n", 400),
        (CHUNKED + b"0\r\nX-Long: " + b"a" * 2**20, 400),
        (CHUNKED.replace(b"HTTP/1.1", b"HTTP/1.0") + b"0\r\n\r\n", 400),
        (CHUNKED.replace(b"chunked", b"xchunked") + b"0\r\n\r\n", 400),
        (b"GET /health HTTP/1.0\r\n\r\n", 200),
        (b"GET http://elsewhere/health HTTP/1.1\r\nHost: x\r\n\r\n", 200),
        (b"GET /health HTTP/1.1\r\nHost: a/?\r\n\r\n", 200),
        (b"GET /health HTTP/1.1\r\nHost: x\r\nExpect: 200-maybe\r\n\r\n", 417),
        (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n"
            b"Content-Type: multipart/form-data; boundary=x\r\n\r\nhello",
            415,
        ),
    ],
    ids=lambda value: None if isinstance(value, int) else value[:20].decode("latin-1"),
)
@on_http()
async def test_an_odd_request_has_its_answer(scene: HttpScene, data: bytes, expected: int) -> None:
    assert (await status_of(scene, data))[0] == expected
    assert (await status_of(scene, WHOLE))[0] == 200


@on_http()
async def test_requests_behind_one_another_are_answered_in_order(scene: HttpScene) -> None:
    reader, writer = await connect(scene, WHOLE * 300)
    text = b""
    while text.count(b"ok\n") < 300:
        text += await reader.read(2**16)
    assert len(re.findall(rb"HTTP/1.1 200", text)) == 300
    assert scene.server.connections.open == 1
    writer.close()


@on_http()
async def test_a_client_that_asks_whether_to_send_its_body_is_told(scene: HttpScene) -> None:
    body = json.dumps({"model": "demo", "prompt": "x", "max_tokens": 1}).encode()
    whole = request("/v1/completions", body, "Expect: 100-continue")
    reader, writer = await connect(scene, whole[: -len(body)])
    assert b" 100 " in await reader.readuntil(b"\r\n\r\n")
    writer.write(body)
    scene.say(await scene.command(), 0, "x", last=FinishReason.LENGTH)
    assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
    writer.close()


@asynchronous
async def test_little_is_read_of_a_connection_in_one_turn() -> None:
    """Regression: 256 KiB in chunks of one byte blocked the event loop for half a second."""
    sizes: list[int] = []

    class Taking(asyncio.Protocol):
        def data_received(self, data: bytes) -> None:
            sizes.append(len(data))

    listener = Listener(Taking)
    address = await listener.start("listen", "127.0.0.1:0")
    host, _, port = address.rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(bytes(2**20))
    await until(lambda: sum(sizes) == 2**20)
    writer.close()
    listener.close()
    assert max(sizes) <= 2**14
