"""Unit tests of callers over HTTP: sessions, priorities, API keys."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from baton.access.access import Access
from baton.access.api_keys import entry_text
from baton.api.outputs import FinishReason
from tests.fakes.router.http_scene import MODEL, HttpScene, on_http

pytestmark = pytest.mark.medium


@on_http()
async def test_session_and_priority_reach_the_call_from_body_or_header(scene: HttpScene) -> None:
    bodies: list[dict[str, Any]] = [{"user": "me"}, {"priority": -3}, {"session_id": "of body"}]
    for number, body in enumerate(bodies):
        scene.headers = {"X-Session-Id": "of header"} if number else {}
        reply = scene.post(**body)
        scene.say(await scene.command(number + 1), 0, "x", last=FinishReason.STOP)
        assert (await reply).status == 200
    assert [(call.terms.session_id, call.terms.priority) for call in scene.dispatcher.calls] == [
        ("", 0),
        ("of header", -3),
        ("of body", 0),
    ]


def keys_of(tmp_path: Path) -> Access:
    path = tmp_path / "keys.toml"
    entries = (entry_text("secret-1", "alice"), entry_text("secret-2", "ops", roles=["look"]))
    path.write_text("\n".join(entries), encoding="utf-8")
    return Access(keys_file=path)


def test_only_who_brings_a_key_is_served_and_probes_need_none(tmp_path: Path) -> None:
    @on_http(access=keys_of(tmp_path), cors_origin="*")
    async def run(scene: HttpScene) -> None:
        session, url = scene.session, scene.url
        paths = ["/v1/models", f"/v1/models/{MODEL}", "/v1/nothing", "/metrics", "/nothing"]
        for headers in ({}, {"Authorization": "Bearer secret"}, {"Authorization": "secret-1"}):
            for get in paths:
                async with session.get(url + get, headers=headers) as response:
                    await check_refused(response)
            scene.headers = headers
            for post in ("/v1/completions", "/v1/chat/completions"):
                await check_refused(await scene.post(post))
        for free in ("/health", "/ready"):
            async with session.get(url + free) as response:
                assert response.status == 200
        preflight = {"Access-Control-Request-Method": "POST"}
        async with session.options(url + "/v1/completions", headers=preflight) as response:
            assert response.status == 204  # browsers ask without the key
        assert scene.dispatcher.calls == []

        scene.headers = {"Authorization": "Bearer secret-1"}
        reply = scene.post()
        scene.say(await scene.command(), 0, "x", last=FinishReason.STOP)
        assert (await reply).status == 200
        assert [call.terms.principal.name for call in scene.dispatcher.calls] == ["alice"]

    run()


async def check_refused(response: aiohttp.ClientResponse) -> None:
    assert response.status == 401
    assert response.headers["WWW-Authenticate"] == "Bearer"
    error = (await response.json())["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
    assert "secret" not in error["message"]


@on_http()
async def test_headers_that_are_no_text_are_refused_before_they_reach_a_node(
    scene: HttpScene,
) -> None:
    host, port = scene.url.removeprefix("http://").split(":")
    body = b'{"model": "demo", "prompt": "x"}'
    for header, name in ((b"X-Request-Id", b"X-Request-Id"), (b"X-Session-Id", b"session_id")):
        for value in (b"a\xffb", b"a\tb"):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
                b"Content-Type: application/json\r\nContent-Length: %d\r\n%s: %s\r\n\r\n%s"
                % (len(body), header, value, body)
            )
            reply = await reader.read()
            writer.close()
            assert reply.startswith(b"HTTP/1.1 400 ")
            assert b'"%s: must have printable characters only, got ' % name in reply
    assert scene.dispatcher.calls == []


def test_of_two_authorizations_none_counts(tmp_path: Path) -> None:
    @on_http(access=keys_of(tmp_path))
    async def run(scene: HttpScene) -> None:
        right, wrong = ("Authorization", "Bearer secret-1"), ("Authorization", "Bearer secret")
        for headers in ([right, wrong], [wrong, right], [right, right]):
            async with scene.session.get(f"{scene.url}/v1/models", headers=headers) as response:
                await check_refused(response)

    run()


def test_what_is_not_http_is_not_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    @on_http(access=keys_of(tmp_path))
    async def run(scene: HttpScene) -> None:
        host, _, port = scene.url.removeprefix("http://").partition(":")
        for wrong in (
            b"GET / HTTP/1.1\r\nHost: x\r\nAuthorization:\r\n Bearer secret-1\r\n\r\n",
            b"GET / HTTP/9.9\r\n\r\n",
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        ):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(wrong)
            assert (await reader.read()).split(b" ")[1] == b"400"
            writer.close()

    run()
    assert caplog.records == []
