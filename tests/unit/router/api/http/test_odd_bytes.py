"""Send bytes that are not UTF-8, and controls, wherever HTTP lets a stranger put them."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path

import pytest

from baton.access.access import Access
from baton.access.api_keys import draw_key, entry_text
from baton.access.audit_log import AuditLog
from baton.serving.access_log import AccessLog
from tests.fakes.router.http_scene import HttpScene, on_http

# Not UTF-8 (a lone byte, a cut character, half a surrogate pair), C1, bidirectional, unassigned.
ODD = (b"\xff", b"\xe2\x82", b"\xed\xa0\x80", b"\xc2\x9b31m", b"\xe2\x80\xae", b"\xf4\x8f\xbf\xbf")
HEADERS = (
    "Host",
    "Authorization",
    "X-Api-Key",
    "X-Request-Id",
    "X-Session-Id",
    "Content-Type",
    "Content-Encoding",
    "Accept",
    "Expect",
    "Origin",
    "Access-Control-Request-Method",
    "Access-Control-Request-Headers",
    "Traceparent",
    "Tracestate",
    "Cookie",
    "Range",
    "If-None-Match",
    "Upgrade",
    "Connection",
    "Transfer-Encoding",
)
PATHS = ("/v1/completions", "/v1/messages", "/ui", "/metrics", "/nothing")
TARGETS = (b"/v1/models/%s", b"/ui/requests/%s", b"/ui/requests/x?tenant=%s", b"/%s", b"/ui/%s")


def _requests(key: str) -> list[bytes]:
    """Return requests with each of the odd bytes in each header of each path, and each target."""
    own = f"Authorization: Bearer {key}\r\n".encode() if key else b""
    body = json.dumps({"model": "demo", "prompt": "x", "max_tokens": 0}).encode()
    tail = b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
    json_type = b"Content-Type: application/json\r\n"
    found = []
    for odd in ODD:
        for header in HEADERS:
            for path in PATHS:
                for method in ("GET", "POST", "OPTIONS"):
                    host = "" if header == "Host" else "Host: x\r\n"
                    head = f"{method} {path} HTTP/1.1\r\n{host}{header}: ".encode() + odd + b"\r\n"
                    mine = b"" if header in ("Authorization", "X-Api-Key") else own
                    typed = b"" if header == "Content-Type" else json_type
                    found.append(head + mine + typed + tail)
        for target in TARGETS:
            forms = (odd, b"".join(b"%%%02X" % byte for byte in odd))
            rest = b" HTTP/1.1\r\nHost: x\r\n" + own + b"\r\n"
            found += [b"GET " + target % form + rest for form in forms]
        found.append(b"GET / HTTP/1.1\r\nHost: x\r\nX-" + odd + b": x\r\n\r\n")
        found.append(b"G" + odd + b" / HTTP/1.1\r\nHost: x\r\n\r\n")
        found.append(b"GET / HTTP/1." + odd + b"\r\n\r\n")
    return found


async def _statuses(url: str, requests: list[bytes]) -> dict[bytes, bytes]:
    """Return the answers' status lines; each request has its own connection."""
    host, port = url.removeprefix("http://").split(":")
    answers = {}
    for request in requests:
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(request)
        answers[request] = await reader.readline()
        writer.close()
    return answers


def _check(answers: dict[bytes, bytes], caplog: pytest.LogCaptureFixture) -> None:
    wrong = {r: a for r, a in answers.items() if a.split(b" ")[1][:1] not in (b"2", b"4")}
    assert not wrong
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []


@on_http(cors_origin="*")
async def test_odd_bytes_are_answered_in_one_line(
    scene: HttpScene, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    _check(await _statuses(scene.url, _requests("")), caplog)


def test_odd_bytes_are_audited_and_logged_safely(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key, keys, audited = draw_key(), tmp_path / "keys.toml", tmp_path / "audit.jsonl"
    keys.write_text(entry_text(key, "one", roles=("infer", "look")), encoding="utf-8")
    audit = AuditLog(str(audited), program="router")
    access = Access(keys_file=keys, audit=audit, model="demo")

    @on_http(access=access, access_log=AccessLog("demo", is_on=True))
    async def run(scene: HttpScene) -> None:
        _check(await _statuses(scene.url, _requests(key)), caplog)

    caplog.set_level(logging.INFO)
    run()
    audit.close()
    lines = audited.read_bytes().splitlines()
    assert lines
    assert all(isinstance(json.loads(line.decode("ascii")), dict) for line in lines)
