"""Unit tests of the HTTP API over hand-driven nodes: streams, errors, ends, and all the paths."""

from __future__ import annotations

import asyncio
import contextlib
import io
import re
import socket
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp.test_utils import make_mocked_request

from baton.api.errors import ConfigError, OverloadedError
from baton.api.outputs import FinishReason
from baton.link.words import CancelCommand, PrefillCommand
from router.api.http import decoding, exchange
from router.api.http.errors import error_response
from router.api.http_server import SERVED, HttpServer
from router.gate.admission import make_admission
from router.gate.admission_options import AdmissionOptions
from router.intake.answers import long_answers
from router.intake.metrics import RouterMetrics
from router.names.metrics_page import MetricsPage
from tests.fakes.router.http_scene import MODEL, TOKENIZER, HttpScene, events_of, on_http, until
from tests.fakes.router.intakes import make_intake
from tests.fakes.router.name_tables import one_base

pytestmark = pytest.mark.medium

MESSAGES = [{"role": "user", "content": "x"}]
CHAT = "/v1/chat/completions"
STREAM_BODY = (
    b'{"model": "demo", "prompt": "x", "stream": true, "logprobs": 20, "max_tokens": 10000}'
)
STREAM_REQUEST = (
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n" % len(STREAM_BODY)
) + STREAM_BODY
NUM_CHARS = 10_000


async def error_of(response: aiohttp.ClientResponse) -> dict[str, Any]:
    error: dict[str, Any] = (await response.json())["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]
    return error


@on_http()
async def test_a_stream_sends_each_piece_when_it_comes_and_ends_with_done(scene: HttpScene) -> None:
    reply = scene.post(stream=True, max_tokens=50, stream_options={"include_usage": True})
    command = await scene.command()
    index = scene.say(command, 0, "def")
    response = await reply
    assert response.headers["Content-Type"].startswith("text/event-stream")
    first = await response.content.readuntil(b"\n\n")
    (event,) = events_of(first.decode())
    assert event["choices"][0]["text"] == "def"
    assert event["usage"] is None
    scene.say(command, index, " read_config(path)", last=FinishReason.STOP)
    *chunks, usage, done = events_of((await response.read()).decode())
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == " read_config(path)"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "stop"
    assert all(chunk["id"] == event["id"] for chunk in (*chunks, usage))
    assert usage["choices"] == []
    num_tokens = index + len(TOKENIZER.encode(" read_config(path)"))
    assert usage["usage"]["completion_tokens"] == num_tokens
    assert usage["usage"]["total_tokens"] == num_tokens + 1
    assert done == "[DONE]"


@on_http()
async def test_without_the_option_no_chunk_speaks_of_usage(scene: HttpScene) -> None:
    reply = scene.post(CHAT, messages=MESSAGES, stream=True)
    scene.say(await scene.command(), 0, "one two", last=FinishReason.LENGTH)
    *chunks, done = events_of(await (await reply).text())
    assert done == "[DONE]"
    assert all("usage" not in chunk and "baton" not in chunk for chunk in chunks)
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert all("role" not in chunk["choices"][0]["delta"] for chunk in chunks[1:])


@pytest.mark.parametrize("path", ["/v1/completions", CHAT])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_ends_the_calls_on_the_nodes(
    path: str, n: int, stream: bool
) -> None:
    @on_http()
    async def run(scene: HttpScene) -> None:
        prompt = {"messages": MESSAGES} if path == CHAT else {}
        reply = asyncio.ensure_future(scene.post(path, stream=stream, n=n, **prompt))
        for number in range(n):
            scene.say(await scene.command(number + 1), 0, "one")
        if stream:
            response = await reply
            await response.content.readuntil(b"\n\n")
            response.close()
        else:
            await asyncio.sleep(0)
            reply.cancel()
        await until(lambda: scene.dispatcher.num_open == 0)
        for node in (scene.prefill, scene.decode):
            cancelled = {command.request_id for command in node.of(CancelCommand)}
            assert cancelled == {c.request_id for c in scene.prefill.of(PrefillCommand)}
            assert len(cancelled) == n
        assert f'requests_total{{outcome="cancelled"}} {n}.0' in scene.metrics.text().decode()

    run()


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("RESOURCE_EXHAUSTED", 429, "rate_limit_error"),
        ("UNAVAILABLE", 503, "service_unavailable_error"),
        ("DEADLINE_EXCEEDED", 504, "timeout_error"),
        ("CANCELLED", 499, "cancelled_error"),
        ("FAILED", 500, "internal_error"),
    ],
)
def test_what_fails_on_a_node_has_a_status_or_ends_the_stream(
    code: str, status: int, kind: str
) -> None:
    @on_http()
    async def run(scene: HttpScene) -> None:
        reply = scene.post(stream=True)
        scene.fail(await scene.command(), code, "no luck")
        response = await reply
        assert response.status == status
        error = await error_of(response)
        assert (error["type"], error["message"].startswith("no luck")) == (kind, True)
        assert ("Retry-After" in response.headers) == (status in (429, 503))

        reply = scene.post(stream=True)
        command = await scene.command(2)
        scene.say(command, 0, "one")
        response = await reply
        scene.fail(command, code, "no luck")
        *_, last = events_of(await response.text())
        assert response.status == 200
        assert last["error"]["type"] == kind

    run()


