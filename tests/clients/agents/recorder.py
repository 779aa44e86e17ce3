"""Recorder: passes requests on to a router, and keeps each with its answer.

Standing between an agent and the router, a recorder sees all that the agent asks. Requests for any
other host are refused and kept, too: a proxy for them, so that an agent that calls home is seen.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web

_ENDING = re.compile(r'"(?:finish_reason|stop_reason|reason)": ?"(\w+)"')
_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "host"}


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a prompt as an answer counts them."""

    prompt_tokens: int
    cached_tokens: int


@dataclass(slots=True)
class Exchange:
    """A request and its answer.

    Attributes:
        answer: bytes of the answer that have come so far.
    """

    method: str
    path: str
    body: bytes
    status: int = 0
    answer: bytes = b""

    def usage(self) -> Usage | None:
        """Return the usage that the answer ends with; None where there is none.

        (The one that a message begins with does not know yet what the cache had.)
        """
        found: dict[str, int] = {}
        for event in self._events():
            inner = event.get("response") or event
            found |= inner.get("usage") or {}
        return _usage(found) if found else None

    def endings(self) -> set[str]:
        """Return why the answer ended, in the words of its API."""
        return set(_ENDING.findall(self.answer.decode()))

    def _events(self) -> Iterator[dict[str, Any]]:
        """List the JSON objects of the answer: a single one, or one per event of a stream."""
        text = self.answer.decode()
        lines = text.splitlines() if "data: " in text else [f"data: {text}"]
        for line in lines:
            content = line.removeprefix("data: ")
            if line != content and content.startswith("{"):
                yield json.loads(content)


def _usage(fields: dict[str, Any]) -> Usage:
    """Read the usage of a chat, of a response, or of a message."""
    if "prompt_tokens" in fields:
        details = fields.get("prompt_tokens_details") or {}
        return Usage(fields["prompt_tokens"], details.get("cached_tokens", 0))
    if "cache_read_input_tokens" in fields:
        cached = fields["cache_read_input_tokens"]
        return Usage(fields["input_tokens"] + cached, cached)
    details = fields.get("input_tokens_details") or {}
    return Usage(fields["input_tokens"], details.get("cached_tokens", 0))


class Recorder:
    """An HTTP server of an event loop.

    Args:
        router: host:port of the router's HTTP API.

    Attributes:
        exchanges: all that was asked of the router, in order.
        elsewhere: hosts that somebody asked for.
    """

    def __init__(self, router: str) -> None:
        self._router = router
        self.exchanges: list[Exchange] = []
        self.elsewhere: list[str] = []

    async def serve(self, address: str) -> None:
        """Listen at an address until cancelled."""
        host, port = address.rsplit(":", 1)
        server = web.Server(self._handle, access_log=None)
        async with aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None), auto_decompress=False
        ) as session:
            self._session = session
            runner = web.ServerRunner(server)
            await runner.setup()
            try:
                await web.TCPSite(runner, host, int(port)).start()
                await asyncio.Event().wait()
            finally:
                await runner.cleanup()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.method == "CONNECT" or request.raw_path.startswith("http"):
            self.elsewhere.append(request.raw_path)
            return web.Response(status=403, text="nothing but the router can be reached")
        body = await request.read()
        exchange = Exchange(request.method, request.raw_path, body)
        self.exchanges.append(exchange)
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _HOP_BY_HOP}
        url = f"http://{self._router}{request.raw_path}"
        async with self._session.request(request.method, url, data=body, headers=headers) as answer:
            exchange.status = answer.status
            headers = {k: v for k, v in answer.headers.items() if k.lower() not in _HOP_BY_HOP}
            response = web.StreamResponse(status=answer.status, headers=headers)
            with contextlib.suppress(ConnectionResetError):  # the agent has gone away
                await response.prepare(request)
                async for piece in answer.content.iter_any():
                    exchange.answer += piece
                    await response.write(piece)
                await response.write_eof()
            return response