@on_http()
async def test_a_refusal_says_how_many_whole_seconds_to_wait(scene: HttpScene) -> None:
    limit = AdmissionOptions(max_open_requests=1)
    scene.dispatcher.admission = make_admission(scene.pool, limit)
    reply = scene.post()
    command = await scene.command()
    response = await scene.post()
    assert response.status == 429
    assert int(response.headers["Retry-After"]) >= 1
    assert (await error_of(response))["type"] == "rate_limit_error"
    scene.say(command, 0, "x", last=FinishReason.STOP)
    assert (await reply).status == 200


@pytest.mark.parametrize(("delay_s", "header"), [(0.1, "1"), (2.0, "2"), (2.3, "3")])
def test_a_wait_is_rounded_up(delay_s: float, header: str) -> None:
    error = OverloadedError("full")
    error.retry_delay_s = delay_s
    request = make_mocked_request("POST", "/v1/completions")
    assert error_response(request, error).headers["Retry-After"] == header


@on_http()
async def test_all_outputs_of_a_request_are_seeded_and_named_one_by_one(scene: HttpScene) -> None:
    reply = scene.post(n=2, seed=7, prompt=["a", "b"])
    for number in range(4):
        scene.say(await scene.command(number + 1), 0, f"output{number}", last=FinishReason.STOP)
    response = await reply
    commands = scene.prefill.of(PrefillCommand)
    assert [command.sampling_params.seed for command in commands] == [7, 8, 7, 8]
    name = response.headers["X-Request-Id"]
    assert [c.request_id for c in commands] == [name, *(f"{name}-{i}" for i in (1, 2, 3))]
    body = await response.json()
    assert [c["text"] for c in body["choices"]] == [f"output{i}" for i in range(4)]
    assert body["usage"]["prompt_tokens"] == 2
    assert body["id"] == f"cmpl-{name}"


@on_http()
async def test_a_chat_gets_as_many_tokens_as_fit_and_a_completion_sixteen(scene: HttpScene) -> None:
    requests: list[tuple[str, dict[str, Any], int | None]] = [
        (CHAT, {"messages": MESSAGES}, None),
        (CHAT, {"messages": MESSAGES, "max_completion_tokens": 9, "max_tokens": 8}, 9),
        ("/v1/completions", {}, 16),
    ]
    for number, (path, fields, expected) in enumerate(requests):
        reply = scene.post(path, **fields)
        command = await scene.command(number + 1)
        room = scene.pool.max_model_len - len(command.prompt_token_ids)
        assert command.sampling_params.max_tokens == (expected or room)
        scene.say(command, 0, "x", last=FinishReason.STOP)
        assert (await reply).status == 200


@on_http()
async def test_a_receipt_comes_when_it_is_asked_for(scene: HttpScene) -> None:
    for number, stream in enumerate((False, True)):
        reply = scene.post(stream=stream, include_receipt=True)
        scene.say(await scene.command(number + 1), 0, "one two", last=FinishReason.STOP)
        response = await reply
        body = events_of(await response.text())[-2] if stream else await response.json()
        (receipt,) = body["baton"]["receipts"]
        assert (receipt["prefill_node"], receipt["decode_node"]) == ("p0", "d0")


@on_http()
async def test_names_of_requests_are_the_clients_own(scene: HttpScene) -> None:
    session, url = scene.session, scene.url
    headers = {"X-Request-Id": "mine"}
    for path in ("/health", "/v1/models", "/nowhere"):
        async with session.get(url + path, headers=headers) as response:
            assert response.headers["X-Request-Id"] == "mine"
    async with session.get(url + "/health", headers={"X-Request-Id": "x" * 129}) as response:
        assert response.status == 400
        assert (await error_of(response))["message"].startswith("X-Request-Id: must have at most")


@on_http()
async def test_what_is_no_request_of_the_api_has_an_error_in_its_shape(scene: HttpScene) -> None:
    session, url = scene.session, scene.url
    too_large = io.BytesIO(b'{"model": "' + b"x" * (9 * 2**20))
    as_json = {"Content-Type": "application/json"}
    requests: list[tuple[str, str, dict[str, Any], int]] = [
        ("GET", "/v1/nothing", {}, 404),
        ("GET", "/v1/models/other", {}, 404),
        ("GET", "/v1/completions", {}, 405),
        ("POST", "/v1/completions", {"json": {"model": "other", "prompt": "x"}}, 404),
        ("POST", "/v1/completions", {"data": b"{}"}, 415),
        ("POST", "/v1/completions", {"data": b"{", "headers": as_json}, 400),
        ("POST", "/v1/completions", {"data": too_large, "headers": as_json}, 413),
    ]
    for method, path, arguments, status in requests:
        async with session.request(method, url + path, **arguments) as response:
            assert (response.status, path) == (status, path)
            await error_of(response)


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        ("/v1/completions", {"prompt": []}, "prompt: must have at least 1 prompt, got 0"),
        ("/v1/completions", {"prompt": ["a", 1]}, "prompt: must be all texts, all token ids"),
        ("/v1/completions", {"prompt": [5000]}, "prompt: token ids must be 0 to 4095"),
        ("/v1/completions", {"prompt": ["x"] * 1025}, "prompt: must make 1 to 1024 outputs"),
        (
            "/v1/completions",
            {"best_of": 2},
            "best_of: must be n (1) or absent without use_beam_search",
        ),
        ("/v1/completions", {"suffix": "x"}, "suffix: is not supported"),
        ("/v1/completions", {"logprobs": 21}, "logprobs: must be 20 or less, got 21"),
        (
            "/v1/completions",
            {"stream_options": {"include_usage": True}},
            "stream_options: is for stream: true only",
        ),
        ("/v1/completions", {"max_tokens": 0}, "max_tokens: must be 1 or more, got 0"),
        (CHAT, {"messages": []}, "messages: must have at least 1 message, got 0"),
        (CHAT, {"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs: needs logprobs: true"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0]: has an image, but this model reads text only",
        ),
        (
            CHAT,
            {"messages": MESSAGES, "tool_choice": "required"},
            "tool_choice: is 'required', but there are no tools",
        ),
        (
            CHAT,
            {"messages": MESSAGES, "chat_template_kwargs": {"messages": []}},
            "chat_template_kwargs: must not have messages",
        ),
        (
            CHAT,
            {
                "messages": MESSAGES,
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {"type": "thing"}},
                },
            },
            "response_format.json_schema.schema: Invalid type: thing",
        ),
    ],
)
def test_a_wrong_request_reaches_no_node(path: str, fields: dict[str, Any], message: str) -> None:
    @on_http()
    async def run(scene: HttpScene) -> None:
        response = await scene.post(path, **fields)
        assert response.status == 400
        error = await error_of(response)
        assert error["message"].startswith(message)
        assert error["param"] == message.partition(": ")[0]
        assert scene.prefill.of(PrefillCommand) == []

    run()


@on_http(pair=False)
async def test_ready_says_why_not_and_health_does_not_mind(scene: HttpScene) -> None:
    async with scene.session.get(scene.url + "/health") as response:
        assert response.status == 200
    async with scene.session.get(scene.url + "/ready") as response:
        assert response.status == 503
        assert (await error_of(response))["message"] == "no prefill node has joined the router"
    response = await scene.post()
    assert response.status == 503
    assert "Retry-After" in response.headers


@on_http()
async def test_a_router_whose_workers_are_starting_is_not_ready(scene: HttpScene) -> None:
    scene.intake.reader.is_starting = True
    async with scene.session.get(scene.url + "/ready") as response:
        assert response.status == 503
        message = (await error_of(response))["message"]
        assert message == "the processes that read requests are starting"


@on_http()
async def test_ready_models_and_metrics_of_a_router_that_serves(scene: HttpScene) -> None:
    session, url = scene.session, scene.url
    async with session.get(url + "/ready") as response:
        assert response.status == 200
    async with session.get(url + "/v1/models") as response:
        models = await response.json()
    assert models["object"] == "list"
    async with session.get(f"{url}/v1/models/{MODEL}") as response:
        assert models["data"] == [await response.json()]
    assert models["data"][0]["id"] == MODEL
    async with session.get(url + "/metrics") as response:
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        assert 'baton_router_nodes{role="decode",state="ready"} 1.0' in await response.text()


@on_http()
async def test_other_origins_are_not_answered_unless_an_option_says_so(scene: HttpScene) -> None:
    async with scene.session.get(scene.url + "/health") as response:
        assert not any(name.startswith("Access-Control") for name in response.headers)


@on_http(cors_origin="https://a.example")
async def test_a_browsers_preflight_and_call(scene: HttpScene) -> None:
    asks = {
        "Origin": "https://a.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "content-type,authorization",
    }
    async with scene.session.options(scene.url + CHAT, headers=asks) as response:
        assert response.status == 204
        assert response.headers["Access-Control-Allow-Headers"] == "content-type,authorization"
    reply = scene.post(stream=True)
    scene.say(await scene.command(), 0, "x", last=FinishReason.STOP)
    assert (await reply).headers["Access-Control-Allow-Origin"] == "https://a.example"


@on_http(timeout_s=0.05)
async def test_a_request_whose_time_is_up_is_told_so(scene: HttpScene) -> None:
    response = await scene.post()
    assert response.status == 504
    assert (await error_of(response))["message"] == "the request's deadline passed"


def test_an_address_that_is_taken_or_none_is_one_line() -> None:
    async def run() -> None:
        scene = HttpScene()
        intake = make_intake(scene.dispatcher, None, vocab_size=10, default_timeout_s=1.0)
        names, page = one_base(scene.dispatcher, intake), MetricsPage({"m": RouterMetrics()})
        async with scene.running():
            for listen in (scene.url.removeprefix("http://"), "here"):
                server = HttpServer(names, page)
                with pytest.raises(ConfigError, match=r"^http_listen: "):
                    await server.start(listen)

    asyncio.run(run())


@contextlib.asynccontextmanager
async def stream_with_small_buffers(scene: HttpScene) -> AsyncIterator[asyncio.StreamReader]:
    """A stream that was asked for and is not read; the nodes say more than all buffers take."""
    host, _, port = scene.url.removeprefix("http://").partition(":")
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        reader, writer = await asyncio.open_connection(sock=connection)
        writer.write(STREAM_REQUEST)
        top = tuple((token_id, -0.123456789) for token_id in range(256, 276))
        command = await scene.command()
        scene.say(command, 0, "x" * NUM_CHARS, last=FinishReason.LENGTH, top=top)
        yield reader
        writer.close()


@on_http()
async def test_a_reader_that_stands_still_is_not_written_to(scene: HttpScene) -> None:
    async with stream_with_small_buffers(scene) as reader:
        for _ in range(1000):
            await asyncio.sleep(0.001)
        assert scene.dispatcher.num_open == 1  # all has been said, and not been read
        data = b""
        while not data.endswith(b"0\r\n\r\n"):  # HTTP's own end
            data += await reader.read(2**20)
        assert b"data: [DONE]" in data
        assert b"".join(re.findall(rb'"text":"(x*)"', data)) == b"x" * NUM_CHARS
        # What waited came in few events.
        assert data.count(b"data: ") < len(TOKENIZER.encode("x" * NUM_CHARS)) / 2


@on_http(timeout_s=1)
async def test_a_reader_that_stands_still_for_too_long_is_cut_off(scene: HttpScene) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "READ_GRACE_S", 0.5)
        # At once: in a thread it may take longer than the grace to make what is to be read.
        patch.setattr(long_answers, "MAX_LOGPROBS_HERE", 10**9)
        async with stream_with_small_buffers(scene) as reader:
            await until(lambda: scene.dispatcher.num_open == 0)
            data = b""
            with contextlib.suppress(ConnectionResetError):
                while more := await reader.read(2**20):
                    data += more
            assert data.startswith(b"HTTP/1.1 200")
            assert b"DONE" not in data


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_is_no_error(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    @on_http()
    async def run(scene: HttpScene) -> None:
        for number in range(3):
            reply = asyncio.ensure_future(scene.post(stream=stream))
            command = await scene.command(number + 1)
            reply.cancel()
            scene.say(command, 0, "one", last=FinishReason.STOP)
            await until(lambda: scene.dispatcher.num_open == 0)

    run()
    assert caplog.records == []


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", b'{"model": "demo", "prompt": "a\xff"}', "prompt"),
        (CHAT, b'{"model": "demo", "messages": [{"role": "user", "content": "a\xff"}]}', "content"),
    ],
)
def test_text_that_is_no_unicode_is_the_clients_error(path: str, body: bytes, param: str) -> None:
    """Regression: such texts were internal errors, with tracebacks in the log."""

    @on_http()
    async def run(scene: HttpScene) -> None:
        headers = {"Content-Type": "application/json"}
        response = await scene.session.post(scene.url + path, data=body, headers=headers)
        assert response.status == 400
        assert (await error_of(response))["param"] == param

    run()


def test_a_server_that_has_started_knows_the_fields_of_every_body() -> None:
    """The first request of each kind waited 7 ms for the annotations of its fields."""

    async def scenario() -> None:
        decoding._known.cache_clear()
        decoding._objects.cache_clear()
        async with HttpScene().running() as scene:
            num_known = decoding._known.cache_info().misses
            for path in SERVED:
                reply = await scene.post(path, model=5, response_format={}, stream_options={})
                assert reply.status == 400
            assert decoding._known.cache_info().misses == num_known
            assert num_known > len(SERVED)

    asyncio.run(scenario())
